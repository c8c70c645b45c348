"""Evaluations: which trajectories run, how they are scored, how two differ; against values worked by hand."""

import math
from collections.abc import Mapping

import pytest

from flexmarl.config import EvalConfig
from flexmarl.core.ids import AgentName, Purpose, SampleKey, TrajectoryKey
from flexmarl.core.records import OutcomeRecord, TrajectoryFailure, TurnReward
from flexmarl.orchestrator.evaluation import (
    EvaluationResult,
    NoSink,
    agent_rewards,
    evaluation_result,
    evaluation_set,
    paired_difference,
)
from flexmarl.orchestrator.trajectory_set import EndedTrajectory

pytestmark = pytest.mark.unit


def ended(
    query: int,
    number: int,
    *,
    success: bool | None = None,
    rewards: Mapping[str, float] | None = None,
    turn_rewards: Mapping[str, float] | None = None,
) -> EndedTrajectory:
    key = TrajectoryKey(5, query, number)
    outcome = OutcomeRecord(
        trajectory=key,
        attempt=0,
        rewards={AgentName(name): reward for name, reward in (rewards or {}).items()},
        turn_rewards=tuple(
            TurnReward(key=SampleKey(5, query, number, AgentName(name), 0, 0), reward=reward)
            for name, reward in (turn_rewards or {}).items()
        ),
        success=success,
    )
    return EndedTrajectory(key=key, turns=(), outcome=outcome, failure=None)


def failed(query: int, number: int) -> EndedTrajectory:
    key = TrajectoryKey(5, query, number)
    failure = TrajectoryFailure(trajectory=key, attempt=0, kind="timeout", message="")
    return EndedTrajectory(key=key, turns=(), outcome=None, failure=failure)


def result(sampled: Mapping[int, float], greedy: Mapping[int, float] | None = None) -> EvaluationResult:
    return EvaluationResult(
        policy_version=5,
        sampled=sampled,
        greedy=greedy or {},
        rewards={},
        has_success=True,
        num_failed=0,
        duration_s=1.0,
    )


# --- difference -------------------------------------------------------------------------------------------------------


def test_paired_difference_by_hand() -> None:
    # Differences 0.5, 0.25, -0.25, 0.5: mean 0.25; squared deviations 1/16 + 0 + 1/4 + 1/16 = 0.375, over 3 = 0.125.
    before = {1: 0.0, 2: 0.5, 3: 0.5, 4: 0.25}
    after = {4: 0.75, 3: 0.25, 2: 0.75, 1: 0.5}
    found = paired_difference(before, after)
    assert found.mean == 0.25
    assert found.lower_95 == pytest.approx(0.25 - 1.96 * math.sqrt(0.125) / math.sqrt(4), abs=1e-15)
    assert found.num_queries == 4


def test_equal_differences_have_no_width_and_one_has_no_bound() -> None:
    sure = paired_difference({1: 0.0, 2: 0.5}, {1: 0.5, 2: 1.0})
    assert (sure.mean, sure.lower_95) == (0.5, 0.5)
    assert paired_difference({1: 0.0}, {1: 1.0}).lower_95 == -math.inf


def test_only_shared_queries_are_compared() -> None:
    found = paired_difference({1: 0.0, 2: 0.0, 9: 1.0}, {1: 1.0, 2: 1.0, 7: 0.0})
    assert (found.mean, found.num_queries) == (1.0, 2)
    with pytest.raises(ValueError, match="share no query"):
        paired_difference({1: 0.0}, {2: 0.0})


# --- what runs --------------------------------------------------------------------------------------------------------


def test_the_set_is_the_samples_of_each_query_then_its_greedy_run() -> None:
    queries = [{"n": number} for number in range(5)]
    config = EvalConfig(num_queries=2, samples_per_query=2, temperature=0.5)
    which = evaluation_set(config, queries, policy_version=5)
    pairs = [(key.query, key.trajectory) for key in which.keys]
    assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    assert which.greedy == {TrajectoryKey(5, 0, 2), TrajectoryKey(5, 1, 2)}
    assert (which.purpose, which.min_version, which.max_version, which.temperature) == (Purpose.EVAL, 5, 5, 0.5)
    assert which.queries == {0: {"n": 0}, 1: {"n": 1}}


def test_the_set_is_bounded_by_the_data_and_may_leave_the_greedy_runs_out() -> None:
    which = evaluation_set(EvalConfig(num_queries=9, greedy=False), [{"n": 0}, {"n": 1}], policy_version=0)
    assert [(key.query, key.trajectory) for key in which.keys] == [(0, 0), (1, 0)]
    assert which.greedy == frozenset()


# --- scores -----------------------------------------------------------------------------------------------------------


def score(*trajectories: EndedTrajectory, samples: int = 2) -> EvaluationResult:
    config = EvalConfig(num_queries=2, samples_per_query=samples)
    which = evaluation_set(config, [{}, {}], policy_version=5)
    return evaluation_result(trajectories, which, duration_s=2.0)


def test_scores_by_hand() -> None:
    found = score(
        ended(1, 0, success=True, rewards={"a": 1.0}),
        ended(0, 1, success=False, rewards={"a": 3.0, "b": -1.0}),
        ended(0, 0, success=True, rewards={"a": 2.0}),
        failed(1, 1),
        ended(0, 2, success=True, rewards={"a": 100.0}),
        failed(1, 2),
    )
    assert found.sampled == {0: 0.5, 1: 0.5}
    assert found.greedy == {0: 1.0, 1: 0.0}
    assert (found.success, found.greedy_success) == (0.5, 0.5)
    assert found.rewards == {"a": 2.0, "b": -1.0}  # sampled runs only
    assert (found.num_failed, found.has_success) == (2, True)
    assert found.metrics() == {"success_frac": 0.5, "num_failed": 2.0, "greedy_success_frac": 0.5}


def test_queries_weigh_alike_whatever_their_samples() -> None:
    assert result({0: 1.0, 1: 0.5, 2: 0.0}).success == 0.5
    assert result({0: 1.0}).greedy_success is None


def test_without_success_the_mean_reward_of_the_agents_stands_in() -> None:
    found = score(ended(0, 0, rewards={"a": 1.0, "b": 0.0}, turn_rewards={"b": 0.5, "c": 1.5}))
    assert found.sampled == {0: 1.0}  # (1 + 0.5 + 1.5) / 3
    assert not found.has_success


def test_agent_rewards_add_turn_rewards() -> None:
    outcome = ended(0, 0, rewards={"a": 1.0}, turn_rewards={"a": 0.5, "b": -1.0}).outcome
    assert outcome is not None
    assert agent_rewards(outcome) == {"a": 1.5, "b": -1.0}


# --- the sink ---------------------------------------------------------------------------------------------------------


def test_the_sink_of_evaluations_counts_attempts_and_goes_on() -> None:
    sink = NoSink()
    calls: list[object] = []
    for _ in range(2):
        sink.begin_attempt(TrajectoryKey(0, 0, 0), calls.append)
    sink.begin_attempt(TrajectoryKey(0, 0, 1), calls.append)
    outcome = ended(0, 0).outcome
    failure = failed(0, 0).failure
    assert outcome is not None
    assert failure is not None
    sink.record_outcome(outcome, lambda: calls.append("outcome"))
    sink.record_failure(failure, lambda: calls.append("failure"))
    assert calls == [0, 1, 0, "outcome", "failure"]
