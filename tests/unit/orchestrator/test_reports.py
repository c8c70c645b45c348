"""Metrics rows, step reports and summaries, against values worked by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import (
    Denominators,
    FinishReason,
    OutcomeRecord,
    TrajectoryFailure,
    TurnReward,
    TurnRow,
    VersionSpan,
)
from flexmarl.orchestrator.evaluation import EvaluationResult
from flexmarl.orchestrator.reports import (
    StepStatistics,
    evaluation_report,
    evaluation_summary,
    failed_evaluation_report,
    metrics_row,
    policy_summary,
    step_report,
)
from flexmarl.orchestrator.trajectory_set import EndedTrajectory
from flexmarl.training.state import PolicyUpdate

pytestmark = pytest.mark.unit

SERVED_BY = InstanceId("i")


def row(agent: str, trajectory: int, num_tokens: int, finish: FinishReason = FinishReason.STOP) -> TurnRow:
    return TurnRow(
        key=SampleKey(3, 0, trajectory, AgentName(agent), 0, 0),
        attempt=0,
        policy=PolicyName("p"),
        policy_version=3,
        weights_version=3,
        prompt_tokens=(1,) * 50,
        response_tokens=(1,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        temperature=1.0,
        finish_reason=finish,
        version_spans=(VersionSpan(start=0, end=num_tokens, policy_version=3),),
    )


def ended(
    trajectory: int,
    rows: list[TurnRow],
    rewards: Mapping[str, float],
    *,
    success: bool | None = None,
    turn_reward: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> EndedTrajectory:
    key = TrajectoryKey(3, 0, trajectory)
    outcome = OutcomeRecord(
        trajectory=key,
        attempt=0,
        rewards={AgentName(agent): reward for agent, reward in rewards.items()},
        turn_rewards=() if turn_reward is None else (TurnReward(key=rows[0].key, reward=turn_reward),),
        turns=tuple(each.key for each in rows),
        success=success,
        metrics=metrics or {},
    )
    return EndedTrajectory(key=key, turns=tuple(rows), outcome=outcome, failure=None)


def failed(trajectory: int, kind: str, message: str) -> EndedTrajectory:
    key = TrajectoryKey(3, 0, trajectory)
    failure = TrajectoryFailure(trajectory=key, attempt=0, kind=kind, message=message)
    return EndedTrajectory(key=key, turns=(row("a", trajectory, 5),), outcome=None, failure=failure)


def update(policy: str, *, samples: int, tokens: int, metrics: Mapping[str, float] | None = None) -> PolicyUpdate:
    return PolicyUpdate(
        policy=PolicyName(policy),
        weights_version=4,
        state_key=ObjectKey("state", policy, 4),
        weights_key=ObjectKey("weights", policy, 4),
        digest=f"{policy}-after",
        denominators=Denominators(num_samples=samples, num_tokens=tokens),
        micro_batches=(),
        metrics=dict(metrics or {}),
    )


@pytest.fixture
def statistics() -> StepStatistics:
    statistics = StepStatistics(step=3, start_s=100.0, turn_s=100.0)
    rows = [row("a", 0, 10), row("b", 0, 20, FinishReason.LENGTH)]
    statistics.ended(ended(0, rows, {"a": 1.0, "b": 0.5}, success=True, metrics={"depth": 3.0}), now_s=101.0)
    statistics.ended(
        ended(1, [row("a", 1, 5)], {"a": 0.0}, success=False, turn_reward=0.5, metrics={"depth": 4.0}), now_s=103.0
    )
    statistics.ended(failed(2, "timeout", "took too long"), now_s=104.0)
    return statistics


def test_a_metrics_row_by_hand(statistics: StepStatistics) -> None:
    updates = {
        PolicyName("p"): update(
            "p",
            samples=2,
            tokens=10,
            metrics={
                "agent.a.logprob_sum": -4.0,
                "agent.a.trained_tokens_sum": 4.0,
                "agent.b.logprob_sum": -1.0,
                "agent.b.trained_tokens_sum": 6.0,
                "agent.b.reward_sum": 3.0,
                "agent.b.trained_samples_sum": 2.0,
                "grad_norm_sum": 0.25,
                "num_updates_sum": 1.0,
            },
        )
    }
    found = metrics_row(statistics, updates, masked={(AgentName("b"), "truncated"): 1}, now_s=108.0)
    expected = {
        "run/step_s": 8.0,
        "rollout/duration_s": 4.0,
        "rollout/num_tokens": 40,
        "rollout/tokens_per_s": 5.0,
        "rollout/num_trajectories": 3,
        "rollout/num_failed": 1,
        "rollout/num_failed_timeout": 1,
        "rollout/success_frac": 0.5,
        "rollout/depth": 3.5,
        "agent/a/reward": 0.75,
        "agent/a/num_turns": 3,
        "agent/a/num_truncated": 0,
        "agent/b/reward": 0.5,
        "agent/b/num_turns": 1,
        "agent/b/num_truncated": 1,
        "agent/b/num_masked_truncated": 1,
        "policy/p/weights_version": 4,
        "policy/p/num_samples": 2,
        "policy/p/num_tokens": 10,
        "agent/a/entropy": 1.0,
        "agent/a/trained_tokens": 4.0,
        "policy/p/entropy": 0.5,
        "policy/p/reward_mean": 1.5,
        "policy/p/grad_norm": 0.25,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_step_without_success_or_samples_divides_by_nothing() -> None:
    statistics = StepStatistics(step=0, start_s=1.0)
    statistics.ended(failed(0, "timeout", "x"), now_s=1.0)
    updates = {PolicyName("p"): update("p", samples=0, tokens=0, metrics={"logprob_sum": 0.0})}
    found = metrics_row(statistics, updates, masked={}, now_s=1.0)
    assert found["policy/p/entropy"] == 0.0
    assert "rollout/success_frac" not in found
    assert statistics.has_only_failures
    assert statistics.first_failure == "timeout: x"


def test_one_outcome_is_enough_to_go_on(statistics: StepStatistics) -> None:
    assert not statistics.has_only_failures
    assert statistics.first_failure == "timeout: took too long"
    assert not StepStatistics(step=0, start_s=0.0).has_only_failures


def test_a_step_report_by_hand(statistics: StepStatistics) -> None:
    updates = {PolicyName(name): update(name, samples=samples, tokens=9) for name, samples in (("p", 2), ("q", 3))}
    report = step_report(statistics, updates, num_steps=10, now_s=110.0, mean_step_s=4.0)
    assert (report.step, report.num_steps, report.num_samples) == (3, 10, 5)
    assert report.rewards == {"a": 0.75, "b": 0.5}
    assert (report.success_frac, report.tokens_per_s, report.duration_s) == (0.5, 4.0, 10.0)
    assert report.eta_s == 24.0  # six more steps
    assert report.weights_versions == {"p": 4, "q": 4}


def result(version: int, sampled: Mapping[int, float]) -> EvaluationResult:
    return EvaluationResult(
        policy_version=version,
        sampled=sampled,
        greedy={},
        rewards={"a": 1.0},
        has_success=False,
        num_failed=1,
        duration_s=2.0,
    )


def test_an_evaluation_summary_by_hand() -> None:
    summary = evaluation_summary(result(0, {0: 0.0, 1: 0.0}), result(9, {0: 0.5, 1: 0.5}))
    assert summary["before"] == {
        "success": 0.0,
        "greedy_success": None,
        "policy_version": 0,
        "num_queries": 2,
        "num_failed": 1,
        "is_task_success": False,
        "duration_s": 2.0,
    }
    assert summary["difference"] == {"mean": 0.5, "lower_95": 0.5, "num_queries": 2}
    assert evaluation_summary(None, None) == {}
    assert set(evaluation_summary(result(0, {0: 1.0}), None)) == {"before"}


def test_evaluation_reports() -> None:
    report = evaluation_report(replace(result(9, {0: 0.5, 1: 1.0}), has_success=True))
    assert (report.policy_version, report.success_frac, report.num_queries, report.error) == (9, 0.75, 2, None)
    assert report.num_failed == 1
    assert evaluation_report(result(9, {0: 0.5, 1: 1.0})).success_frac is None, "a mean reward is no success"
    bad = failed_evaluation_report(9, "too slow", duration_s=5.0)
    assert (bad.success_frac, bad.error, bad.duration_s) == (None, "too slow", 5.0)


def test_a_policy_summary_names_both_digests() -> None:
    found = policy_summary({PolicyName("p"): "p-before"}, {PolicyName("p"): update("p", samples=1, tokens=1)})
    assert found == {"p": {"version": 4, "weights_digest": {"before": "p-before", "after": "p-after"}}}
