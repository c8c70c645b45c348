"""One step, from its dispatch record to the commit of all policies.

    dispatch -> trajectories run, queries close, gradients accumulate -> update -> publish -> durable record

A step is generated when the pipeline mode lets it, and trains when it is its turn: when every earlier step is
committed. In `serial` and `strict` mode both begin together.

Invariants (tests name them):

* a step's content is durable before its first request;
* the update comes after every sample of the step is acknowledged or masked;
* the commit is recorded after every instance has verified the new weights, or is being restarted with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from flexmarl.core.errors import WorkflowError
from flexmarl.core.events import StepDispatched, StepExtended, StepRestored
from flexmarl.core.ids import AgentName, PolicyName, Purpose
from flexmarl.core.protocols import StoredStep
from flexmarl.core.records import CommitRecord, DispatchRecord, StepExtension
from flexmarl.orchestrator.closing import ClosingSeams, StepCloser
from flexmarl.orchestrator.episodes import Episodes
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.orchestrator.parts import RunParts
from flexmarl.orchestrator.reports import StepStatistics
from flexmarl.orchestrator.store_sink import StoreSink
from flexmarl.orchestrator.trajectory_set import EndedTrajectory, TrajectorySet
from flexmarl.rollout.manager import PublishedWeights, RolloutManager
from flexmarl.scheduling import PipelineRule, ReadySample
from flexmarl.training.engine import TrainingEngine
from flexmarl.training.state import PolicyUpdate


class StepPhase(Enum):
    """What a step is doing."""

    GENERATING = "generating"
    """Its trajectories run; when it is its turn, it trains meanwhile."""
    UPDATING = "updating"
    UPDATED = "updated"
    """Waits until its weights may be published."""
    PUBLISHING = "publishing"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeams:
    """What steps work with, and whom they tell."""

    parts: RunParts
    rule: PipelineRule
    manager: RolloutManager
    engine: TrainingEngine
    episodes: Episodes
    inbox: OrderedInbox
    may_publish: Callable[[int], bool]
    """Whether the weights that a step has made may be published."""
    on_generated: Callable[[], None]
    """A step has all of its rollouts."""
    on_committing: Callable[["StepRunner", dict[PolicyName, PolicyUpdate]], None]
    """A step's commit is about to be recorded."""
    on_committed: Callable[["StepRunner", CommitRecord, dict[PolicyName, PolicyUpdate]], None]


class StepRunner:
    """Runs one step. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        dispatch: DispatchRecord,
        queries: Mapping[int, Mapping[str, object]],
        seams: StepSeams,
        *,
        stored: StoredStep | None = None,
    ) -> None:
        """Take the step's content, and what an interrupted run had recorded of it; start nothing yet."""
        config = seams.parts.config
        self.dispatch = dispatch
        self.statistics = StepStatistics(
            step=dispatch.step,
            start_s=seams.parts.runtime.clock.now_s(),
            num_turns=dict.fromkeys(config.agents, 0),  # an agent that is never reached shall show in the metrics
        )
        self.phase = StepPhase.GENERATING
        self._seams = seams
        self._parts = seams.parts
        self._stored = stored
        self._is_turn = False
        self._is_told_generated = False
        self._ready: list[tuple[PolicyName, list[ReadySample]]] = []
        """Samples that wait for the step's turn."""
        self._updates: dict[PolicyName, PolicyUpdate] = {}
        # Of different queries first: trajectories of one query are often alike.
        by_number = sorted(dispatch.trajectories(), key=lambda key: key.trajectory)
        self._sampled = frozenset(by_number[: config.telemetry.trajectories_per_step])
        self._closer = StepCloser(
            dispatch,
            ClosingSeams(
                algorithms={PolicyName(name): config.algorithm_of(name) for name in config.policies},
                agents={AgentName(name): PolicyName(agent.policy) for name, agent in config.agents.items()},
                max_extensions=config.pipeline.max_extensions,
                store=seams.parts.store,
                inbox=seams.inbox,
                events=seams.parts.events,
                scorer=seams.engine,
                on_ready=self._samples_ready,
                on_extend=self._extend,
                on_changed=self._changed,
            ),
        )
        self._pool = seams.episodes.run(
            _trajectory_set(dispatch, queries, stored),
            StoreSink(seams.parts.store, seams.inbox),
            self._trajectory_ended,
            step=dispatch.step,
        )

    @property
    def zero_advantage_frac(self) -> dict[PolicyName, float]:
        """Share of each policy's ready samples whose advantage is zero."""
        without = self._closer.num_zero_advantage
        return {policy: without[policy] / count for policy, count in self._closer.num_ready.items() if count > 0}

    @property
    def num_masked(self) -> Mapping[tuple[AgentName, str], int]:
        """Masked samples by agent and reason."""
        return self._closer.num_masked

    @property
    def num_extended(self) -> int:
        """Queries that got further trajectories."""
        return self._closer.num_extended

    @property
    def is_generated(self) -> bool:
        """It has all of its rollouts."""
        return self._closer.is_generated

    def start(self) -> None:
        """Make the content durable, then let the trajectories run; or go on with those of an interrupted run."""
        if self._stored is not None:
            self._restore(self._stored)
            return

        def opened(_: None) -> None:
            self._parts.events.emit(StepDispatched(dispatch=self.dispatch))
            self._pool.open()

        work = self._parts.store.open_step(self.dispatch)
        self._seams.inbox.start(f"store.open_step {self.dispatch.step}", work, opened)

    def begin_training(self) -> None:
        """Every earlier step is committed: it is this step's turn."""
        self._is_turn = True
        self.statistics.turn_s = self._parts.runtime.clock.now_s()
        engine = self._seams.engine
        engine.begin_step(self.dispatch.step, may_train=self._seams.rule.is_streamed)
        engine.set_open_groups(self._closer.num_open)
        for policy, samples in self._ready:
            engine.add_ready(policy, samples)
        self._ready.clear()
        self._closer.allow_scoring()
        self._changed()

    def cancel(self) -> bool:
        """Give the step up, unless its commit will come to its end by itself; say whether it was given up."""
        is_committing = self.phase in (StepPhase.UPDATING, StepPhase.UPDATED, StepPhase.PUBLISHING)
        if is_committing and self._seams.may_publish(self.dispatch.step):
            return False
        self.phase = StepPhase.CANCELLED
        self._pool.cancel()
        self._seams.episodes.forget(Purpose.TRAIN, self.dispatch.step)
        return True

    def publish_if_allowed(self) -> None:
        """Publish what the update made, once that is allowed."""
        if self.phase is not StepPhase.UPDATED or not self._seams.may_publish(self.dispatch.step):
            return
        self.phase = StepPhase.PUBLISHING
        self._seams.manager.publish(
            published_weights(self.dispatch.step + 1, self._updates),
            self._published,
            may_have_requests=self._seams.rule.publishes_in_flight,
        )

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _restore(self, stored: StoredStep) -> None:
        self._closer.restore(stored)
        ended = [each for each in stored.trajectories if each.outcome is not None or each.failure is not None]
        num_recorded = sum(len(each.turns) for each in stored.trajectories if each not in ended)
        self._parts.events.emit(
            StepRestored(
                dispatch=self.dispatch,
                num_ended=len(ended),
                num_open=self._pool.num_trajectories,
                num_recorded_turns=num_recorded,
            )
        )
        for each in ended:
            self._count(EndedTrajectory(key=each.key, turns=each.turns, outcome=each.outcome, failure=each.failure))
        self._pool.open()

    def _trajectory_ended(self, trajectory: EndedTrajectory) -> None:
        if trajectory.key in self._sampled:
            self._parts.on_trajectory(trajectory)
        self._count(trajectory)

    def _count(self, trajectory: EndedTrajectory) -> None:
        self.statistics.ended(trajectory, now_s=self._parts.runtime.clock.now_s())
        num_left = self._pool.num_trajectories - self._pool.num_ended
        num_ended = self.statistics.num_trajectories
        self._parts.listener.on_rollout_progress(num_ended, num_ended + num_left)
        self._closer.ended(trajectory)

    def _extend(self, extension: StepExtension) -> None:
        def extended(_: None) -> None:
            self._parts.events.emit(StepExtended(extension=extension, reason="its rewards say nothing so far"))
            self._pool.add(extension.trajectories())

        name = f"store.extend_step s{extension.step}/q{extension.query}"
        self._seams.inbox.start(name, self._parts.store.extend_step(extension), extended)

    def _samples_ready(self, policy: PolicyName, samples: list[ReadySample]) -> None:
        if self._is_turn:
            self._seams.engine.add_ready(policy, samples)
        else:
            self._ready.append((policy, samples))

    def _changed(self) -> None:
        """A query has got all of its trajectories, or has closed."""
        if self.phase is not StepPhase.GENERATING:
            return
        if self.is_generated and not self._is_told_generated:
            self._is_told_generated = True
            self._seams.episodes.forget(Purpose.TRAIN, self.dispatch.step)
            self._seams.on_generated()
        if self._is_turn:
            self._seams.engine.set_open_groups(self._closer.num_open)
            if self._closer.is_closed:
                self._update()

    # --- commit -------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        if self.statistics.has_only_failures:
            raise WorkflowError(
                f"all {self.statistics.num_trajectories} trajectories of step {self.dispatch.step} failed; the first: "
                f"{self.statistics.first_failure}"
            )
        if num_failed := sum(self.statistics.num_failed.values()):
            self._parts.listener.on_message(
                f"step {self.dispatch.step + 1}: {num_failed} of {self.statistics.num_trajectories} trajectories "
                f"failed and do not train; the first: {self.statistics.first_failure}"
            )
        self.phase = StepPhase.UPDATING
        self._seams.episodes.report_queues()
        self._seams.engine.allow_training()
        self._seams.engine.update(self.dispatch.step + 1, self._updated)

    def _updated(self) -> None:
        if self.phase is not StepPhase.UPDATING:
            return
        self.phase = StepPhase.UPDATED
        self._updates = self._seams.engine.updates()
        if not any(update.denominators.num_samples for update in self._updates.values()):
            self._parts.listener.on_message(
                f"step {self.dispatch.step + 1}: no sample trained, so no weights change: no agent acted, or every "
                "turn was masked (see num_masked in metrics.jsonl)"
            )
        self.publish_if_allowed()

    def _published(self) -> None:
        updates = self._updates
        record = CommitRecord(
            step=self.dispatch.step,
            policy_version=self.dispatch.step + 1,
            policies={policy: update.as_commit() for policy, update in updates.items()},
        )
        self._seams.on_committing(self, updates)
        work = self._parts.store.commit(record)
        self._seams.inbox.start(
            f"store.commit {record.step}", work, lambda _: self._seams.on_committed(self, record, updates)
        )


def _trajectory_set(
    dispatch: DispatchRecord, queries: Mapping[int, Mapping[str, object]], stored: StoredStep | None
) -> TrajectorySet:
    """Return the trajectories of a step that are still to run."""
    keys = dispatch.trajectories()
    begun = {} if stored is None else {each.key: each for each in stored.trajectories}
    for extension in () if stored is None else stored.extensions:
        keys += extension.trajectories()
    has_ended = {key for key, each in begun.items() if each.outcome is not None or each.failure is not None}
    return TrajectorySet(
        purpose=Purpose.TRAIN,
        min_version=dispatch.min_version,
        max_version=dispatch.max_version,
        queries=queries,
        keys=tuple(key for key in keys if key not in has_ended),
        recorded={key: each for key, each in begun.items() if key not in has_ended},
    )


def published_weights(
    policy_version: int, updates: Mapping[PolicyName, PolicyUpdate]
) -> dict[PolicyName, PublishedWeights]:
    """Return what instances shall serve at a version."""
    return {
        policy: PublishedWeights(
            policy=policy,
            policy_version=policy_version,
            weights_version=update.weights_version,
            object_key=update.weights_key,
            digest=update.digest,
        )
        for policy, update in updates.items()
    }
