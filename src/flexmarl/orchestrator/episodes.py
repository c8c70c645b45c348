"""Everything that runs workflows: the episode workers, and the pools of trajectories that share them.

A pool runs the trajectories of one step, or of an evaluation. Steps are admitted in order: what an older step wants to
start goes first.
"""

from collections import Counter

from flexmarl.core.ids import AgentName, PolicyName, Purpose, TrajectoryKey
from flexmarl.core.messages import LoopBlocked, TrajectoryEnded, TrajectoryFailed, TurnRequested
from flexmarl.core.protocols import WorkerHandle
from flexmarl.orchestrator.episode_workers import EpisodeWorkers
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.orchestrator.parts import RunParts
from flexmarl.orchestrator.trajectories import PoolSeams, TrajectoryPool
from flexmarl.orchestrator.trajectory_set import OnEnded, TrajectorySet, TrajectorySink
from flexmarl.rollout.manager import RolloutManager

QUEUE_REPORT_S = 0.2
"""Time between two reports of the queues."""


class Episodes:
    """Owns the episode workers and the pools. Its methods are handlers."""

    def __init__(self, parts: RunParts, manager: RolloutManager, inbox: OrderedInbox) -> None:
        """Start nothing yet."""
        self._parts = parts
        self._manager = manager
        self._pools: dict[tuple[Purpose, int], TrajectoryPool] = {}
        """By purpose and step, in the order of the steps."""
        self._workers = EpisodeWorkers(
            num_workers=max(1, parts.config.workflow.num_workers),
            max_restarts=parts.config.workflow.max_restarts,
            make_spec=parts.episode_worker_spec,
            runtime=parts.runtime,
            inbox=inbox,
            events=parts.events,
            on_fact=self._handle,
            on_ready=self.admit,
            on_died=self._worker_died,
        )
        self._pool_seams = PoolSeams(
            seed=parts.config.run.seed,
            agents={AgentName(name): PolicyName(agent.policy) for name, agent in parts.config.agents.items()},
            workflow=parts.config.workflow,
            rollout=parts.config.rollout,
            manager=manager,
            workers=self._workers,
            inbox=inbox,
            events=parts.events,
            on_room=self.admit,
        )
        self._reported_s = parts.runtime.clock.now_s()

    def start(self) -> None:
        """Start the workers."""
        self._workers.start()

    def close(self) -> None:
        """Start nothing any more."""
        self._workers.close()

    def run(self, trajectories: TrajectorySet, sink: TrajectorySink, on_ended: OnEnded, *, step: int) -> TrajectoryPool:
        """Return the pool of a set of trajectories; `open` starts it. `forget` it when it is done."""
        pool = TrajectoryPool(trajectories, sink, self._pool_seams, on_ended)
        self._pools[trajectories.purpose, step] = pool
        self._pools = dict(sorted(self._pools.items()))
        return pool

    def forget(self, purpose: Purpose, step: int) -> None:
        """Drop a pool that has nothing in flight any more."""
        self._pools.pop((purpose, step), None)

    def admit(self) -> None:
        """Let pools start what the bounds allow, older steps first."""
        pools = list(self._pools.values())
        for pool in pools:
            others = [other.num_running() for other in pools if other is not pool and other.purpose is pool.purpose]
            pool.admit(sum(others, Counter[tuple[int, int]]()))

    def report_queues(self) -> None:
        """Tell the listener of the requests of every policy."""
        self._reported_s = self._parts.runtime.clock.now_s()
        self._parts.listener.on_queue(self._manager.queues())

    def _handle(self, fact: object) -> None:
        match fact:
            case LoopBlocked():
                self._parts.listener.on_message(
                    f"user code at {fact.location} held the event loop for {fact.duration_s:.1f} s: "
                    "await slow work, or use asyncio.to_thread"
                )
            case TurnRequested():
                if (pool := self._pool_of(fact.purpose, fact.key.trajectory_key)) is not None:
                    pool.turn_requested(fact)
            case TrajectoryEnded():
                if (pool := self._pool_of(fact.purpose, fact.outcome.trajectory)) is not None:
                    pool.ended(fact.outcome)
            case TrajectoryFailed():
                if (pool := self._pool_of(fact.purpose, fact.failure.trajectory)) is not None:
                    pool.failed(fact.failure)
        if self._parts.runtime.clock.now_s() - self._reported_s >= QUEUE_REPORT_S:
            self.report_queues()

    def _pool_of(self, purpose: Purpose, key: TrajectoryKey) -> TrajectoryPool | None:
        return self._pools.get((purpose, key.step))

    def _worker_died(self, worker: WorkerHandle) -> None:
        for pool in list(self._pools.values()):
            pool.worker_died(worker)
