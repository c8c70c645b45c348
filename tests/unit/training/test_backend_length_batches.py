"""How samples are grouped by length, beside every possible cut."""

from itertools import combinations, pairwise

import pytest

from flexmarl.training.backends.torch.length_batches import cut_by_length

pytestmark = pytest.mark.unit


def cost(batches: list[list[int]], lengths: list[int], overhead_tokens: int) -> int:
    return sum(overhead_tokens + max(lengths[index] for index in batch) * len(batch) for batch in batches)


def cheapest(lengths: list[int], overhead_tokens: int) -> int:
    """The least cost over all cuts of the sorted lengths."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    costs = []
    for count in range(len(order)):
        for cut in combinations(range(1, len(order)), count):
            ends = [0, *cut, len(order)]
            batches = [order[start:end] for start, end in pairwise(ends)]
            costs.append(cost(batches, lengths, overhead_tokens))
    return min(costs)


@pytest.mark.parametrize("overhead_tokens", [0, 5, 30, 1000])
@pytest.mark.parametrize("lengths", [[7], [3, 3, 3], [1, 50, 2, 40, 3, 3], [10, 11, 12, 13, 60, 61, 9], [5, 1, 4, 2]])
def test_is_the_cheapest_cut(lengths: list[int], overhead_tokens: int) -> None:
    batches = cut_by_length(lengths, overhead_tokens=overhead_tokens, max_tokens=10**6)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert cost(batches, lengths, overhead_tokens) == cheapest(lengths, overhead_tokens)


def test_keeps_short_samples_away_from_a_long_one() -> None:
    assert cut_by_length([500, 10, 10, 11], overhead_tokens=64, max_tokens=4096) == [[1, 2, 3], [0]]


def test_a_batch_stays_within_its_tokens_or_is_one_sample() -> None:
    batches = cut_by_length([10] * 7 + [90], overhead_tokens=64, max_tokens=30)
    assert batches == [[0, 1, 2], [3, 4, 5], [6], [7]]


def test_nothing_gives_nothing() -> None:
    assert cut_by_length([], overhead_tokens=1, max_tokens=1) == []


def test_many_long_lengths_stay_within_a_few_percent_of_no_padding() -> None:
    lengths = list(range(1, 2001, 3))
    batches = cut_by_length(lengths, overhead_tokens=0, max_tokens=4096)
    assert cost(batches, lengths, 0) <= 1.02 * sum(lengths) + 2000
