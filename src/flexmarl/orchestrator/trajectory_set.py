"""What a pool of trajectories is given, where it keeps results, and what it reports."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flexmarl.core.ids import Purpose, TrajectoryKey
from flexmarl.core.protocols import StoredTrajectory, WorkerHandle
from flexmarl.core.records import OutcomeRecord, TrajectoryFailure, TurnRow


class TrajectorySink(Protocol):
    """Where attempts, turns and ends of trajectories are kept; each call ends by calling `then` from the inbox."""

    def begin_attempt(self, key: TrajectoryKey, then: Callable[[int], None]) -> None:
        """Give the number of the next attempt."""
        ...

    def put_turn(self, row: TurnRow, then: Callable[[], None]) -> None:
        """Keep a turn."""
        ...

    def record_outcome(self, outcome: OutcomeRecord, then: Callable[[], None]) -> None:
        """Keep an attempt's outcome."""
        ...

    def record_failure(self, failure: TrajectoryFailure, then: Callable[[], None]) -> None:
        """Keep that a trajectory failed for good."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTrajectory:
    """How a trajectory ended."""

    key: TrajectoryKey
    turns: tuple[TurnRow, ...]
    """Of the last attempt, in key order; those that the outcome does not name were abandoned by the workflow."""
    outcome: OutcomeRecord | None
    failure: TrajectoryFailure | None
    """Exactly one of the two is set."""


OnEnded = Callable[[EndedTrajectory], None]
"""Called once for each trajectory of a set."""


class WorkerChoice(Protocol):
    """Which episode worker runs the next attempt."""

    def choose(self) -> WorkerHandle | None:
        """Return a worker that takes work, or None while there is none."""
        ...

    def began(self, handle: WorkerHandle) -> None:
        """An attempt was given to a worker."""
        ...

    def ended(self, handle: WorkerHandle) -> None:
        """An attempt that was given to it has ended, or was given up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySet:
    """What to run."""

    purpose: Purpose
    min_version: int
    """Lowest policy_version that may generate a token."""
    max_version: int
    queries: Mapping[int, Mapping[str, object]]
    keys: tuple[TrajectoryKey, ...]
    """In the order in which they may start."""
    greedy: frozenset[TrajectoryKey] = frozenset()
    """Those that sample at temperature 0."""
    temperature: float | None = None
    """Replaces the temperature of every turn (evaluation); greedy ones stay at 0."""
    recorded: Mapping[TrajectoryKey, StoredTrajectory] = field(default_factory=dict)
    """Attempts of a run that was interrupted: they go on, and their recorded turns are not generated again."""
