"""What a workflow may return, and every way in which a reward can be bad."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from flexmarl.core.errors import WorkflowError
from flexmarl.core.ids import AgentName, SampleKey, TrajectoryKey
from flexmarl.core.records import FinishReason, OutcomeRecord, SamplingParams, TurnColumns, TurnReward
from flexmarl.models import ScriptedTokenizer
from flexmarl.workflow import Outcome, Turn
from flexmarl.workflow.api import AgentSetup
from flexmarl.workflow.outcomes import outcome_record
from flexmarl.workflow.turns import BadColumnError, BadRewardError

pytestmark = pytest.mark.unit

TRAJECTORY = TrajectoryKey(1, 2, 3)
SAMPLING = SamplingParams(max_new_tokens=9)
SETUPS = {
    AgentName(name): AgentSetup(tokenizer=ScriptedTokenizer(), sampling=SAMPLING, required_columns=frozenset(required))
    for name, required in (("writer", ()), ("judge", ()), ("bystander", ()), ("rated", ("weight",)))
}
COLUMNS = {"weight": "float", "level": "int", "is_hard": "bool", "topic": "str"}


def turn(agent: str, number: int = 0, *, reward: Any = None, branch: int = 0) -> Turn:
    key = SampleKey(1, 2, 3, AgentName(agent), branch, number)
    return Turn(key=key, text="", tokens=(1,), finish_reason=FinishReason.STOP, reward=reward, column_types=COLUMNS)


TURNS = [turn("writer"), turn("judge"), turn("writer", 1)]


def record(returned: Any, turns: list[Turn] | None = None) -> OutcomeRecord:
    return outcome_record(
        returned, turns=TURNS if turns is None else turns, setups=SETUPS, trajectory=TRAJECTORY, attempt=4
    )


# --- good outcomes ----------------------------------------------------------------------------------------------------


def test_an_outcome_becomes_a_record() -> None:
    outcome = Outcome(rewards={"writer": 1, "judge": 0.5}, success=True, metrics={"rounds": 2})
    assert record(outcome) == OutcomeRecord(
        trajectory=TRAJECTORY,
        attempt=4,
        rewards={AgentName("judge"): 0.5, AgentName("writer"): 1.0},
        turns=tuple(sorted(each.key for each in TURNS)),
        success=True,
        metrics={"rounds": 2.0},
    )


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2.0), np.int64(2), Fraction(2)])
def test_a_number_rewards_every_agent_that_acted(number: Any) -> None:
    found = record(number)
    assert found.rewards == {"writer": 2.0, "judge": 2.0}
    assert all(type(reward) is float for reward in found.rewards.values())
    assert found.success is None


def test_a_dict_is_the_rewards() -> None:
    assert record({"writer": 1.0, "judge": -3}).rewards == {"writer": 1.0, "judge": -3.0}


def test_an_agent_that_did_not_act_may_have_a_reward() -> None:
    rewards: Mapping[str, float] = {"writer": 1.0, "judge": 1.0, "bystander": 2.0}
    assert record(rewards).rewards == rewards


def test_a_workflow_without_turns_may_end() -> None:
    assert record(1.0, []).rewards == {}
    assert record(Outcome(), []).turns == ()


def test_a_turn_reward_stands_for_a_reward_of_its_agent() -> None:
    turns = [turn("writer", reward=1), turn("judge"), turn("writer", 1)]
    found = record({"judge": 0.0}, turns)
    assert found.turn_rewards == (TurnReward(key=turns[0].key, reward=1.0),)
    assert found.rewards == {"judge": 0.0}


def test_turn_rewards_come_beside_rewards() -> None:
    turns = [turn("writer", reward=0.25), turn("writer", branch=1, reward=0)]
    found = record({"writer": 1.0}, turns)
    assert [item.reward for item in found.turn_rewards] == [0.25, 0.0]
    assert found.rewards == {"writer": 1.0}


# --- bad ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "the workflow returned NoneType None; return flexmarl.Outcome(...), a number, or a dict of rewards"),
        ("good", "the workflow returned str 'good'"),
        ([1.0, 2.0], "the workflow returned list [1.0, 2.0]"),
        (1j, "the workflow returned complex 1j"),
        (float("nan"), "the reward that the workflow returned must be finite, got nan"),
        (float("inf"), "must be finite, got inf"),
        (10**400, "must be finite"),
        (1e101, "must lie within +-1e+100, got 1e+101"),
        ({"writer": 1.0}, "agent 'judge' acted but has no reward: add it to Outcome.rewards, or set turn.reward"),
        ({}, "agent 'judge' acted but has no reward"),
        (
            {"writer": 1.0, "jugde": 1.0},
            "a reward names agent 'jugde'; the configuration has: bystander, judge, rated, writer",
        ),
        ({"writer": 1.0, "judge": 1.0, 3: 1.0}, "a reward names agent 3; the configuration has"),
        ({"writer": 1.0, "judge": 1.0, 3: 1.0, "x": 1.0}, "a reward names agent 'x'; the configuration has"),
        ({"writer": 1.0, "judge": float("nan")}, "reward of agent 'judge' must be finite, got nan"),
        ({"writer": "1.0", "judge": 1.0}, "reward of agent 'writer' must be a number, got str '1.0'"),
        ({"writer": None, "judge": 1.0}, "reward of agent 'writer' must be a number, got NoneType None"),
        ({"writer": [1.0], "judge": 1.0}, "reward of agent 'writer' must be a number, got list [1.0]"),
        ({"writer": 10**400, "judge": 1.0}, "reward of agent 'writer' must be finite"),
        (Outcome(rewards=[1.0]), "Outcome.rewards must be a dict of agent to number, got [1.0]"),  # type: ignore[arg-type]
        (Outcome(rewards={"writer": 1.0}), "agent 'judge' acted but has no reward"),
        (
            Outcome(rewards={"writer": 1.0, "judge": 1.0}, success=1),  # type: ignore[arg-type]
            "Outcome.success must be True, False or None, got 1",
        ),
        (
            Outcome(rewards={"writer": 1.0, "judge": 1.0}, metrics={"m": float("inf")}),
            "metric 'm' must be finite, got inf",
        ),
        (
            Outcome(rewards={"writer": 1.0, "judge": 1.0}, metrics={"m": "x"}),  # type: ignore[dict-item]
            "metric 'm' must be a number, got str 'x'",
        ),
        (
            Outcome(rewards={"writer": 1.0, "judge": 1.0}, metrics=None),  # type: ignore[arg-type]
            "Outcome.metrics must be a dict of name to number, got None",
        ),
    ],
)
def test_g10_a_bad_return_value_says_what_and_what_to_do(returned: Any, message: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        record(returned)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "reward of turn s1/q2/t3/writer/b0/n0 must be finite, got nan"),
        ("high", "reward of turn s1/q2/t3/writer/b0/n0 must be a number, got str 'high'"),
        (-2e100, "reward of turn s1/q2/t3/writer/b0/n0 must lie within +-1e+100"),
    ],
)
def test_g10_a_bad_turn_reward_names_the_turn(reward: Any, message: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        record({}, [turn("writer", reward=reward)])
    assert message in str(caught.value)


# --- user columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("weight", 1, 1.0),
        ("weight", np.float32(0.5), 0.5),
        ("weight", Fraction(1, 4), 0.25),
        ("level", 3, 3),
        ("level", np.int64(-3), -3),
        ("level", -(2**63), -(2**63)),
        ("is_hard", False, False),
        ("topic", "sums", "sums"),
    ],
)
def test_a_column_takes_values_of_its_type(name: str, given: Any, kept: Any) -> None:
    rated = turn("writer")
    rated.columns[name] = given
    assert (rated.columns[name], type(rated.columns[name])) == (kept, type(kept))
    found = record(1.0, [rated, turn("judge")])
    assert found.turn_columns == (TurnColumns(key=rated.key, values={name: kept}),)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "wieght",
            0.5,
            "column 'wieght' = 0.5 is not declared; store.columns has: is_hard, level, topic, weight; add ",
        ),
        (
            "weight",
            float("nan"),
            "column 'weight' must be a finite number, got float nan; store.columns declares weight",
        ),
        ("weight", 10**400, "column 'weight' must be a finite number, got int 1000"),
        ("weight", True, "column 'weight' must be a number, got bool True"),
        ("weight", "high", "column 'weight' must be a number, got str 'high'; store.columns declares weight: float"),
        ("level", 0.5, "column 'level' must be a whole number of 64 bits, got float 0.5"),
        ("level", True, "column 'level' must be a whole number of 64 bits, got bool True"),
        ("level", 2**63, "column 'level' must be a whole number of 64 bits, got int 9223372036854775808"),
        ("is_hard", 1, "column 'is_hard' must be True or False, got int 1"),
        ("topic", None, "column 'topic' must be text, got NoneType None"),
        ("topic", "\ud800", "column 'topic' must be text that UTF-8 can write"),
    ],
)
def test_g10_a_bad_column_names_turn_value_and_declaration(name: str, given: Any, message: str) -> None:
    rated = turn("writer")
    with pytest.raises(BadColumnError) as caught:
        rated.columns[name] = given
    assert str(caught.value).startswith(f"turn s1/q2/t3/writer/b0/n0: {message}")
    assert len(rated.columns) == 0


def test_g10_a_turn_without_a_required_column_is_named() -> None:
    first, second = turn("rated"), turn("rated", 1)
    first.columns["weight"] = 1.0
    second.columns["level"] = 2
    with pytest.raises(BadColumnError) as caught:
        record(1.0, [first, second])
    assert str(caught.value) == (
        "turn s1/q2/t3/rated/b0/n1 has no value of column 'weight', which the policy of agent rated is trained with "
        "(algorithm.weight_column); it has: level; set turn.columns['weight'] on each of its turns"
    )
    second.columns["weight"] = 0.0
    assert [item.values for item in record(1.0, [first, second]).turn_columns] == [
        {"weight": 1.0},
        {"level": 2, "weight": 0.0},
    ]


def test_g10_a_reward_or_a_column_is_given_once() -> None:
    rated = turn("writer")
    rated.reward = 0.5
    rated.reward = 0.5
    rated.columns["level"] = 2
    rated.columns["level"] = 2
    with pytest.raises(BadRewardError, match=r"turn s1/q2/t3/writer/b0/n0: reward is 0.5 already, now 0.75"):
        rated.reward = 0.75
    with pytest.raises(BadRewardError, match="reward is 0.5 already, now None"):
        rated.reward = None
    with pytest.raises(BadColumnError, match=r"turn s1/q2/t3/writer/b0/n0: column 'level' is 2 already, now 3"):
        rated.columns["level"] = 3
    assert (rated.reward, dict(rated.columns)) == (0.5, {"level": 2})
