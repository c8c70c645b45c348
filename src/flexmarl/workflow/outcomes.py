"""Checks what a workflow returned and brings its short forms into one record."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from flexmarl.core.errors import WorkflowError
from flexmarl.core.ids import AgentName, TrajectoryKey
from flexmarl.core.records import OutcomeRecord, TurnColumns, TurnReward
from flexmarl.workflow.api import AgentSetup, Outcome
from flexmarl.workflow.turns import BadColumnError, Turn

MAX_ABS_REWARD = 1e100
"""Beyond it the statistics of a group could overflow; `algorithms/groups.py` has the same limit."""


def outcome_record(
    returned: Any,
    *,
    turns: Sequence[Turn],
    setups: Mapping[AgentName, AgentSetup],
    trajectory: TrajectoryKey,
    attempt: int,
) -> OutcomeRecord:
    """Return the record of what a workflow returned: an Outcome, a number (the reward of all), or a dict of rewards.

    Raises:
        WorkflowError: a reward is missing for an agent that acted, is not a finite number, or names an unknown agent;
            or a turn lacks a column that its policy is trained with (BadColumnError).
    """
    acted = sorted({turn.key.agent for turn in turns})
    outcome = _as_outcome(returned, acted)
    if not isinstance(outcome.rewards, Mapping):
        raise WorkflowError(f"Outcome.rewards must be a dict of agent to number, got {outcome.rewards!r:.80}")
    if not isinstance(outcome.metrics, Mapping):
        raise WorkflowError(f"Outcome.metrics must be a dict of name to number, got {outcome.metrics!r:.80}")
    if unknown := sorted(set(outcome.rewards) - set(setups), key=repr):
        raise WorkflowError(f"a reward names agent {unknown[0]!r}; the configuration has: {', '.join(sorted(setups))}")
    turn_rewards = tuple(
        TurnReward(key=turn.key, reward=_reward(turn.reward, f"reward of turn {turn.key}"))
        for turn in turns
        if turn.reward is not None
    )
    rewarded = set(outcome.rewards) | {item.key.agent for item in turn_rewards}
    if missing := [agent for agent in acted if agent not in rewarded]:
        raise WorkflowError(
            f"agent {missing[0]!r} acted but has no reward: add it to Outcome.rewards, or set turn.reward"
        )
    if outcome.success is not None and not isinstance(outcome.success, bool):
        raise WorkflowError(f"Outcome.success must be True, False or None, got {outcome.success!r:.80}")
    return OutcomeRecord(
        trajectory=trajectory,
        attempt=attempt,
        rewards={AgentName(a): _reward(r, f"reward of agent {a!r}") for a, r in sorted(outcome.rewards.items())},
        turn_rewards=turn_rewards,
        turns=tuple(sorted(turn.key for turn in turns)),
        success=outcome.success,
        metrics={str(name): _number(value, f"metric {name!r}") for name, value in outcome.metrics.items()},
        turn_columns=_turn_columns(turns, setups),
    )


def _turn_columns(turns: Sequence[Turn], setups: Mapping[AgentName, AgentSetup]) -> tuple[TurnColumns, ...]:
    for turn in turns:
        if missing := sorted(setups[turn.key.agent].required_columns - set(turn.columns)):
            raise BadColumnError(
                f"turn {turn.key} has no value of column {missing[0]!r}, which the policy of agent {turn.key.agent} is "
                f"trained with (algorithm.weight_column); it has: {', '.join(sorted(turn.columns)) or 'none'}; set "
                f"turn.columns[{missing[0]!r}] on each of its turns"
            )
    return tuple(TurnColumns(key=turn.key, values=dict(turn.columns)) for turn in turns if turn.columns)


def _as_outcome(returned: Any, acted: Sequence[AgentName]) -> Outcome:
    if isinstance(returned, Outcome):
        return returned
    if isinstance(returned, Mapping):
        return Outcome(rewards=returned)
    if isinstance(returned, Real):
        return Outcome(rewards=dict.fromkeys(acted, _number(returned, "the reward that the workflow returned")))
    raise WorkflowError(
        f"the workflow returned {type(returned).__name__} {returned!r:.60}; "
        "return flexmarl.Outcome(...), a number, or a dict of rewards"
    )


def _number(value: Any, what: str) -> float:
    if not isinstance(value, Real):
        raise WorkflowError(f"{what} must be a number, got {type(value).__name__} {value!r:.60}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WorkflowError(f"{what} must be finite, got {number}")
    return number


def _reward(value: Any, what: str) -> float:
    number = _number(value, what)
    if abs(number) > MAX_ABS_REWARD:
        raise WorkflowError(f"{what} must lie within +-{MAX_ABS_REWARD:g}, got {number}")
    return number
