"""The orchestrator of one run: version authority, and what comes next at each version boundary.

    open -> (roll forward) -> [boundary] -> step -> [boundary] -> ... -> end

At a boundary every policy has the same version and no commit is in progress; the orchestrator then decides:
checkpoint, stop, evaluation, the next step (`step.py`) or the end. Rollouts of later steps may be in flight, as far as
the pipeline mode lets them. All methods but `run` are handlers of the one inbox: synchronous, in order. Invariants
(tests name them):

* `policy_version` rises by one for each committed step, for all policies together;
* a step trains only when every policy serves its version and the commit before it is durable;
* a step is dispatched only when some version in its bounds is served.
"""

import logging
from enum import Enum
from pathlib import Path

from flexmarl.core.errors import InvariantError
from flexmarl.core.events import CheckpointWritten, EvaluationDone, RunEnded, RunStarted, StepCommitted
from flexmarl.core.ids import PolicyName
from flexmarl.core.messages import SignalReceived
from flexmarl.core.protocols import StoredStep
from flexmarl.core.records import CommitRecord, DispatchRecord
from flexmarl.core.rng import derive_seed
from flexmarl.orchestrator.checkpoint import PolicyToSave, data_digest, list_checkpoints, write_checkpoint
from flexmarl.orchestrator.episodes import Episodes
from flexmarl.orchestrator.evaluation import EvaluationResult
from flexmarl.orchestrator.evaluator import Evaluator
from flexmarl.orchestrator.inbox import ORCHESTRATOR, OrderedInbox
from flexmarl.orchestrator.parts import RunParts, RunResult, StartState
from flexmarl.orchestrator.queries import QueryOrder
from flexmarl.orchestrator.reports import evaluation_report, failed_evaluation_report, metrics_row, step_report
from flexmarl.orchestrator.roll_forward import RollForward
from flexmarl.orchestrator.step import StepRunner, StepSeams, published_weights
from flexmarl.rollout.manager import RolloutManager
from flexmarl.scheduling import PipelineRule
from flexmarl.training.engine import TrainingEngine
from flexmarl.training.state import PolicyUpdate

logger = logging.getLogger(__name__)

NUM_STEPS_FOR_ETA = 10


class Phase(Enum):
    """What the run is doing."""

    OPENING = "opening"
    BOUNDARY = "boundary"
    SAVING = "saving"
    EVALUATING = "evaluating"
    STEPPING = "stepping"
    ENDED = "ended"


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
        self._inbox = OrderedInbox(parts.events)
        self._order = QueryOrder(
            parts.train_queries,
            per_step=config.pipeline.queries_per_step,
            seed=derive_seed(config.run.seed, "data", config.data.seed),
        )
        self._data_digest = data_digest(list(parts.train_queries))
        self._rule = PipelineRule(mode=config.pipeline.mode, max_staleness=config.pipeline.max_staleness)
        self._manager = RolloutManager(
            config.rollout, parts.instance_specs, runtime=parts.runtime, inbox=self._inbox, events=parts.events
        )
        self._engine = TrainingEngine(
            config.training,
            parts.trainer_specs,
            runtime=parts.runtime,
            inbox=self._inbox,
            events=parts.events,
            store=parts.store,
            algorithms={PolicyName(name): config.algorithm_of(name) for name in config.policies},
            run_seed=config.run.seed,
            max_staleness=self._rule.num_steps_ahead,
        )
        self._episodes = Episodes(parts, self._manager, self._inbox)
        self._phase = Phase.OPENING
        self._step_seams = self._seams_of_steps()
        self._steps: dict[int, StepRunner] = {}
        """Steps that are dispatched and not committed."""
        self._stored: dict[int, StoredStep] = {each.dispatch.step: each for each in start.open_steps}
        """Of an interrupted run, not taken up yet."""
        self._evaluator: Evaluator | None = None
        self._step_durations_s: list[float] = []
        self._evaluated_version: int | None = None if start.before is None else 0
        self._saved_version: int | None = start.policy_version if start.policy_version > 0 else None
        self._version = start.policy_version
        self._oldest_version = start.policy_version + len(start.commits)
        self.result = RunResult(policy_version=start.policy_version, before=start.before)

    def _seams_of_steps(self) -> StepSeams:
        return StepSeams(
            parts=self._parts,
            rule=self._rule,
            manager=self._manager,
            engine=self._engine,
            episodes=self._episodes,
            inbox=self._inbox,
            may_publish=self._may_publish,
            on_generated=self._generated,
            on_committing=self._committing,
            on_committed=self._committed,
        )

    async def run(self) -> RunResult:
        """Run to the last step, or until a signal asks to stop; return what it came to.

        Raises:
            FlexMARLError: the run cannot go on; what is durable stays, and `--resume` goes on from the last checkpoint.
        """
        self._parts.events.emit(
            RunStarted(
                name=self._config.run.name,
                seed=self._config.run.seed,
                policy_version=self._version,
                is_resumed=self._start_state.is_resumed,
            )
        )
        if not self._is_evaluation_only:
            self._parts.listener.on_start(self._config.pipeline.num_steps, str(self._parts.run_dir))
        reason = "error"
        try:
            self._engine.open(self._start_state.policies, self._opened)
            self._manager.start()
            self._episodes.start()
            await self._inbox.run_until(lambda: self._phase is Phase.ENDED)
            reason = self.result.stopped_by or "finished"
        finally:
            self._manager.close()
            self._engine.close()
            self._episodes.close()
            await self._inbox.close()
            self._parts.events.emit(RunEnded(policy_version=self._version, reason=reason))
            self._parts.flush_events()
        return self.result

    def request_stop(self, signal: str) -> None:
        """Stop at the next point where nothing is lost, with a checkpoint. Call on the event loop."""
        self._inbox.post(ORCHESTRATOR, SignalReceived(signal=signal), lambda: self._stop(signal))

    def _opened(self) -> None:
        updates = self._engine.updates()
        digests = {policy: update.digest for policy, update in updates.items()}
        self.result.digests_before = dict(self._start_state.digests_before or digests)
        self.result.updates = updates
        forward = RollForward(
            self._start_state.commits,
            engine=self._engine,
            events=self._parts.events,
            on_step=self._replayed,
            on_done=self._rolled_forward,
        )
        forward.start()

    def _replayed(self, record: CommitRecord) -> None:
        self._adopt(record, self._engine.updates())
        self._parts.listener.on_message(f"step {record.policy_version}: trained again from stored rows")

    def _rolled_forward(self) -> None:
        if self._phase is Phase.ENDED:
            return
        weights = published_weights(self._version, self.result.updates)
        self._manager.publish(weights, self._served, may_have_requests=False)

    def _served(self) -> None:
        self._parts.on_opened()
        self._boundary()

    def _boundary(self) -> None:
        self._phase = Phase.BOUNDARY
        self._evaluator = None
        self.result.policy_version = self._version
        self._parts.flush_events()
        self._episodes.report_queues()
        is_last = self._is_evaluation_only or self._version >= self._config.pipeline.num_steps
        is_due = is_last or (self._version > 0 and self._version % self._config.checkpoint.every == 0)
        must_save = not self._is_evaluation_only and (self.result.stopped_by is not None or is_due)
        if must_save and self._saved_version != self._version:
            self._save()
        elif self.result.stopped_by:
            self._phase = Phase.ENDED
        elif self._is_evaluation_due(is_last=is_last):
            self._evaluate()
        elif is_last:
            if self._start_state.policy_version == self._version and not self._is_evaluation_only:
                self._parts.listener.on_message(
                    f"all {self._version} steps are done: raise pipeline.num_steps to go on"
                )
            self._phase = Phase.ENDED
        else:
            self._next_step()

    def _stop(self, signal: str) -> None:
        if self.result.stopped_by:
            return
        self.result.stopped_by = signal
        if self._phase is Phase.OPENING:
            self.result.policy_version = self._oldest_version  # as much as is committed, trained again or not yet
            plan = "stopping before the first step" if self._oldest_version == 0 else "stopping; stored steps stay"
        else:
            plan = "stopping after a checkpoint"
        self._parts.listener.on_message(f"{signal}: {plan}")
        match self._phase:
            case Phase.STEPPING:
                if self._cancel_steps():
                    self._boundary()
            case Phase.EVALUATING:
                assert self._evaluator is not None
                self._cancel_steps()
                self._evaluator.cancel()
                self._boundary()
            case Phase.OPENING:
                self._phase = Phase.ENDED
            case Phase.BOUNDARY | Phase.SAVING | Phase.ENDED:
                self._cancel_steps()

    def _cancel_steps(self) -> bool:
        """Give up what has not begun to commit; return whether nothing is left. A resume goes on with stored rows."""
        self._steps = {number: step for number, step in self._steps.items() if not step.cancel()}
        return not self._steps

    # --- checkpoint ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
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
            if self._config.store.retention == "all":
                self._boundary()
                return
            # A damaged newest checkpoint shall not be the end: rows stay as far back as the oldest one reaches.
            oldest_version, _ = list_checkpoints(path.parent)[0]
            work = self._parts.store.prune(oldest_version)
            self._inbox.start(f"store.prune {oldest_version}", work, lambda _: self._boundary())

        self._inbox.start(f"checkpoint {version}", self._parts.runtime.call(write), written)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        if self._version == 0:
            self._parts.on_baseline(self.result)
        self._phase = Phase.STEPPING
        last = min(self._version + self._rule.num_steps_ahead, self._config.pipeline.num_steps - 1)
        for number in range(self._version, last + 1):
            if number not in self._steps:
                self._dispatch(number)
        self._steps[self._version].begin_training()

    def _dispatch(self, number: int) -> None:
        stored = self._stored.pop(number, None)
        dispatch = self._new_dispatch(number) if stored is None else stored.dispatch
        queries = {query: self._order.queries[query] for query in dispatch.queries}
        self._steps[number] = StepRunner(dispatch, queries, self._step_seams, stored=stored)
        self._steps[number].start()

    def _new_dispatch(self, number: int) -> DispatchRecord:
        min_version, max_version = self._rule.version_bounds(number, oldest_version=self._oldest_version)
        return DispatchRecord(
            step=number,
            min_version=min_version,
            max_version=max_version,
            queries=self._order.of_step(number),
            num_trajectories=self._config.pipeline.trajectories_per_query,
        )

    def _may_publish(self, number: int) -> bool:
        following = self._steps.get(number + 1)
        return following is None or following.is_generated or not self._rule.waits_for_next_rollouts

    def _generated(self) -> None:
        if (current := self._steps.get(self._version)) is not None:
            current.publish_if_allowed()

    def _committing(self, step: StepRunner, updates: dict[PolicyName, PolicyUpdate]) -> None:
        # Before the commit, so that no committed step is without its row; the row of a step that is not gets dropped.
        now_s = self._parts.runtime.clock.now_s()
        row = metrics_row(step.statistics, updates, masked=step.num_masked, now_s=now_s)
        row.update((f"policy/{name}/zero_advantage_frac", frac) for name, frac in step.zero_advantage_frac.items())
        if self._config.pipeline.max_extensions > 0:
            row["rollout/num_extended_queries"] = step.num_extended
        self._parts.metrics.write(step.dispatch.step, row)
        self._parts.trackers.log(step.dispatch.step, row)

    def _committed(self, step: StepRunner, record: CommitRecord, updates: dict[PolicyName, PolicyUpdate]) -> None:
        del self._steps[record.step]
        self._adopt(record, updates)
        self._parts.events.emit(StepCommitted(commit=record))
        now_s = self._parts.runtime.clock.now_s()
        self._step_durations_s.append(now_s - step.statistics.turn_s)
        recent = self._step_durations_s[-NUM_STEPS_FOR_ETA:]
        self._parts.listener.on_step(
            step_report(
                step.statistics,
                updates,
                num_steps=self._config.pipeline.num_steps,
                now_s=now_s,
                mean_step_s=sum(recent) / len(recent),
            )
        )
        self._boundary()

    def _adopt(self, record: CommitRecord, updates: dict[PolicyName, PolicyUpdate]) -> None:
        """Take over the version that a commit has made; what it replaces is forgotten."""
        if record.policy_version != self._version + 1:
            raise InvariantError(f"commit of version {record.policy_version} at version {self._version}")
        for policy, update in updates.items():
            old = self.result.updates[policy]
            if old.weights_version != update.weights_version:
                self._parts.runtime.objects.delete(old.state_key)
                self._parts.runtime.objects.delete(old.weights_key)
        self._version = record.policy_version
        self.result.policy_version = self._version
        self.result.updates = updates

    # --- evaluation ---------------------------------------------------------------------------------------------------

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
        self._evaluator = Evaluator(
            self._parts,
            policy_version=self._version,
            episodes=self._episodes,
            inbox=self._inbox,
            on_done=self._evaluated,
        )
        self._evaluator.start()

    def _evaluated(self, result: EvaluationResult | str) -> None:
        if isinstance(result, str):
            self.result.evaluation_error = result
            self._parts.events.emit(EvaluationDone(policy_version=self._version, metrics={}, error=result))
            self._parts.listener.on_evaluation(
                failed_evaluation_report(self._version, result, duration_s=self._config.eval.timeout_s)
            )
        else:
            if self._version == 0 and not self._is_evaluation_only:
                self.result.before = result
            else:
                self.result.after = result
            self._parts.events.emit(EvaluationDone(policy_version=self._version, metrics=result.metrics()))
            self._parts.listener.on_evaluation(evaluation_report(result))
        self._boundary()
