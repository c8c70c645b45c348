"""Brings a resumed run from its checkpoint to its last commit, by training stored rows again."""

from collections import deque
from collections.abc import Callable, Sequence

from flexmarl.core.events import StepReplayed
from flexmarl.core.protocols import EventSink
from flexmarl.core.records import CommitRecord
from flexmarl.training.engine import TrainingEngine


class RollForward:
    """Replays the training side of committed steps, one after the other. Its methods are handlers."""

    def __init__(
        self,
        commits: Sequence[CommitRecord],
        *,
        engine: TrainingEngine,
        events: EventSink,
        on_step: Callable[[CommitRecord], None],
        on_done: Callable[[], None],
    ) -> None:
        """Take the commits in order; `on_step` is called after each, with the engine at its version."""
        self._commits = deque(commits)
        self._engine = engine
        self._events = events
        self._on_step = on_step
        self._on_done = on_done

    def start(self) -> None:
        """Replay the next step, or report the end."""
        if not self._commits:
            self._on_done()
            return
        record = self._commits.popleft()
        self._engine.replay(record, lambda: self._replayed(record))

    def _replayed(self, record: CommitRecord) -> None:
        self._events.emit(StepReplayed(step=record.step, policy_version=record.policy_version))
        self._on_step(record)
        self.start()
