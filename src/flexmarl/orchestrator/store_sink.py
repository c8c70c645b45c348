"""Keeps what trajectories of a step do in the experience store."""

from collections.abc import Callable

from flexmarl.core.ids import TrajectoryKey
from flexmarl.core.protocols import ExperienceStore, Inbox
from flexmarl.core.records import OutcomeRecord, TrajectoryFailure, TurnRow


class StoreSink:
    """Implements TrajectorySink on the experience store."""

    def __init__(self, store: ExperienceStore, inbox: Inbox) -> None:
        """Keep everything in `store`."""
        self._store = store
        self._inbox = inbox

    def begin_attempt(self, key: TrajectoryKey, then: Callable[[int], None]) -> None:
        """Give the number of the next attempt."""
        self._inbox.start(f"store.begin_attempt {key}", self._store.begin_attempt(key), then)

    def put_turn(self, row: TurnRow, then: Callable[[], None]) -> None:
        """Keep a turn."""
        self._inbox.start(f"store.put_turn {row.key}", self._store.put_turn(row), lambda _: then())

    def record_outcome(self, outcome: OutcomeRecord, then: Callable[[], None]) -> None:
        """Keep an attempt's outcome."""
        name = f"store.record_outcome {outcome.trajectory}"
        self._inbox.start(name, self._store.record_outcome(outcome), lambda _: then())

    def record_failure(self, failure: TrajectoryFailure, then: Callable[[], None]) -> None:
        """Keep that a trajectory failed for good."""
        name = f"store.record_failure {failure.trajectory}"
        self._inbox.start(name, self._store.record_failure(failure), lambda _: then())
