"""How the samples of a micro-batch are grouped by length, so that little of what runs through the model is padding."""

from collections.abc import Sequence

MAX_DISTINCT_LENGTHS = 64
"""Lengths closer than a 64th of the longest count as equal, which bounds the search at 64 x 64 / 2 choices."""


def cut_by_length(lengths: Sequence[int], *, overhead_tokens: int, max_tokens: int) -> list[list[int]]:
    """Return batches of indices into `lengths`, each to be padded to its longest, at the least total cost.

    A batch costs its padded tokens plus `overhead_tokens`, the work that a forward and backward does whatever its size.
    The order of equal lengths is kept. A batch has at most `max_tokens` padded tokens, or one sample.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if not order:
        return []
    width = max(1, lengths[order[-1]] // MAX_DISTINCT_LENGTHS)
    buckets = [lengths[index] // width for index in order]
    ends = [place for place in range(1, len(order)) if buckets[place - 1] != buckets[place]] + [len(order)]
    batches: list[list[int]] = []
    for start, end in _cheapest(ends, [lengths[order[end - 1]] for end in ends], overhead_tokens, max_tokens):
        size = max(1, max_tokens // lengths[order[end - 1]])
        batches.extend(order[first : min(first + size, end)] for first in range(start, end, size))
    return batches


def _cheapest(
    ends: Sequence[int], longest: Sequence[int], overhead_tokens: int, max_tokens: int
) -> list[tuple[int, int]]:
    """Return the cheapest cut of samples sorted by length into ranges that end at some of `ends`.

    `longest[i]` is the length of the sample before `ends[i]`. Dynamic programming over the last range.
    """
    starts = [0, *ends]
    best = [0]
    choice: list[int] = []
    for place, end in enumerate(ends):
        costs = []
        for first in range(place + 1):
            padded = longest[place] * (end - starts[first])
            costs.append(best[first] + padded + overhead_tokens * -(-padded // max_tokens))
        best.append(min(costs))
        choice.append(costs.index(best[-1]))
    ranges = []
    place = len(ends)
    while place > 0:
        first = choice[place - 1]
        ranges.append((starts[first], starts[place]))
        place = first
    return ranges[::-1]
