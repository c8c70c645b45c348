"""Drawing tokens: the numbers, the distribution, the log-probs."""

import numpy as np
import pytest
import torch

from flexmarl.rollout.backends.sampling import SamplingBatch, draw_tokens, uniforms

pytestmark = pytest.mark.unit

MASK_64 = 2**64 - 1


def splitmix64(state: int) -> int:
    bits = state & MASK_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK_64
    return bits ^ (bits >> 31)


def batch_of(
    numbers: list[float], *, temperature: float = 1.0, greedy: bool = False, top_p: float = 1.0, top_k: int = 100
) -> SamplingBatch:
    count = len(numbers)
    return SamplingBatch(
        temperatures=np.full(count, temperature, np.float32),
        is_greedy=np.full(count, greedy),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int64),
        uniforms=np.array(numbers),
    )


def test_uniforms_equal_splitmix64_in_plain_integers() -> None:
    golden = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**63 - 1, MASK_64]
    counters = [0, 5, 2**40, 1]
    expected = [
        (splitmix64(splitmix64(seed + golden) + (counter + 1) * golden) >> 32) / 2**32
        for seed, counter in zip(seeds, counters, strict=True)
    ]
    drawn = uniforms(np.array(seeds, np.uint64), np.array(counters, np.uint64))
    assert drawn.tolist() == expected


def test_splitmix64_is_the_published_one() -> None:
    # First output of the reference implementation for seed 1234567.
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317


def test_uniforms_are_uniform_along_seeds_and_along_counters() -> None:
    grid = uniforms(np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200, dtype=np.uint64), 200))
    counts, _ = np.histogram(grid, bins=20, range=(0.0, 1.0))
    # Chi-square with 19 degrees of freedom: 43.8 is the 0.999 quantile.
    assert ((counts - 2000.0) ** 2 / 2000.0).sum() < 43.8
    matrix = grid.reshape(200, 200)
    # Standard error of a correlation over 39 800 pairs is 0.005.
    assert abs(np.corrcoef(matrix[1:].ravel(), matrix[:-1].ravel())[0, 1]) < 0.025
    assert abs(np.corrcoef(matrix[:, 1:].ravel(), matrix[:, :-1].ravel())[0, 1]) < 0.025


def test_inverse_distribution_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).expand(6, 4)
    tokens, logprobs = draw_tokens(logits, batch_of([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.9999]))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 3]
    assert logprobs.tolist() == pytest.approx(np.log([0.1, 0.1, 0.2, 0.2, 0.3, 0.4]).tolist(), abs=1e-6)


def test_temperature_changes_distribution_and_logprob() -> None:
    logits = torch.tensor([[0.0, float(np.log(3.0))]])
    # At temperature 0.5 the odds of 1 to 3 become 1 to 9.
    tokens, logprobs = draw_tokens(logits.expand(2, 2), batch_of([0.099, 0.101], temperature=0.5))
    assert tokens.tolist() == [0, 1]
    assert logprobs.tolist() == pytest.approx([np.log(0.1), np.log(0.9)], abs=1e-6)


def test_greedy_takes_the_likeliest_at_temperature_one_whatever_the_cuts() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    tokens, logprobs = draw_tokens(logits, batch_of([0.0], greedy=True, top_p=0.1, top_k=1))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([np.log(0.5)], abs=1e-6)


def test_top_k_and_top_p_renormalise() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    # top_k = 2 leaves tokens 1 and 3 with 4/7 and 3/7, in the order of their ids.
    tokens, logprobs = draw_tokens(logits.expand(3, 4), batch_of([0.0, 0.57, 0.58], top_k=2))
    assert tokens.tolist() == [1, 1, 3]
    assert logprobs.tolist() == pytest.approx(np.log([4 / 7, 4 / 7, 3 / 7]).tolist(), abs=1e-6)
    # 0.4 + 0.3 < 0.75 <= 0.4 + 0.3 + 0.2: only token 0 is cut.
    tokens, logprobs = draw_tokens(logits.expand(2, 4), batch_of([0.0, 0.999], top_p=0.75))
    assert tokens.tolist() == [1, 3]
    assert logprobs.tolist() == pytest.approx(np.log([0.4 / 0.9, 0.3 / 0.9]).tolist(), abs=1e-6)


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    # Of 4/7 and 3/7, top_p = 0.5 keeps the first alone.
    tokens, logprobs = draw_tokens(logits.expand(2, 4), batch_of([0.0, 0.999], top_k=2, top_p=0.5))
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-32])
def test_impossible_tokens_are_never_drawn_at_the_ends(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.3, -torch.inf]])
    tokens, logprobs = draw_tokens(logits, batch_of([number]))
    assert tokens.item() in (1, 2)
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_shows_in_the_logprob_of_its_row_only(bad: float) -> None:
    logits = torch.zeros(2, 3)
    logits[0, 1] = bad
    _, logprobs = draw_tokens(logits, batch_of([0.5, 0.5]))
    assert torch.isfinite(logprobs).tolist() == [False, True]


def test_rows_of_different_options_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50, generator=generator)
    mixed = SamplingBatch(
        temperatures=np.array([1.0, 0.7, 1.3, 1.0], np.float32),
        is_greedy=np.array([False, False, False, True]),
        top_p=np.array([1.0, 0.9, 1.0, 1.0], np.float32),
        top_k=np.array([50, 50, 5, 50]),
        uniforms=np.array([0.3, 0.6, 0.9, 0.1]),
    )
    tokens, logprobs = draw_tokens(logits, mixed)
    for row in range(4):
        alone = SamplingBatch(
            temperatures=mixed.temperatures[row : row + 1],
            is_greedy=mixed.is_greedy[row : row + 1],
            top_p=mixed.top_p[row : row + 1],
            top_k=mixed.top_k[row : row + 1],
            uniforms=mixed.uniforms[row : row + 1],
        )
        token, logprob = draw_tokens(logits[row : row + 1], alone)
        assert token.item() == tokens[row].item()
        assert logprob.item() == pytest.approx(logprobs[row].item(), abs=1e-6)
