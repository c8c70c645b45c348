"""One step, from its dispatch record to the commit of all policies.

    dispatch -> trajectories run, queries close, gradients accumulate -> update -> publish -> durable record

Invariants (tests name them):

* a step's content is durable before its first request;
* the update comes after every sample of the step is acknowledged or masked;
* the commit is recorded after every instance has verified the new weights, or is being restarted with them.
"""

from collections.abc import Callable, Mapping
from enum import Enum

from flexmarl.core.errors import WorkflowError
from flexmarl.core.events import StepDispatched
from flexmarl.core.ids import AgentName, PolicyName, Purpose
from flexmarl.core.records import CommitRecord, DispatchRecord, PolicyCommit
from flexmarl.orchestrator.closing import StepCloser, StoreSink
from flexmarl.orchestrator.episodes import Episodes
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.orchestrator.parts import RunParts
from flexmarl.orchestrator.reports import StepStatistics
from flexmarl.orchestrator.trajectories import EndedTrajectory, TrajectorySet
from flexmarl.rollout.manager import PublishedWeights, RolloutManager
from flexmarl.training.engine import TrainingEngine
from flexmarl.training.state import PolicyUpdate


class StepPhase(Enum):
    """What a step is doing."""

    ROLLING = "rolling"
    COMMITTING = "committing"
    CANCELLED = "cancelled"


class StepRunner:
    """Runs one step. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        dispatch: DispatchRecord,
        queries: Mapping[int, Mapping[str, object]],
        parts: RunParts,
        *,
        manager: RolloutManager,
        engine: TrainingEngine,
        episodes: Episodes,
        inbox: OrderedInbox,
        on_committed: Callable[["StepRunner", CommitRecord, dict[PolicyName, PolicyUpdate]], None],
    ) -> None:
        """Take the step's content; start nothing yet."""
        config = parts.config
        self.dispatch = dispatch
        self.statistics = StepStatistics(
            step=dispatch.step,
            start_s=parts.runtime.clock.now_s(),
            num_turns=dict.fromkeys(config.agents, 0),  # an agent that is never reached shall show in the metrics
        )
        self.phase = StepPhase.ROLLING
        self._parts = parts
        self._manager = manager
        self._engine = engine
        self._episodes = episodes
        self._inbox = inbox
        self._on_committed = on_committed
        # Of different queries first: trajectories of one query are often alike.
        by_number = sorted(dispatch.trajectories(), key=lambda key: key.trajectory)
        self._sampled = frozenset(by_number[: config.telemetry.trajectories_per_step])
        self._closer = StepCloser(
            dispatch,
            algorithms={PolicyName(name): config.algorithm_of(name) for name in config.policies},
            agents={AgentName(name): PolicyName(agent.policy) for name, agent in config.agents.items()},
            store=parts.store,
            inbox=inbox,
            events=parts.events,
            on_ready=engine.add_ready,
            on_all_closed=self._all_closed,
        )
        self._pool = episodes.run(
            TrajectorySet(
                purpose=Purpose.TRAIN,
                policy_version=dispatch.policy_version,
                queries=queries,
                keys=tuple(dispatch.trajectories()),
            ),
            StoreSink(parts.store, inbox),
            self._trajectory_ended,
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

    def start(self) -> None:
        """Make the content durable, then let the trajectories run."""
        self._engine.begin_step(self.dispatch.step, may_train=self._parts.config.pipeline.mode == "strict")

        def opened(_: None) -> None:
            self._parts.events.emit(StepDispatched(dispatch=self.dispatch))
            self._pool.admit()

        work = self._parts.store.open_step(self.dispatch)
        self._inbox.start(f"store.open_step {self.dispatch.step}", work, opened)

    def cancel(self) -> bool:
        """Give the step up, unless its commit has begun; say whether it was given up."""
        if self.phase is StepPhase.COMMITTING:
            return False
        self.phase = StepPhase.CANCELLED
        self._pool.cancel()
        return True

    def _trajectory_ended(self, trajectory: EndedTrajectory) -> None:
        self.statistics.ended(trajectory, now_s=self._parts.runtime.clock.now_s())
        if trajectory.key in self._sampled:
            self._parts.on_trajectory(trajectory)
        self._parts.listener.on_rollout_progress(self._pool.num_ended, self._pool.num_trajectories)
        self._closer.ended(trajectory)

    def _all_closed(self) -> None:
        if self.phase is StepPhase.CANCELLED:
            return
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
        self.phase = StepPhase.COMMITTING
        self._episodes.report_queues()
        self._engine.allow_training()
        self._engine.update(self.dispatch.policy_version + 1, self._updated)

    def _updated(self) -> None:
        updates = self._engine.updates()
        if not any(update.denominators.num_samples for update in updates.values()):
            self._parts.listener.on_message(
                f"step {self.dispatch.step + 1}: no sample trained, so no weights change: no agent acted, or every "
                "turn was masked (see num_masked in metrics.jsonl)"
            )
        weights = published_weights(self.dispatch.policy_version + 1, updates)
        self._manager.publish(weights, lambda: self._published(updates))

    def _published(self, updates: dict[PolicyName, PolicyUpdate]) -> None:
        record = CommitRecord(
            step=self.dispatch.step,
            policy_version=self.dispatch.policy_version + 1,
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
        self._inbox.start(f"store.commit {record.step}", work, lambda _: self._on_committed(self, record, updates))


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
