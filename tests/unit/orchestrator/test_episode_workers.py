"""Episode workers: the one with the least to do gets the next attempt, and deaths are counted between successes."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from flexmarl.core.errors import BackendError
from flexmarl.core.events import WorkerRestarted
from flexmarl.core.ids import Purpose, TrajectoryKey, WorkerId
from flexmarl.core.messages import TrajectoryEnded, WorkerExited, WorkerReady
from flexmarl.core.protocols import ServiceKind, WorkerHandle, WorkerSpec
from flexmarl.core.records import OutcomeRecord
from flexmarl.orchestrator.episode_workers import EpisodeWorkers
from flexmarl.testing.events import RecordingSink

pytestmark = pytest.mark.unit

ENDED = TrajectoryEnded(
    purpose=Purpose.TRAIN, outcome=OutcomeRecord(trajectory=TrajectoryKey(0, 0, 0), attempt=0, rewards={})
)


class FakeHandle:
    pid = None

    def __init__(self, worker_id: WorkerId, on_fact: Callable[[WorkerId, object], None]) -> None:
        self.worker_id = worker_id
        self._on_fact = on_fact

    def say(self, fact: object) -> None:
        self._on_fact(self.worker_id, fact)

    def die(self) -> None:
        self.say(WorkerExited(reason="signal SIGKILL", is_expected=False))


class Lab:
    """Workers on a runtime and an inbox that do everything at once, but timers."""

    def __init__(self, num_workers: int = 1, *, max_restarts: int = 2) -> None:
        self.started: list[FakeHandle] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.errors: list[BaseException] = []
        self.events = RecordingSink()
        self.facts: list[object] = []
        self.died: list[WorkerHandle] = []
        self.num_ready = 0
        fake: Any = self
        self.workers = EpisodeWorkers(
            num_workers=num_workers,
            max_restarts=max_restarts,
            make_spec=lambda worker_id: WorkerSpec(worker_id=worker_id, kind=ServiceKind.EPISODE_WORKER, factory="m:f"),
            runtime=fake,
            inbox=fake,
            events=self.events,
            on_fact=self.facts.append,
            on_ready=self._ready,
            on_died=self.died.append,
        )
        self.workers.start()

    def _ready(self) -> None:
        self.num_ready += 1

    def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> FakeHandle:
        self.started.append(FakeHandle(spec.worker_id, on_fact))
        return self.started[-1]

    def post(self, source: str, fact: object, handler: Callable[[], None]) -> None:
        handler()

    def set_timer(self, name: str, delay_s: float, handler: Callable[[], None]) -> None:
        self.timers.append((delay_s, handler))

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    def restart(self) -> FakeHandle:
        """Let the timers fire and the new worker be ready."""
        while self.timers:
            self.timers.pop(0)[1]()
        self.started[-1].say(WorkerReady(pid=1))
        return self.started[-1]


def test_the_worker_that_runs_the_fewest_attempts_gets_the_next() -> None:
    lab = Lab(3)
    assert lab.workers.choose() is None
    for handle in lab.started[1:]:
        handle.say(WorkerReady(pid=1))
    given = []
    for _ in range(5):
        chosen = lab.workers.choose()
        assert chosen is not None
        lab.workers.began(chosen)
        given.append(chosen.worker_id)
    assert given == ["episodes-1.0", "episodes-2.0", "episodes-1.0", "episodes-2.0", "episodes-1.0"]
    for _ in range(2):
        lab.workers.ended(cast(WorkerHandle, lab.started[1]))
    chosen = lab.workers.choose()
    assert chosen is not None
    assert chosen.worker_id == "episodes-1.0"


def test_a_dead_worker_is_told_and_started_again_under_another_name() -> None:
    lab = Lab()
    lab.started[0].say(WorkerReady(pid=1))
    lab.started[0].die()
    assert lab.workers.choose() is None
    assert [handle.worker_id for handle in lab.died] == ["episodes-0.0"]
    assert lab.restart().worker_id == "episodes-0.1"
    assert lab.events.records == [WorkerRestarted(worker="episodes-0", incarnation=1, reason="signal SIGKILL")]


def test_g7_a_worker_that_dies_again_and_again_ends_the_run() -> None:
    lab = Lab(max_restarts=2)
    lab.started[0].say(WorkerReady(pid=1))
    for _ in range(2):
        lab.started[-1].die()
        lab.restart()
    assert lab.errors == []
    lab.started[-1].die()
    (error,) = lab.errors
    assert isinstance(error, BackendError)
    for part in ("episode worker 0 ended 3 times", "workflow.max_restarts=2", "signal SIGKILL"):
        assert part in str(error)


def test_an_ended_trajectory_makes_up_for_the_deaths_before_it() -> None:
    lab = Lab(max_restarts=1)
    lab.started[0].say(WorkerReady(pid=1))
    for _ in range(6):
        lab.started[-1].die()
        lab.restart().say(ENDED)
    assert lab.errors == []
    assert lab.facts == [ENDED] * 6


def test_nothing_is_started_while_the_run_closes() -> None:
    lab = Lab()
    lab.workers.close()
    lab.started[0].die()
    assert (lab.timers, lab.errors, lab.died) == ([], [], [])
