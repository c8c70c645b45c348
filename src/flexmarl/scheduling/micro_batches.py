"""How samples are cut into micro-batches, and a step's samples into optimizer updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flexmarl.core.ids import SampleKey
from flexmarl.core.rng import Rng

MIN_TAPER_FRAC: Final = 1 / 8
"""Smallest share of the token budget that a tapered micro-batch gets: below it, fixed costs would dominate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySample:
    """A sample that may be trained, as a cutting rule sees it."""

    key: SampleKey
    num_tokens: int
    """Prompt and response."""


def cut_in_order(ready: Sequence[ReadySample], *, max_tokens: int) -> list[tuple[ReadySample, ...]]:
    """Return micro-batches of at most `max_tokens` each, in the given order; a longer sample makes one of its own.

    Every sample is in exactly one micro-batch.
    """
    batches: list[tuple[ReadySample, ...]] = []
    current: list[ReadySample] = []
    num_tokens = 0
    for sample in ready:
        if current and num_tokens + sample.num_tokens > max_tokens:
            batches.append(tuple(current))
            current, num_tokens = [], 0
        current.append(sample)
        num_tokens += sample.num_tokens
    if current:
        batches.append(tuple(current))
    return batches


def cut_by_tokens(ready: Sequence[ReadySample], *, max_tokens: int) -> list[tuple[ReadySample, ...]]:
    """Do the same with samples of similar length together (ascending by tokens, then key), so that little is padded."""
    return cut_in_order(sorted(ready, key=lambda sample: (sample.num_tokens, sample.key)), max_tokens=max_tokens)


def taper_tokens(*, max_tokens: int, num_open_groups: int, mean_group_tokens: float) -> int:
    """Return the token budget of the next micro-batch while `num_open_groups` of the step may still close.

    Guided self-scheduling for one worker: no more than what is expected to come, so that the worker is free again when
    the last groups close; at least `MIN_TAPER_FRAC` of `max_tokens`. With no group open, nothing is waited for: all.
    Source: Polychronopoulos and Kuck (1987), "Guided self-scheduling".
    """
    if num_open_groups == 0:
        return max_tokens
    return max(1, round(max_tokens * MIN_TAPER_FRAC), min(max_tokens, round(num_open_groups * mean_group_tokens)))


def cut_into_updates(
    samples: Sequence[ReadySample], *, num_minibatches: int, max_tokens: int, rng: Rng
) -> list[list[tuple[ReadySample, ...]]]:
    """Return one pass over `samples` as the micro-batches of each optimizer update.

    The samples are shuffled from key order, so that the result depends on `rng` alone, and cut into `num_minibatches`
    parts whose sizes differ by at most one, larger ones first; fewer samples than parts make as many updates of one
    sample. Within a part samples of similar length come together.
    """
    order = sorted(samples, key=lambda sample: sample.key)
    rng.shuffle(order)
    num_parts = min(num_minibatches, len(order))
    updates = []
    start = 0
    for part in range(num_parts):
        size = len(order) // num_parts + (part < len(order) % num_parts)
        updates.append(cut_by_tokens(order[start : start + size], max_tokens=max_tokens))
        start += size
    return updates
