"""The episode workers of a run: started, restarted when they end, and chosen by how much they run at the moment."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from flexmarl.core.errors import BackendError
from flexmarl.core.events import WorkerRestarted
from flexmarl.core.ids import WorkerId
from flexmarl.core.messages import TrajectoryEnded, WorkerExited, WorkerReady
from flexmarl.core.protocols import EventSink, Inbox, Runtime, WorkerHandle, WorkerSpec

logger = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.1
LONGEST_RESTART_DELAY_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Worker:
    number: int
    handle: WorkerHandle | None = None
    num_starts: int = 0
    num_deaths: int = 0
    """Since a trajectory ended on it: a run of days shall not end because of a death now and then."""
    num_running: int = 0
    """Attempts that run on it; the one with the fewest gets the next."""
    is_ready: bool = False

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(f"episodes-{self.number}.{self.num_starts - 1}")


class EpisodeWorkers:
    """Owns `workflow.num_workers` processes, or one thread. Its methods are handlers."""

    def __init__(
        self,
        *,
        num_workers: int,
        max_restarts: int,
        make_spec: Callable[[WorkerId], WorkerSpec],
        runtime: Runtime,
        inbox: Inbox,
        events: EventSink,
        on_fact: Callable[[object], None],
        on_ready: Callable[[], None],
        on_died: Callable[[WorkerHandle], None],
    ) -> None:
        """Start nothing yet.

        Args:
            num_workers: Workers, at least one.
            max_restarts: Restarts of one worker without an ended trajectory; the run ends when it dies once more.
            make_spec: Makes the spec of a worker.
            runtime: Starts them.
            inbox: Where their facts go.
            events: Where restarts are noted.
            on_fact: Called with each fact that is not about the life of a worker.
            on_ready: A worker takes work.
            on_died: A worker is gone, and with it what it ran.
        """
        self._workers = [_Worker(number=number) for number in range(num_workers)]
        self._max_restarts = max_restarts
        self._make_spec = make_spec
        self._runtime = runtime
        self._inbox = inbox
        self._events = events
        self._on_fact = on_fact
        self._on_ready = on_ready
        self._on_died = on_died
        self._is_closing = False

    def start(self) -> None:
        """Start every worker."""
        for worker in self._workers:
            self._start(worker)

    def close(self) -> None:
        """Start nothing any more."""
        self._is_closing = True

    def choose(self) -> WorkerHandle | None:
        """Return the ready worker that runs the fewest attempts, or None when none is ready."""
        ready = [worker for worker in self._workers if worker.is_ready]
        return min(ready, key=lambda worker: (worker.num_running, worker.number)).handle if ready else None

    def began(self, handle: WorkerHandle) -> None:
        """An attempt was given to a worker."""
        for worker in self._workers:
            worker.num_running += worker.handle is handle

    def ended(self, handle: WorkerHandle) -> None:
        """An attempt that was given to it has ended, or was given up."""
        for worker in self._workers:
            worker.num_running -= worker.handle is handle

    def _start(self, worker: _Worker) -> None:
        if self._is_closing:
            return
        worker.num_starts += 1
        worker.handle = self._runtime.start(
            self._make_spec(worker.worker_id), lambda worker_id, fact: self._receive(worker, worker_id, fact)
        )

    def _receive(self, worker: _Worker, worker_id: WorkerId, fact: object) -> None:
        self._inbox.post(worker_id, fact, lambda: self._handle(worker, fact))

    def _handle(self, worker: _Worker, fact: object) -> None:
        match fact:
            case WorkerReady():
                worker.is_ready = True
                self._on_ready()
            case WorkerExited():
                self._exited(worker, fact)
            case TrajectoryEnded():
                worker.num_deaths = 0
                self._on_fact(fact)
            case _:
                self._on_fact(fact)

    def _exited(self, worker: _Worker, fact: WorkerExited) -> None:
        dead, worker.handle = worker.handle, None
        worker.is_ready = False
        worker.num_running = 0
        if self._is_closing:
            return
        worker.num_deaths += 1
        if worker.num_deaths > self._max_restarts:
            self._inbox.fail(
                BackendError(
                    f"episode worker {worker.number} ended {worker.num_deaths} times without ending a trajectory "
                    f"(workflow.max_restarts={self._max_restarts}); the last time: {fact.reason}"
                )
            )
            return
        logger.warning("episode worker %d ended (%s); starting it again", worker.number, fact.reason)
        self._events.emit(
            WorkerRestarted(worker=f"episodes-{worker.number}", incarnation=worker.num_starts, reason=fact.reason)
        )
        delay_s = min(FIRST_RESTART_DELAY_S * 2.0 ** (worker.num_deaths - 1), LONGEST_RESTART_DELAY_S)
        self._inbox.set_timer(f"restart {worker.worker_id}", delay_s, lambda: self._start(worker))
        if dead is not None:
            self._on_died(dead)
