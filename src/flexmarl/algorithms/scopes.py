"""Over which samples each statistic of an algorithm is taken, and which pipeline mode can know it in time.

Gradient work on a sample may start only when every statistic that its loss uses is final. A statistic of scope `step`
is no obstacle: it is a sum that divides once, at the update.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from flexmarl.config import AlgorithmConfig


class StatisticScope(StrEnum):
    """The samples that a statistic is over, and so the moment when it is final."""

    GROUP = "group"
    """When the group closes."""
    POLICY_BATCH = "policy_batch"
    """When all rollouts of the step have ended: all trained samples of one policy."""
    STEP = "step"
    """At the update: a sum over all trained samples of one policy that divides the gradient once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """Something that is computed over several samples."""

    name: str
    option: str
    """The configuration that asks for it: `algorithm.advantage_scale=std`."""
    scope: StatisticScope


def statistics(config: AlgorithmConfig) -> tuple[Statistic, ...]:
    """Return every statistic that the algorithm uses. Terms of the loss beside these are of one token alone."""
    scale = f"algorithm.advantage_scale={config.advantage_scale}"
    found = [
        Statistic(name="mean_reward", option=f"algorithm.group_key={config.group_key}", scope=StatisticScope.GROUP)
    ]
    match config.advantage_scale:
        case "std":
            found.append(Statistic(name="group_std", option=scale, scope=StatisticScope.GROUP))
        case "batch_std":
            found.append(Statistic(name="batch_std", option=scale, scope=StatisticScope.POLICY_BATCH))
        case "none":
            pass
        case _:
            assert_never(config.advantage_scale)
    normaliser = f"algorithm.normaliser={config.normaliser}"
    found.append(Statistic(name="denominator", option=normaliser, scope=StatisticScope.STEP))
    return tuple(found)


def unclosable(mode: str, config: AlgorithmConfig) -> list[str]:
    """Return what is wrong with a pipeline mode that cannot know a statistic before gradient work needs it.

    In `strict` and `bounded_async` mode a policy that makes one update per step starts when its first group closes.
    In the other modes, and with several updates, gradient work starts when the step has been generated.
    """
    if mode not in ("strict", "bounded_async") or config.num_updates > 1:
        return []
    return [
        f"{statistic.option} with pipeline.mode={mode}: {statistic.name} is over all samples of the policy's step, but "
        "gradient work starts when the first group closes: use advantage_scale=std or none, or pipeline.mode=serial or "
        "one_step_off"
        for statistic in statistics(config)
        if statistic.scope is StatisticScope.POLICY_BATCH
    ]
