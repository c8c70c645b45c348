"""Success on held-out queries at a version boundary, and how two evaluations differ.

An evaluation uses the run's own instances and seeds that do not contain the step, so that each query and sample meets
the same random numbers before and after. Its rows never enter the experience store.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from flexmarl.config import EvalConfig
from flexmarl.core.ids import Purpose, TrajectoryKey
from flexmarl.core.records import OutcomeRecord, TrajectoryFailure, TurnRow
from flexmarl.orchestrator.trajectory_set import EndedTrajectory, TrajectorySet

Z_95 = 1.96
"""Two-sided 95 % quantile of the normal distribution."""


class NoSink:
    """Implements TrajectorySink without keeping anything: attempts are counted, the rest goes by."""

    def __init__(self) -> None:
        """Count attempts from 0."""
        self._attempts: dict[TrajectoryKey, int] = {}

    def begin_attempt(self, key: TrajectoryKey, then: Callable[[int], None]) -> None:
        """Give the number of the next attempt."""
        attempt = self._attempts.get(key, -1) + 1
        self._attempts[key] = attempt
        then(attempt)

    def put_turn(self, row: TurnRow, then: Callable[[], None]) -> None:
        """Go on."""
        then()

    def record_outcome(self, outcome: OutcomeRecord, then: Callable[[], None]) -> None:
        """Go on."""
        then()

    def record_failure(self, failure: TrajectoryFailure, then: Callable[[], None]) -> None:
        """Go on."""
        then()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Scores per held-out query."""

    policy_version: int
    sampled: Mapping[int, float]
    """Query to the mean success of its samples."""
    greedy: Mapping[int, float]
    """Query to its success at temperature 0; empty when that is off."""
    rewards: Mapping[str, float]
    """Agent to its mean trajectory reward, over sampled trajectories."""
    has_success: bool
    """The workflow gave `Outcome.success`; otherwise the mean reward of the acting agents stands in for it."""
    num_failed: int
    """Trajectories that failed; they count as no success."""
    duration_s: float

    @property
    def success(self) -> float:
        """Mean over queries."""
        return fmean(self.sampled.values())

    @property
    def greedy_success(self) -> float | None:
        """Mean over queries at temperature 0."""
        return fmean(self.greedy.values()) if self.greedy else None

    def metrics(self) -> dict[str, float]:
        """Return the figures for the event log."""
        metrics = {"success_frac": self.success, "num_failed": float(self.num_failed)}
        if self.greedy_success is not None:
            metrics["greedy_success_frac"] = self.greedy_success
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """After minus before, over the same queries."""

    mean: float
    lower_95: float
    """Lower end of the two-sided 95 % confidence interval of the mean (normal approximation over queries)."""
    num_queries: int


def paired_difference(before: Mapping[int, float], after: Mapping[int, float]) -> PairedDifference:
    """Return how `after` differs from `before`, query by query; queries in one of them only are left out.

    Raises:
        ValueError: they share no query.
    """
    differences = [after[query] - before[query] for query in sorted(before.keys() & after.keys())]
    if not differences:
        raise ValueError("the evaluations share no query")
    mean = fmean(differences)
    half_width = Z_95 * stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return PairedDifference(mean=mean, lower_95=mean - half_width, num_queries=len(differences))


def evaluation_set(
    config: EvalConfig, queries: Sequence[Mapping[str, object]], *, policy_version: int
) -> TrajectorySet:
    """Return the trajectories of an evaluation: the samples of each query, then its greedy run."""
    num_queries = min(config.num_queries, len(queries))
    sampled = [TrajectoryKey(policy_version, q, n) for q in range(num_queries) for n in range(config.samples_per_query)]
    greedy = [TrajectoryKey(policy_version, q, config.samples_per_query) for q in range(num_queries)]
    return TrajectorySet(
        purpose=Purpose.EVAL,
        min_version=policy_version,
        max_version=policy_version,
        queries=dict(enumerate(queries[:num_queries])),
        keys=(*sampled, *(greedy if config.greedy else ())),
        greedy=frozenset(greedy if config.greedy else ()),
        temperature=config.temperature,
    )


def evaluation_result(
    trajectories: Sequence[EndedTrajectory], which: TrajectorySet, *, duration_s: float
) -> EvaluationResult:
    """Score the ended trajectories of an evaluation."""
    sampled: dict[int, list[float]] = {}
    greedy: dict[int, float] = {}
    rewards: dict[str, list[float]] = {}
    for each in trajectories:
        if each.key in which.greedy:
            greedy[each.key.query] = _score(each)
            continue
        sampled.setdefault(each.key.query, []).append(_score(each))
        if each.outcome is not None:
            for agent, reward in agent_rewards(each.outcome).items():
                rewards.setdefault(agent, []).append(reward)
    return EvaluationResult(
        policy_version=which.max_version,
        sampled={query: fmean(scores) for query, scores in sorted(sampled.items())},
        greedy=dict(sorted(greedy.items())),
        rewards={agent: fmean(values) for agent, values in sorted(rewards.items())},
        has_success=any(each.outcome is not None and each.outcome.success is not None for each in trajectories),
        num_failed=sum(each.failure is not None for each in trajectories),
        duration_s=duration_s,
    )


def agent_rewards(outcome: OutcomeRecord) -> dict[str, float]:
    """Return each agent's trajectory reward: its reward in the outcome plus its turn rewards."""
    rewards: dict[str, float] = {str(agent): reward for agent, reward in outcome.rewards.items()}
    for item in outcome.turn_rewards:
        rewards[item.key.agent] = rewards.get(item.key.agent, 0.0) + item.reward
    return rewards


def _score(trajectory: EndedTrajectory) -> float:
    if trajectory.outcome is None:
        return 0.0
    if trajectory.outcome.success is not None:
        return float(trajectory.outcome.success)
    rewards = agent_rewards(trajectory.outcome)
    return fmean(rewards.values()) if rewards else 0.0
