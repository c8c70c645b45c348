"""Groups and advantages of one query (GRPO): which rewards are compared, and what each turn is worth.

Invariants:
    A turn of an outcome gets either one advantage or one reason why it does not train.
    The order of turns and outcomes changes no bit: sums are exact (`math.fsum`) and results are in key order.
    A reward shared by many turns or branches counts once in the statistic of its group.
    A masked turn leaves the loss only; its reward stays in the statistic of its group.
    A failed trajectory has no outcome: the groups close over the others.

Source: DeepSeekMath (Shao et al. 2024), section 4.1.2, for one reward per output.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue
from flexmarl.core.records import FinishReason, OutcomeRecord

GROUP_OF_ONE = "group_of_one"
"""Mask reason: there is no other reward to compare with."""
TRUNCATED = "truncated"
"""Mask reason: the turn ran into its token limit and `algorithm.truncated` is `mask`."""
STD_EPS = 1e-6
"""Added to the standard deviation, in reward units; the value that verl uses."""
MAX_ABS_REWARD = 1e100
"""Beyond it sums of rewards could overflow."""

GroupId = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What the close of a group needs to know of a turn."""

    key: SampleKey
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSample:
    """A turn that does not train, and why."""

    key: SampleKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryClosing:
    """What the close of a query decides, by policy, each in key order. A policy whose agents never acted is absent."""

    values: Mapping[PolicyName, tuple[AdvantageValue, ...]]
    masked: Mapping[PolicyName, tuple[MaskedSample, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A turn, the group it is in, and the reward it brings there. Members of one trajectory share one reward."""

    key: SampleKey
    group: GroupId
    reward: float


def group_advantages(rewards: Sequence[float], *, scale: str) -> list[float]:
    """Return each reward minus the mean of the group and, for scale `std`, divided by its standard deviation plus 1e-6.

    The standard deviation is that of a sample (n - 1), as in TRL and verl. Equal rewards, and a single one, give zeros.
    Scale `batch_std` leaves the division to `scale_by_batch`.
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        # Decided by comparison: the mean of equal floats need not equal them, and eps would be all of the divisor.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    if scale != "std":
        return deviations
    std = math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / (len(rewards) - 1))
    return [deviation / (std + STD_EPS) for deviation in deviations]


def scale_by_batch(values: Sequence[AdvantageValue]) -> list[AdvantageValue]:
    """Return advantages minus their mean, divided by their standard deviation (n - 1) plus 1e-6.

    Both are over all trained samples of a policy's step, whose group means were subtracted before: the mean is zero
    unless samples were masked. Equal advantages, and a single one, give zeros. Source: REINFORCE++ (Hu et al. 2025,
    arXiv:2501.03262), global advantage normalisation.
    """
    scaled = group_advantages([value.advantage for value in values], scale="std")
    return [replace(value, advantage=advantage) for value, advantage in zip(values, scaled, strict=True)]


def has_signal(closing: "QueryClosing") -> bool:
    """Return whether the rewards of a query say anything: some advantage is not zero."""
    return any(value.advantage != 0.0 for values in closing.values.values() for value in values)


def close_query(
    turns: Sequence[TurnFacts],
    outcomes: Sequence[OutcomeRecord],
    *,
    config: Mapping[PolicyName, AlgorithmConfig],
    policy_of: Mapping[AgentName, PolicyName],
    penalties: Mapping[SampleKey, float] | None = None,
) -> QueryClosing:
    """Return advantages and masks of every turn of one query whose trajectories have all ended.

    Args:
        turns: The turns of the query in any order; those of failed trajectories are ignored.
        outcomes: One per trajectory that did not fail.
        config: Algorithm settings of each policy.
        policy_of: The policy of each agent.
        penalties: What the reward of a turn, and with it that of its agent, is lowered by before the comparison.

    Raises:
        InvariantError: outcomes of several queries, a turn that is missing or in no outcome, or a reward that is
            missing or not finite; the workflow layer refuses bad rewards before they come here.
    """
    truncated = {turn.key: turn.finish_reason is FinishReason.LENGTH for turn in turns}
    _check(outcomes, truncated)
    by_policy: dict[PolicyName, list[_Member]] = defaultdict(list)
    for outcome in outcomes:
        acting: dict[PolicyName, list[SampleKey]] = defaultdict(list)
        for key in outcome.turns:
            acting[policy_of[key.agent]].append(key)
        for policy, keys in acting.items():
            by_policy[policy].extend(_members(keys, outcome, policy, config[policy], penalties or {}))
    values: dict[PolicyName, tuple[AdvantageValue, ...]] = {}
    masked: dict[PolicyName, tuple[MaskedSample, ...]] = {}
    for policy, members in sorted(by_policy.items()):
        values[policy], masked[policy] = _judge(members, truncated, config[policy])
    return QueryClosing(values=values, masked=masked)


def _check(outcomes: Sequence[OutcomeRecord], truncated: Mapping[SampleKey, bool]) -> None:
    places = {(outcome.trajectory.step, outcome.trajectory.query) for outcome in outcomes}
    if len(places) > 1:
        raise InvariantError(f"outcomes of several queries were closed together (step, query): {sorted(places)}")
    trajectories = {outcome.trajectory for outcome in outcomes}
    if len(trajectories) != len(outcomes):
        raise InvariantError(f"a trajectory has two outcomes among: {sorted(map(str, trajectories))}")
    listed = {key for outcome in outcomes for key in outcome.turns}
    if missing := listed - truncated.keys():
        raise InvariantError(f"{len(missing)} turns of the outcomes are not known, first {min(missing)}")
    if extra := {key for key in truncated if key.trajectory_key in trajectories} - listed:
        raise InvariantError(f"{len(extra)} turns are in no outcome of their trajectory, first {min(extra)}")


def _members(
    keys: Sequence[SampleKey],
    outcome: OutcomeRecord,
    policy: PolicyName,
    config: AlgorithmConfig,
    penalties: Mapping[SampleKey, float],
) -> list[_Member]:
    """Return the turns of one policy in one trajectory with their groups and rewards."""
    own = {item.key: _finite(item.reward, item.key) for item in outcome.turn_rewards}
    agents = sorted({key.agent for key in keys})
    given = {agent: _agent_reward(agent, outcome) for agent in agents}
    rewards = {
        agent: given[agent] - math.fsum(penalties.get(key, 0.0) for key in keys if key.agent == agent)
        for agent in agents
    }
    match config.group_key:
        case "agent":
            return [_Member(key=key, group=(key.agent,), reward=rewards[key.agent]) for key in keys]
        case "query":
            mean = math.fsum(rewards.values()) / len(rewards)
            return [_Member(key=key, group=(policy,), reward=mean) for key in keys]
        case "agent_turn":
            return [
                _Member(
                    key=key,
                    group=(key.agent, key.branch, key.turn),
                    reward=own.get(key, given[key.agent]) - penalties.get(key, 0.0),
                )
                for key in keys
            ]


def _agent_reward(agent: AgentName, outcome: OutcomeRecord) -> float:
    """Return an agent's trajectory reward: its outcome reward plus its turn rewards, of which it needs one."""
    parts = [item.reward for item in outcome.turn_rewards if item.key.agent == agent]
    if agent in outcome.rewards:
        parts.append(outcome.rewards[agent])
    if not parts:
        raise InvariantError(f"{outcome.trajectory}: agent {agent} acted but has no reward")
    for part in parts:
        _finite(part, outcome.trajectory)
    return math.fsum(parts)


def _finite(reward: float, where: SampleKey | TrajectoryKey) -> float:
    if not abs(reward) <= MAX_ABS_REWARD:
        raise InvariantError(f"{where}: reward {reward} is not a number within +-{MAX_ABS_REWARD}")
    return reward


def _judge(
    members: Sequence[_Member], truncated: Mapping[SampleKey, bool], config: AlgorithmConfig
) -> tuple[tuple[AdvantageValue, ...], tuple[MaskedSample, ...]]:
    """Compare within each group, then mask. A group of one is named before truncation: nothing could save its turn."""
    rewards: dict[GroupId, dict[TrajectoryKey, float]] = defaultdict(dict)
    for member in members:
        rewards[member.group][member.key.trajectory_key] = member.reward
    advantages = {
        group: dict(zip(of_group, group_advantages(list(of_group.values()), scale=config.advantage_scale), strict=True))
        for group, of_group in rewards.items()
    }
    values: list[AdvantageValue] = []
    masked: list[MaskedSample] = []
    for member in sorted(members, key=lambda each: each.key):
        if len(rewards[member.group]) == 1:
            masked.append(MaskedSample(key=member.key, reason=GROUP_OF_ONE))
        elif truncated[member.key] and config.truncated == "mask":
            masked.append(MaskedSample(key=member.key, reason=TRUNCATED))
        else:
            advantage = advantages[member.group][member.key.trajectory_key]
            values.append(AdvantageValue(key=member.key, advantage=advantage, reward=member.reward))
    return tuple(values), tuple(masked)
