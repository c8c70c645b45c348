"""What a trainer asks of the gradient work of a step, however that is done.

`streamed.py` does it for a policy with one update per step, `passes.py` for one with several, and `replay.py` for a
committed step that is trained again.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from flexmarl.core.ids import HolderId, ObjectKey, SampleKey
from flexmarl.core.messages import CacheSealed, GradientAccumulated, UpdateApplied
from flexmarl.core.protocols import Lease
from flexmarl.scheduling import ReadySample
from flexmarl.training.state import PolicyUpdate

GradientFact = GradientAccumulated | CacheSealed | UpdateApplied


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedWork:
    """What an incarnation worked on when it died."""

    num_deaths: int
    """How often an incarnation has died with it."""
    doing: str


class Work(Protocol):
    """The gradient work of one policy's step. Its methods are handlers."""

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens that could be worked on now."""
        ...

    @property
    def is_needed(self) -> bool:
        """It wants the process group although it may have no backlog."""
        ...

    @property
    def is_done(self) -> bool:
        """Nothing more is to do, if no further sample is added."""
        ...

    @property
    def is_between_updates(self) -> bool:
        """The process group holds weights that are neither those before the step nor those after it."""
        ...

    @property
    def seal_key(self) -> ObjectKey | None:
        """Gradient cache that the next incarnation continues from."""
        ...

    def advance(self) -> None:
        """Begin the next command or store operation, if there is one."""
        ...

    def take(self, fact: GradientFact) -> None:
        """Handle the answer to a command."""
        ...

    def leave(self) -> bool:
        """Return whether the idle process group may end; False when the gradient cache is being sealed first."""
        ...

    def died(self, busy_with: str | None) -> InterruptedWork:
        """Count a death while it was busy with this."""
        ...

    def recover(self, dead_holder: HolderId) -> None:
        """Go back to what survives a dead incarnation."""
        ...

    def result(self) -> PolicyUpdate:
        """Return the newest weights, with what the step did for them so far as they are updated."""
        ...


class StepWork(Work, Protocol):
    """The gradient work of a step that is being generated."""

    def add_ready(self, samples: list[ReadySample]) -> None:
        """Take the samples of a closed group."""
        ...

    def set_open_groups(self, num_open: int) -> None:
        """So many groups of the step may still close."""
        ...

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        ...

    def finish(self, policy_version: int) -> None:
        """Every sample has been added: train what is left, and update to `policy_version`."""
        ...


class DeathCounts:
    """How often process groups have died while they worked on something."""

    def __init__(self) -> None:
        """Count from 0."""
        self._counts: Counter[Hashable] = Counter()

    def count(self, items: Iterable[Hashable]) -> int:
        """Add a death with all of `items`; return the deaths of what has the most.

        Others' progress in between does not count: what died with the update trains its unsealed samples again first.
        """
        self._counts.update(items)
        return max(self._counts.values(), default=0)

    def finished(self, items: Iterable[Hashable]) -> None:
        """Forget what has been done."""
        for item in items:
            self._counts.pop(item, None)


def describe_rows(micro_batch_id: str, keys: Iterable[SampleKey]) -> str:
    """Name a micro-batch and its first rows."""
    names = [str(key) for key in keys]
    return f"micro-batch {micro_batch_id} (rows {', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def describe_lease(lease: Lease | None, busy_with: str | None) -> str:
    """Say what a process group worked on."""
    if lease is not None:
        return describe_rows(lease.micro_batch_id, lease.keys)
    return "no micro-batch" if busy_with is None else f"{busy_with} in flight"
