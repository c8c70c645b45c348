"""How ready samples are cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.core.ids import SampleKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySample:
    """A sample that may be trained, as a cutting rule sees it."""

    key: SampleKey
    num_tokens: int
    """Prompt and response."""


def cut_by_tokens(ready: Sequence[ReadySample], *, max_tokens: int) -> list[tuple[ReadySample, ...]]:
    """Return micro-batches of at most `max_tokens` each; a longer sample makes one of its own.

    Samples of similar length come together (ascending by tokens, then key), so that little is padded. Every sample is
    in exactly one micro-batch.
    """
    batches: list[tuple[ReadySample, ...]] = []
    current: list[ReadySample] = []
    num_tokens = 0
    for sample in sorted(ready, key=lambda sample: (sample.num_tokens, sample.key)):
        if current and num_tokens + sample.num_tokens > max_tokens:
            batches.append(tuple(current))
            current, num_tokens = [], 0
        current.append(sample)
        num_tokens += sample.num_tokens
    if current:
        batches.append(tuple(current))
    return batches
