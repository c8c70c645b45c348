"""The orchestrator of one run: version authority, phases of a step, commit, evaluation, checkpoint, stop.

    open -> [boundary] -> roll out and train -> commit -> [boundary] -> ... -> end

Everything below the line "facts and handlers" runs in handlers of the one inbox: synchronous, in order. At a boundary
every policy has the same version, nothing is in flight, and the orchestrator decides what comes next: stop, checkpoint,
evaluation, the next step or the end. Invariants (tests name them):

* `policy_version` rises by one for each committed step, for all policies together;
* a step is dispatched only when every policy serves its version and the commit before it is durable.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from flexmarl.config import RootConfig
from flexmarl.core.errors import BackendError, InvariantError, WorkflowError
from flexmarl.core.events import (
    CheckpointWritten,
    EvaluationDone,
    RunEnded,
    RunStarted,
    StepCommitted,
    StepDispatched,
    WorkerRestarted,
)
from flexmarl.core.ids import AgentName, PolicyName, Purpose, WorkerId
from flexmarl.core.messages import LoopBlocked, SignalReceived, WorkerExited, WorkerReady
from flexmarl.core.protocols import EventSink, ExperienceStore, Runtime, WorkerHandle, WorkerSpec
from flexmarl.core.records import CommitRecord, DispatchRecord, PolicyCommit
from flexmarl.orchestrator.checkpoint import PolicyToSave, data_digest, write_checkpoint
from flexmarl.orchestrator.closing import StepCloser, StoreSink
from flexmarl.orchestrator.evaluation import EvaluationResult, NoSink, evaluation_result, evaluation_set
from flexmarl.orchestrator.inbox import ORCHESTRATOR, OrderedInbox
from flexmarl.orchestrator.queries import QueryOrder
from flexmarl.orchestrator.reports import StepStatistics, evaluation_report, metrics_row, step_report
from flexmarl.orchestrator.trajectories import (
    EndedTrajectory,
    TrajectoryPool,
    TrajectorySet,
    TrajectorySink,
    route,
)
from flexmarl.rollout.manager import PublishedWeights, RolloutManager
from flexmarl.telemetry import EvaluationReport, MetricsLog, ProgressListener
from flexmarl.training.engine import TrainingEngine
from flexmarl.training.trainer import PolicyState, PolicyUpdate

logger = logging.getLogger(__name__)

MAX_EPISODE_WORKER_RESTARTS = 5


class Phase(Enum):
    """What the run is doing."""

    OPENING = "opening"
    BOUNDARY = "boundary"
    EVALUATING = "evaluating"
    ROLLING = "rolling"
    COMMITTING = "committing"
    SAVING = "saving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What an orchestrator is built from; `api` chooses the implementations."""

    config: RootConfig
    runtime: Runtime
    store: ExperienceStore
    events: EventSink
    flush_events: Callable[[], None]
    metrics: MetricsLog
    listener: ProgressListener
    instance_specs: Mapping[PolicyName, tuple[int, Callable[[WorkerId], WorkerSpec]]]
    trainer_specs: Mapping[PolicyName, Callable[[WorkerId], WorkerSpec]]
    episode_worker_spec: Callable[[WorkerId], WorkerSpec]
    train_queries: Sequence[Mapping[str, object]]
    held_out_queries: Sequence[Mapping[str, object]]
    run_dir: Path
    on_trajectory: Callable[[EndedTrajectory], None]
    """Called with sampled trajectories of each step, for trajectories.jsonl."""
    on_boundary: Callable[[], None]
    """Called at each boundary, for measurements of the process tree."""
    on_baseline: Callable[["RunResult"], None]
    """Called before the first step of a new run: what `after` will be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """Where a run begins or goes on."""

    policy_version: int = 0
    policies: Mapping[PolicyName, PolicyState]
    digests_before: Mapping[PolicyName, str] | None = None
    """Of the run's first version; None in a new run."""
    before: EvaluationResult | None = None
    """Evaluation of the run's first version, when it had one."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run came to."""

    policy_version: int = 0
    digests_before: dict[PolicyName, str] = field(default_factory=dict)
    updates: dict[PolicyName, PolicyUpdate] = field(default_factory=dict)
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    evaluation_error: str | None = None
    """Why the last evaluation failed."""
    stopped_by: str | None = None
    checkpoint: Path | None = None


class Orchestrator:
    """Runs the steps of one run. Use once."""

    def __init__(self, parts: RunParts, start: StartState, *, is_evaluation_only: bool = False) -> None:
        """Build the engines; start nothing yet. Must be called on the event loop.

        With `is_evaluation_only` the run is one evaluation of the start state, without step or checkpoint.
        """
        config = parts.config
        self._parts = parts
        self._config = config
        self._start_state = start
        self._is_evaluation_only = is_evaluation_only
        self._clock = parts.runtime.clock
        self._inbox = OrderedInbox(parts.events)
        self._agents = {AgentName(name): PolicyName(agent.policy) for name, agent in config.agents.items()}
        self._algorithms = {PolicyName(name): config.algorithm_of(name) for name in config.policies}
        self._order = QueryOrder(
            parts.train_queries,
            per_step=config.pipeline.queries_per_step,
            seed=config.data.seed * 1_000_003 + config.run.seed,
        )
        self._data_digest = data_digest(list(parts.train_queries))
        shared = {"runtime": parts.runtime, "inbox": self._inbox, "events": parts.events}
        self._manager = RolloutManager(config.rollout, parts.instance_specs, **shared)
        self._engine = TrainingEngine(config.training, parts.trainer_specs, store=parts.store, **shared)
        self._worker: WorkerHandle | None = None
        self._is_worker_ready = False
        self._num_worker_starts = 0
        self._phase = Phase.OPENING
        self._pool: TrajectoryPool | None = None
        self._closer: StepCloser | None = None
        self._statistics = StepStatistics(step=0, start_s=0.0)
        self._step_durations_s: list[float] = []
        self._evaluated: list[EndedTrajectory] = []
        self._evaluated_version: int | None = None
        self._saved_version: int | None = start.policy_version if start.policy_version > 0 else None
        self._version = start.policy_version
        self.result = RunResult(policy_version=start.policy_version, before=start.before)

    async def run(self) -> RunResult:
        """Run to the last step, or until a signal asks to stop; return what it came to.

        Raises:
            FlexMARLError: the run cannot go on; what is durable stays, and `--resume` goes on from the last checkpoint.
        """
        config = self._config
        self._parts.events.emit(
            RunStarted(
                name=config.run.name,
                seed=config.run.seed,
                policy_version=self._version,
                is_resumed=self._version > 0,
            )
        )
        self._parts.listener.on_start(config.pipeline.num_steps, str(self._parts.run_dir))
        reason = "error"
        try:
            self._engine.open(self._start_state.policies, self._opened)
            self._manager.start()
            self._start_worker()
            await self._inbox.run_until(lambda: self._phase is Phase.ENDED)
            reason = self.result.stopped_by or "finished"
        finally:
            self._manager.close()
            self._engine.close()
            await self._inbox.close()
            self._parts.events.emit(RunEnded(policy_version=self._version, reason=reason))
            self._parts.flush_events()
        return self.result

    def request_stop(self, signal: str) -> None:
        """Stop at the next point where nothing is lost, with a checkpoint. Call on the event loop."""
        self._inbox.post(ORCHESTRATOR, SignalReceived(signal=signal), lambda: self._stop(signal))

    # --- facts and handlers: opening ----------------------------------------------------------------------------------

    def _opened(self) -> None:
        updates = self._engine.updates()
        digests = {policy: update.digest for policy, update in updates.items()}
        self.result.digests_before = dict(self._start_state.digests_before or digests)
        self.result.updates = updates
        self._publish(self._version, updates, self._boundary)

    def _publish(self, version: int, updates: Mapping[PolicyName, PolicyUpdate], then: Callable[[], None]) -> None:
        weights = {
            policy: PublishedWeights(
                policy=policy,
                policy_version=version,
                weights_version=update.weights_version,
                object_key=update.weights_key,
                digest=update.digest,
            )
            for policy, update in updates.items()
        }
        self._manager.publish(weights, then)

    def _start_worker(self) -> None:
        worker_id = WorkerId(f"episodes.{self._num_worker_starts}")
        self._num_worker_starts += 1
        self._worker = self._parts.runtime.start(self._parts.episode_worker_spec(worker_id), self._receive)

    def _receive(self, worker_id: WorkerId, fact: object) -> None:
        self._inbox.post(worker_id, fact, lambda: self._episode_fact(worker_id, fact))

    def _episode_fact(self, worker_id: WorkerId, fact: object) -> None:
        match fact:
            case WorkerReady():
                self._is_worker_ready = True
                if self._pool is not None:
                    self._pool.admit()
            case LoopBlocked():
                self._parts.listener.on_message(
                    f"user code at {fact.location} held the event loop for {fact.duration_s:.1f} s: "
                    "await slow work, or use asyncio.to_thread"
                )
            case WorkerExited():
                self._episode_worker_exited(fact)
            case _ if self._pool is not None:
                route(self._pool, fact)

    def _episode_worker_exited(self, fact: WorkerExited) -> None:
        self._worker = None
        self._is_worker_ready = False
        if self._phase is Phase.ENDED:
            return
        if self._num_worker_starts > MAX_EPISODE_WORKER_RESTARTS:
            self._inbox.fail(BackendError(f"the episode worker ended {self._num_worker_starts} times: {fact.reason}"))
            return
        logger.warning("the episode worker ended (%s); starting it again", fact.reason)
        self._parts.events.emit(
            WorkerRestarted(worker="episodes", incarnation=self._num_worker_starts, reason=fact.reason)
        )
        self._start_worker()
        if self._pool is not None:
            self._pool.worker_died()

    def _ready_worker(self) -> WorkerHandle | None:
        return self._worker if self._is_worker_ready else None

    # --- facts and handlers: boundary ---------------------------------------------------------------------------------

    def _boundary(self) -> None:
        self._phase = Phase.BOUNDARY
        self._pool = None
        self._closer = None
        self.result.policy_version = self._version
        self._parts.flush_events()
        self._parts.on_boundary()
        is_last = self._is_evaluation_only or self._version >= self._config.pipeline.num_steps
        is_due = is_last or (self._version > 0 and self._version % self._config.checkpoint.every == 0)
        must_save = not self._is_evaluation_only and (self.result.stopped_by or is_due)
        if must_save and self._saved_version != self._version:
            self._checkpoint()
        elif self.result.stopped_by:
            self._phase = Phase.ENDED
        elif self._is_evaluation_due(is_last=is_last):
            self._evaluate()
        elif is_last:
            self._phase = Phase.ENDED
        else:
            self._dispatch()

    def _stop(self, signal: str) -> None:
        if self.result.stopped_by:
            return
        self.result.stopped_by = signal
        self._parts.listener.on_message(f"{signal}: saving a checkpoint of version {self._version}, then stopping")
        match self._phase:
            case Phase.ROLLING | Phase.EVALUATING:
                # Nothing of the open step is kept without replay: its trajectories run again after a resume.
                assert self._pool is not None
                self._pool.cancel()
                self._boundary()
            case Phase.OPENING:
                self._phase = Phase.ENDED
            case Phase.BOUNDARY | Phase.COMMITTING | Phase.SAVING | Phase.ENDED:
                pass

    def _checkpoint(self) -> None:
        self._phase = Phase.SAVING
        policies = {
            policy: PolicyToSave(
                weights_version=update.weights_version, weights_digest=update.digest, state_key=update.state_key
            )
            for policy, update in self.result.updates.items()
        }
        version = self._version

        def write() -> Path:
            return write_checkpoint(
                self._parts.run_dir / "checkpoints",
                policy_version=version,
                run_seed=self._config.run.seed,
                queries_digest=self._data_digest,
                policies=policies,
                objects=self._parts.runtime.objects,
                keep_last=self._config.checkpoint.keep_last,
            )

        def written(path: Path) -> None:
            self._saved_version = version
            self.result.checkpoint = path
            self._parts.events.emit(CheckpointWritten(policy_version=version, path=path.name))
            self._boundary()

        self._inbox.start(f"checkpoint {version}", self._parts.runtime.call(write), written)

    # --- facts and handlers: a step -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        if self._version == 0:
            self._parts.on_baseline(self.result)
        self._phase = Phase.ROLLING
        pipeline = self._config.pipeline
        dispatch = DispatchRecord(
            step=self._version,
            policy_version=self._version,
            queries=self._order.of_step(self._version),
            num_trajectories=pipeline.trajectories_per_query,
        )
        self._statistics = StepStatistics(step=dispatch.step, start_s=self._clock.now_s())
        self._engine.begin_step(dispatch.step, may_train=pipeline.mode == "strict")
        self._closer = StepCloser(
            dispatch,
            algorithms=self._algorithms,
            agents=self._agents,
            store=self._parts.store,
            inbox=self._inbox,
            events=self._parts.events,
            on_ready=self._engine.add_ready,
            on_all_closed=self._all_closed,
        )
        self._pool = self._make_pool(
            TrajectorySet(
                purpose=Purpose.TRAIN,
                policy_version=self._version,
                queries={query: self._order.queries[query] for query in dispatch.queries},
                keys=tuple(dispatch.trajectories()),
            ),
            StoreSink(self._parts.store, self._inbox),
            self._trajectory_ended,
        )
        pool = self._pool

        def opened(_: None) -> None:
            self._parts.events.emit(StepDispatched(dispatch=dispatch))
            pool.admit()

        self._inbox.start(f"store.open_step {dispatch.step}", self._parts.store.open_step(dispatch), opened)

    def _make_pool(
        self, trajectories: TrajectorySet, sink: TrajectorySink, on_ended: Callable[[EndedTrajectory], None]
    ) -> TrajectoryPool:
        return TrajectoryPool(
            trajectories,
            sink,
            seed=self._config.run.seed,
            agents=self._agents,
            workflow=self._config.workflow,
            rollout=self._config.rollout,
            manager=self._manager,
            worker=self._ready_worker,
            inbox=self._inbox,
            on_ended=on_ended,
        )

    def _trajectory_ended(self, trajectory: EndedTrajectory) -> None:
        assert self._closer is not None and self._pool is not None
        self._statistics.ended(trajectory, now_s=self._clock.now_s())
        if self._statistics.num_trajectories <= self._config.telemetry.trajectories_per_step:
            self._parts.on_trajectory(trajectory)
        self._parts.listener.on_rollout_progress(self._pool.num_ended, self._pool.num_trajectories)
        self._closer.ended(trajectory)

    def _all_closed(self) -> None:
        if self._statistics.has_only_failures:
            raise WorkflowError(
                f"all {self._statistics.num_trajectories} trajectories of step {self._version} failed; the first: "
                f"{self._statistics.first_failure}"
            )
        if self._phase is not Phase.ROLLING:
            return
        self._phase = Phase.COMMITTING
        self._engine.allow_training()
        self._engine.update(self._version + 1, self._updated)

    # --- facts and handlers: commit -----------------------------------------------------------------------------------

    def _updated(self) -> None:
        updates = self._engine.updates()
        self._publish(self._version + 1, updates, lambda: self._published(updates))

    def _published(self, updates: dict[PolicyName, PolicyUpdate]) -> None:
        record = CommitRecord(
            step=self._version,
            policy_version=self._version + 1,
            policies={
                policy: PolicyCommit(
                    weights_version=update.weights_version,
                    weights_digest=update.digest,
                    denominators=update.denominators,
                    micro_batches=update.micro_batches,
                )
                for policy, update in updates.items()
            },
        )
        work = self._parts.store.commit(record)
        self._inbox.start(f"store.commit {record.step}", work, lambda _: self._committed(record, updates))

    def _committed(self, record: CommitRecord, updates: dict[PolicyName, PolicyUpdate]) -> None:
        if record.policy_version != self._version + 1:
            raise InvariantError(f"commit of version {record.policy_version} at version {self._version}")
        for policy, update in updates.items():
            old = self.result.updates[policy]
            if old.weights_version != update.weights_version:
                self._parts.runtime.objects.delete(old.state_key)
                self._parts.runtime.objects.delete(old.weights_key)
        self._version = record.policy_version
        self.result.updates = updates
        self._parts.events.emit(StepCommitted(commit=record))
        assert self._closer is not None
        now_s = self._clock.now_s()
        self._parts.metrics.write(
            record.step, metrics_row(self._statistics, updates, masked=self._closer.num_masked, now_s=now_s)
        )
        self._step_durations_s.append(now_s - self._statistics.start_s)
        recent = self._step_durations_s[-10:]
        self._parts.listener.on_step(
            step_report(
                self._statistics,
                updates,
                num_steps=self._config.pipeline.num_steps,
                now_s=now_s,
                mean_step_s=sum(recent) / len(recent),
            )
        )
        self._boundary()

    # --- facts and handlers: evaluation -------------------------------------------------------------------------------

    def _is_evaluation_due(self, *, is_last: bool) -> bool:
        config = self._config.eval
        if self._evaluated_version == self._version or not self._parts.held_out_queries:
            return False
        if self._version == 0 or is_last:
            return config.at_ends
        return config.every is not None and self._version % config.every == 0

    def _evaluate(self) -> None:
        self._phase = Phase.EVALUATING
        self._evaluated_version = self._version
        self._evaluated = []
        which = evaluation_set(self._config.eval, self._parts.held_out_queries, policy_version=self._version)
        start_s = self._clock.now_s()

        def ended(trajectory: EndedTrajectory) -> None:
            self._evaluated.append(trajectory)
            self._parts.listener.on_rollout_progress(pool.num_ended, pool.num_trajectories)
            if pool.is_done:
                timer.cancel()
                self._evaluation_ended(
                    evaluation_result(self._evaluated, which, duration_s=self._clock.now_s() - start_s)
                )

        def timed_out() -> None:
            if self._phase is Phase.EVALUATING and self._pool is pool:
                pool.cancel()
                self._evaluation_failed(
                    f"took longer than eval.timeout_s={self._config.eval.timeout_s:g}; "
                    f"{pool.num_ended} of {pool.num_trajectories} trajectories had ended"
                )

        pool = self._make_pool(which, NoSink(), ended)
        self._pool = pool
        timer = self._inbox.set_timer(f"evaluation {self._version}", self._config.eval.timeout_s, timed_out)
        pool.admit()

    def _evaluation_ended(self, result: EvaluationResult) -> None:
        if self._version == 0:
            self.result.before = result
        self.result.after = result
        metrics = {"success_frac": result.success, "num_failed": float(result.num_failed)}
        if result.greedy_success is not None:
            metrics["greedy_success_frac"] = result.greedy_success
        self._parts.events.emit(EvaluationDone(policy_version=self._version, metrics=metrics))
        self._parts.listener.on_evaluation(evaluation_report(result))
        self._boundary()

    def _evaluation_failed(self, error: str) -> None:
        self.result.evaluation_error = error
        self._parts.events.emit(EvaluationDone(policy_version=self._version, metrics={}, error=error))
        self._parts.listener.on_evaluation(
            EvaluationReport(
                policy_version=self._version,
                success_frac=None,
                greedy_success_frac=None,
                rewards={},
                num_queries=0,
                duration_s=self._config.eval.timeout_s,
                error=error,
            )
        )
        self._boundary()

