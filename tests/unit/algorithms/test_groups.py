"""GRPO numbers worked by hand, for each group key."""

import math

import pytest

from flexmarl.algorithms import GROUP_OF_ONE, TRUNCATED, QueryClosing, TurnFacts, close_query, group_advantages
from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import FinishReason, OutcomeRecord, TurnReward

pytestmark = pytest.mark.unit

SOLVER, CHECKER = AgentName("solver"), AgentName("checker")
ACTOR, JUDGE = PolicyName("actor"), PolicyName("judge")
POLICY_OF = {SOLVER: ACTOR, CHECKER: ACTOR}


def turn(trajectory: int, agent: AgentName = SOLVER, number: int = 0, branch: int = 0) -> SampleKey:
    return SampleKey(0, 5, trajectory, agent, branch, number)


def outcome(
    trajectory: int,
    turns: list[SampleKey],
    rewards: dict[AgentName, float],
    turn_rewards: dict[SampleKey, float] | None = None,
) -> OutcomeRecord:
    given = tuple(TurnReward(key=key, reward=reward) for key, reward in (turn_rewards or {}).items())
    return OutcomeRecord(
        trajectory=TrajectoryKey(0, 5, trajectory), attempt=0, rewards=rewards, turn_rewards=given, turns=tuple(turns)
    )


def close(
    outcomes: list[OutcomeRecord],
    *,
    policy_of: dict[AgentName, PolicyName] | None = None,
    truncated: tuple[SampleKey, ...] = (),
    facts: list[TurnFacts] | None = None,
    **settings: str,
) -> QueryClosing:
    policies = policy_of or POLICY_OF
    config = AlgorithmConfig.model_validate({"advantage_scale": "none", **settings})
    if facts is None:
        facts = [
            TurnFacts(key=key, finish_reason=FinishReason.LENGTH if key in truncated else FinishReason.STOP)
            for each in outcomes
            for key in each.turns
        ]
    return close_query(facts, outcomes, config=dict.fromkeys(policies.values(), config), policy_of=policies)


def advantages(closing: QueryClosing, policy: PolicyName = ACTOR) -> dict[SampleKey, float]:
    return {value.key: value.advantage for value in closing.values[policy]}


def test_std_is_that_of_a_sample() -> None:
    # Mean 2, deviations -1, 0, 1, squares 1 + 0 + 1, divided by n - 1 = 2: std 1.
    assert group_advantages([1.0, 2.0, 3.0], scale="std") == pytest.approx([-1 / (1 + 1e-6), 0.0, 1 / (1 + 1e-6)])
    assert group_advantages([1.0, 2.0, 3.0], scale="none") == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_zeros_even_where_their_mean_is_another_float(scale: str) -> None:
    rewards = [0.1, 0.1, 0.1]
    assert group_advantages(rewards, scale=scale) == [0.0, 0.0, 0.0]
    assert group_advantages([4.0], scale=scale) == [0.0]


def test_agent_key_counts_a_trajectory_once_and_adds_its_turn_rewards() -> None:
    # Rewards 1, 0 + 0.5 and 0 (three turns in the first): mean 0.5, not the 0.7 of counting turns.
    first = [turn(0), turn(0, number=1), turn(0, branch=1)]
    closing = close(
        [
            outcome(0, first, {SOLVER: 1.0}),
            outcome(1, [turn(1)], {SOLVER: 0.0}, {turn(1): 0.5}),
            outcome(2, [turn(2)], {SOLVER: 0.0}),
        ]
    )
    assert advantages(closing) == {
        turn(0): 0.5,
        turn(0, number=1): 0.5,
        turn(0, branch=1): 0.5,
        turn(1): 0.0,
        turn(2): -0.5,
    }
    assert [value.reward for value in closing.values[ACTOR]] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_agent_key_compares_each_agent_with_itself() -> None:
    outcomes = [
        outcome(0, [turn(0), turn(0, CHECKER)], {SOLVER: 1.0, CHECKER: 10.0}),
        outcome(1, [turn(1), turn(1, CHECKER)], {SOLVER: 0.0, CHECKER: 30.0}),
    ]
    expected = {turn(0): 0.5, turn(0, CHECKER): -10.0, turn(1): -0.5, turn(1, CHECKER): 10.0}
    assert advantages(close(outcomes)) == expected


def test_query_key_takes_the_mean_of_acting_agents() -> None:
    # Trajectory 0: both act, (1 + 3) / 2 = 2. Trajectory 1: only the solver acts, 0; the checker's 100 does not count.
    outcomes = [
        outcome(0, [turn(0), turn(0, CHECKER)], {SOLVER: 1.0, CHECKER: 3.0}),
        outcome(1, [turn(1)], {SOLVER: 0.0, CHECKER: 100.0}),
    ]
    closing = close(outcomes, group_key="query")
    assert advantages(closing) == {turn(0): 1.0, turn(0, CHECKER): 1.0, turn(1): -1.0}


def test_query_key_keeps_policies_apart() -> None:
    outcomes = [
        outcome(0, [turn(0), turn(0, CHECKER)], {SOLVER: 1.0, CHECKER: 3.0}),
        outcome(1, [turn(1), turn(1, CHECKER)], {SOLVER: 0.0, CHECKER: 9.0}),
    ]
    closing = close(outcomes, policy_of={SOLVER: ACTOR, CHECKER: JUDGE}, group_key="query")
    assert advantages(closing, ACTOR) == {turn(0): 0.5, turn(1): -0.5}
    assert advantages(closing, JUDGE) == {turn(0, CHECKER): -3.0, turn(1, CHECKER): 3.0}


def test_agent_turn_key_takes_the_turns_reward_or_else_the_trajectorys() -> None:
    # Turn 0 has rewards of its own, 4 and 2. Turn 1 has none: the trajectories', 1 + 4 and 0 + 2.
    outcomes = [
        outcome(0, [turn(0), turn(0, number=1)], {SOLVER: 1.0}, {turn(0): 4.0}),
        outcome(1, [turn(1), turn(1, number=1)], {SOLVER: 0.0}, {turn(1): 2.0}),
    ]
    closing = close(outcomes, group_key="agent_turn")
    assert advantages(closing) == {turn(0): 1.0, turn(0, number=1): 1.5, turn(1): -1.0, turn(1, number=1): -1.5}


def test_agent_turn_key_masks_a_turn_that_only_one_trajectory_reached() -> None:
    outcomes = [
        outcome(0, [turn(0), turn(0, number=1)], {SOLVER: 1.0}),
        outcome(1, [turn(1)], {SOLVER: 0.0}),
    ]
    closing = close(outcomes, group_key="agent_turn")
    assert [(sample.key, sample.reason) for sample in closing.masked[ACTOR]] == [(turn(0, number=1), GROUP_OF_ONE)]
    assert advantages(closing) == {turn(0): 0.5, turn(1): -0.5}


def test_a_truncated_turn_is_masked_but_its_reward_counts() -> None:
    outcomes = [outcome(n, [turn(n)], {SOLVER: float(n)}) for n in (0, 1, 5)]
    closing = close(outcomes, truncated=(turn(5),))
    assert advantages(closing) == {turn(0): -2.0, turn(1): -1.0}
    assert [(sample.key, sample.reason) for sample in closing.masked[ACTOR]] == [(turn(5), TRUNCATED)]


def test_truncated_turns_train_when_asked() -> None:
    outcomes = [outcome(n, [turn(n)], {SOLVER: float(n)}) for n in (0, 1)]
    config = AlgorithmConfig(advantage_scale="none", truncated="train")
    facts = [TurnFacts(key=turn(n), finish_reason=FinishReason.LENGTH) for n in (0, 1)]
    closing = close_query(facts, outcomes, config={ACTOR: config}, policy_of=POLICY_OF)
    assert advantages(closing) == {turn(0): -0.5, turn(1): 0.5}
    assert closing.masked[ACTOR] == ()


def test_groups_close_over_the_survivors() -> None:
    outcomes = [outcome(n, [turn(n)], {SOLVER: float(n)}) for n in (0, 1)]
    failed = TurnFacts(key=turn(2), finish_reason=FinishReason.STOP)
    facts = [TurnFacts(key=turn(n), finish_reason=FinishReason.STOP) for n in (0, 1)]
    closing = close(outcomes, facts=[*facts, failed])
    assert advantages(closing) == {turn(0): -0.5, turn(1): 0.5}


def test_one_survivor_is_a_group_of_one_even_when_truncated() -> None:
    closing = close([outcome(0, [turn(0), turn(0, number=1)], {SOLVER: 1.0})], truncated=(turn(0),))
    assert {sample.reason for sample in closing.masked[ACTOR]} == {GROUP_OF_ONE}
    assert closing.values[ACTOR] == ()


def test_turn_rewards_alone_are_enough() -> None:
    outcomes = [outcome(n, [turn(n)], {}, {turn(n): float(n)}) for n in (0, 1)]
    assert advantages(close(outcomes)) == {turn(0): -0.5, turn(1): 0.5}


def test_settings_of_each_policy_are_its_own() -> None:
    outcomes = [outcome(n, [turn(n), turn(n, CHECKER)], {SOLVER: float(n), CHECKER: float(n)}) for n in range(3)]
    facts = [TurnFacts(key=key, finish_reason=FinishReason.STOP) for each in outcomes for key in each.turns]
    config = {ACTOR: AlgorithmConfig(advantage_scale="none"), JUDGE: AlgorithmConfig(advantage_scale="std")}
    closing = close_query(facts, outcomes, config=config, policy_of={SOLVER: ACTOR, CHECKER: JUDGE})
    assert advantages(closing, ACTOR)[turn(2)] == 1.0
    assert advantages(closing, JUDGE)[turn(2, CHECKER)] == pytest.approx(1 / (1 + 1e-6), abs=1e-15)


def test_refuses_an_agent_that_acted_without_a_reward() -> None:
    with pytest.raises(InvariantError, match="agent checker acted but has no reward"):
        close([outcome(0, [turn(0, CHECKER)], {SOLVER: 1.0})])


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e200])
def test_refuses_a_reward_that_is_no_usable_number(reward: float) -> None:
    with pytest.raises(InvariantError, match="reward"):
        close([outcome(n, [turn(n)], {SOLVER: reward}) for n in (0, 1)])


def test_refuses_turns_that_do_not_match_the_outcomes() -> None:
    outcomes = [outcome(0, [turn(0)], {SOLVER: 1.0})]
    with pytest.raises(InvariantError, match="not known"):
        close(outcomes, facts=[])
    extra = [TurnFacts(key=turn(0, number=n), finish_reason=FinishReason.STOP) for n in (0, 1)]
    with pytest.raises(InvariantError, match="in no outcome"):
        close(outcomes, facts=extra)
    with pytest.raises(InvariantError, match="two outcomes"):
        close(outcomes * 2)
