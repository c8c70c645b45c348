"""Turns what happened in a step, or in a run, into metrics, progress reports and the summary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from flexmarl.core.ids import AgentName, PolicyName
from flexmarl.core.records import FinishReason
from flexmarl.orchestrator.evaluation import EvaluationResult, agent_rewards, paired_difference
from flexmarl.orchestrator.trajectory_set import EndedTrajectory
from flexmarl.telemetry import EvaluationReport, StepReport
from flexmarl.training.metrics import step_metrics
from flexmarl.training.state import PolicyUpdate


@dataclass(slots=True, kw_only=True)
class StepStatistics:
    """Collects a step while it runs."""

    step: int
    start_s: float
    """When it was dispatched."""
    turn_s: float = 0.0
    """When it was its turn to train; later than `start_s` where rollouts run ahead."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    successes: list[bool] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    num_turns: dict[str, int] = field(default_factory=dict)
    num_truncated: dict[str, int] = field(default_factory=dict)
    num_generated_tokens: int = 0
    num_failed: dict[str, int] = field(default_factory=dict)
    first_failure: str | None = None
    num_trajectories: int = 0
    rollout_end_s: float = 0.0

    def ended(self, trajectory: EndedTrajectory, *, now_s: float) -> None:
        """Count a trajectory."""
        self.num_trajectories += 1
        self.rollout_end_s = now_s
        for row in trajectory.turns:
            agent = str(row.key.agent)
            self.num_turns[agent] = self.num_turns.get(agent, 0) + 1
            self.num_generated_tokens += len(row.response_tokens)
            if row.finish_reason is FinishReason.LENGTH:
                self.num_truncated[agent] = self.num_truncated.get(agent, 0) + 1
        if trajectory.failure is not None:
            kind = trajectory.failure.kind
            self.num_failed[kind] = self.num_failed.get(kind, 0) + 1
            self.first_failure = self.first_failure or f"{kind}: {trajectory.failure.message}"
            return
        assert trajectory.outcome is not None
        for agent, reward in agent_rewards(trajectory.outcome).items():
            self.rewards.setdefault(agent, []).append(reward)
        if trajectory.outcome.success is not None:
            self.successes.append(trajectory.outcome.success)
        for name, value in trajectory.outcome.metrics.items():
            self.metrics.setdefault(name, []).append(value)

    @property
    def has_only_failures(self) -> bool:
        """No trajectory ended with an outcome."""
        return self.num_trajectories > 0 and sum(self.num_failed.values()) == self.num_trajectories


def metrics_row(
    statistics: StepStatistics,
    updates: Mapping[PolicyName, PolicyUpdate],
    *,
    masked: Mapping[tuple[AgentName, str], int],
    now_s: float,
) -> dict[str, float | int | str | None]:
    """Return the row of a committed step for metrics.jsonl."""
    duration_s = now_s - statistics.turn_s
    row: dict[str, float | int | str | None] = {
        "run/step_s": duration_s,
        "rollout/duration_s": statistics.rollout_end_s - statistics.start_s,
        "rollout/num_tokens": statistics.num_generated_tokens,
        "rollout/tokens_per_s": statistics.num_generated_tokens / max(duration_s, 1e-9),
        "rollout/num_trajectories": statistics.num_trajectories,
        "rollout/num_failed": sum(statistics.num_failed.values()),
    }
    if statistics.successes:
        row["rollout/success_frac"] = fmean(statistics.successes)
    for name, values in statistics.metrics.items():
        row[f"rollout/{name}"] = fmean(values)
    for agent, rewards in statistics.rewards.items():
        row[f"agent/{agent}/reward"] = fmean(rewards)
    for agent, count in statistics.num_turns.items():
        row[f"agent/{agent}/num_turns"] = count
        row[f"agent/{agent}/num_truncated"] = statistics.num_truncated.get(agent, 0)
    for (agent, reason), count in masked.items():
        row[f"agent/{agent}/num_masked_{reason}"] = count
    for kind, count in statistics.num_failed.items():
        row[f"rollout/num_failed_{kind}"] = count
    for policy, update in updates.items():
        row[f"policy/{policy}/weights_version"] = update.weights_version
        row[f"policy/{policy}/num_samples"] = update.denominators.num_samples
        row[f"policy/{policy}/num_tokens"] = update.denominators.num_tokens
        reported = step_metrics(update.metrics)
        row.update((f"policy/{policy}/{name}", value) for name, value in reported.policy.items())
        for agent, of_agent in reported.agents.items():
            row.update((f"agent/{agent}/{name}", value) for name, value in of_agent.items())
    return row


def step_report(
    statistics: StepStatistics,
    updates: Mapping[PolicyName, PolicyUpdate],
    *,
    num_steps: int,
    now_s: float,
    mean_step_s: float,
) -> StepReport:
    """Return what a listener is told of a committed step."""
    duration_s = now_s - statistics.turn_s
    return StepReport(
        step=statistics.step,
        num_steps=num_steps,
        rewards={agent: fmean(rewards) for agent, rewards in sorted(statistics.rewards.items())},
        success_frac=fmean(statistics.successes) if statistics.successes else None,
        tokens_per_s=statistics.num_generated_tokens / max(duration_s, 1e-9),
        num_samples=sum(update.denominators.num_samples for update in updates.values()),
        weights_versions={policy: update.weights_version for policy, update in updates.items()},
        duration_s=duration_s,
        eta_s=mean_step_s * (num_steps - statistics.step - 1),
    )


def evaluation_report(result: EvaluationResult) -> EvaluationReport:
    """Return what a listener is told of an evaluation."""
    return EvaluationReport(
        policy_version=result.policy_version,
        success_frac=result.success if result.has_success else None,
        greedy_success_frac=result.greedy_success if result.has_success else None,
        rewards=dict(result.rewards),
        num_queries=len(result.sampled),
        duration_s=result.duration_s,
        num_failed=result.num_failed,
    )


def failed_evaluation_report(policy_version: int, error: str, *, duration_s: float) -> EvaluationReport:
    """Return what a listener is told of an evaluation that gave no result."""
    return EvaluationReport(
        policy_version=policy_version,
        success_frac=None,
        greedy_success_frac=None,
        rewards={},
        num_queries=0,
        duration_s=duration_s,
        error=error,
    )


def evaluation_summary(before: EvaluationResult | None, after: EvaluationResult | None) -> dict[str, object]:
    """Return the `eval` part of summary.json."""
    summary: dict[str, object] = {}
    for name, result in (("before", before), ("after", after)):
        if result is not None:
            summary[name] = {
                "success": result.success,
                "greedy_success": result.greedy_success,
                "policy_version": result.policy_version,
                "num_queries": len(result.sampled),
                "num_failed": result.num_failed,
                "is_task_success": result.has_success,
                "duration_s": result.duration_s,
            }
    if before is not None and after is not None:
        difference = paired_difference(before.sampled, after.sampled)
        summary["difference"] = {
            "mean": difference.mean,
            "lower_95": difference.lower_95,
            "num_queries": difference.num_queries,
        }
    return summary


def policy_summary(before: Mapping[PolicyName, str], updates: Mapping[PolicyName, PolicyUpdate]) -> dict[str, object]:
    """Return the `policies` part of summary.json."""
    return {
        policy: {
            "version": update.weights_version,
            "weights_digest": {"before": before.get(policy, ""), "after": update.digest},
        }
        for policy, update in updates.items()
    }
