"""The episode worker of a run: started, restarted when it ends, and joined to the pool that runs at the moment."""

import logging
from collections.abc import Callable

from flexmarl.core.errors import BackendError
from flexmarl.core.events import WorkerRestarted
from flexmarl.core.ids import AgentName, PolicyName, WorkerId
from flexmarl.core.messages import (
    LoopBlocked,
    TrajectoryEnded,
    TrajectoryFailed,
    TurnRequested,
    WorkerExited,
    WorkerReady,
)
from flexmarl.core.protocols import WorkerHandle
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.orchestrator.parts import RunParts
from flexmarl.orchestrator.trajectories import EndedTrajectory, TrajectoryPool, TrajectorySet, TrajectorySink
from flexmarl.rollout.manager import RolloutManager

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
QUEUE_REPORT_S = 0.2
"""Time between two reports of the queues."""


class Episodes:
    """Owns the episode worker and at most one pool at a time. Its methods are handlers."""

    def __init__(self, parts: RunParts, manager: RolloutManager, inbox: OrderedInbox) -> None:
        """Start nothing yet."""
        self._parts = parts
        self._manager = manager
        self._inbox = inbox
        self._agents = {AgentName(name): PolicyName(agent.policy) for name, agent in parts.config.agents.items()}
        self._worker: WorkerHandle | None = None
        self._is_ready = False
        self._num_starts = 0
        self._is_closing = False
        self._pool: TrajectoryPool | None = None
        self._reported_s = parts.runtime.clock.now_s()

    def start(self) -> None:
        """Start the worker."""
        worker_id = WorkerId(f"episodes.{self._num_starts}")
        self._num_starts += 1
        self._worker = self._parts.runtime.start(self._parts.episode_worker_spec(worker_id), self._receive)

    def close(self) -> None:
        """Start nothing any more."""
        self._is_closing = True

    def run(
        self, trajectories: TrajectorySet, sink: TrajectorySink, on_ended: Callable[[EndedTrajectory], None]
    ) -> TrajectoryPool:
        """Return the pool of a set of trajectories; the caller starts it with `admit`."""
        config = self._parts.config
        self._pool = TrajectoryPool(
            trajectories,
            sink,
            seed=config.run.seed,
            agents=self._agents,
            workflow=config.workflow,
            rollout=config.rollout,
            manager=self._manager,
            worker=lambda: self._worker if self._is_ready else None,
            inbox=self._inbox,
            on_ended=on_ended,
        )
        return self._pool

    def report_queues(self) -> None:
        """Tell the listener of the requests of every policy."""
        self._reported_s = self._parts.runtime.clock.now_s()
        self._parts.listener.on_queue(self._manager.queues())

    def _receive(self, worker_id: WorkerId, fact: object) -> None:
        self._inbox.post(worker_id, fact, lambda: self._handle(fact))

    def _handle(self, fact: object) -> None:
        pool = self._pool
        match fact:
            case WorkerReady():
                self._is_ready = True
                if pool is not None:
                    pool.admit()
            case LoopBlocked():
                self._parts.listener.on_message(
                    f"user code at {fact.location} held the event loop for {fact.duration_s:.1f} s: "
                    "await slow work, or use asyncio.to_thread"
                )
            case WorkerExited():
                self._exited(fact)
            case TurnRequested() | TrajectoryEnded() | TrajectoryFailed() if pool is not None:
                if fact.purpose is pool.purpose:
                    _route(pool, fact)
                if self._parts.runtime.clock.now_s() - self._reported_s >= QUEUE_REPORT_S:
                    self.report_queues()

    def _exited(self, fact: WorkerExited) -> None:
        self._worker = None
        self._is_ready = False
        if self._is_closing:
            return
        if self._num_starts > MAX_RESTARTS:
            self._inbox.fail(BackendError(f"the episode worker ended {self._num_starts} times: {fact.reason}"))
            return
        logger.warning("the episode worker ended (%s); starting it again", fact.reason)
        self._parts.events.emit(WorkerRestarted(worker="episodes", incarnation=self._num_starts, reason=fact.reason))
        self.start()
        if self._pool is not None:
            self._pool.worker_died()


def _route(pool: TrajectoryPool, fact: TurnRequested | TrajectoryEnded | TrajectoryFailed) -> None:
    match fact:
        case TurnRequested():
            pool.turn_requested(fact)
        case TrajectoryEnded():
            pool.ended(fact.outcome)
        case TrajectoryFailed():
            pool.failed(fact.failure)
