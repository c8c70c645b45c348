"""What a step gives to train: random teams, their turns, failures and advantages, and cuts into micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from flexmarl.algorithms import TurnFacts, close_query
from flexmarl.config import AlgorithmConfig
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import FinishReason, OutcomeRecord, Sample
from flexmarl.testing.training import TINY_VOCABULARY, make_sample

POLICIES = (PolicyName("p0"), PolicyName("p1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Agents of a random workflow, each with a policy, branches, and turns per branch."""

    policy_of: Mapping[AgentName, PolicyName]
    num_branches: Mapping[AgentName, int]
    num_turns: Mapping[AgentName, int]

    @classmethod
    def random(cls, rng: Random) -> "Team":
        agents = [AgentName(f"a{n}") for n in range(rng.randint(1, 3))]
        return cls(
            policy_of={agent: rng.choice(POLICIES) for agent in agents},
            num_branches={agent: rng.randint(1, 2) for agent in agents},
            num_turns={agent: rng.randint(1, 2) for agent in agents},
        )


def random_turns(team: Team, key: TrajectoryKey, rng: Random) -> list[Sample]:
    """The turns of a trajectory, as samples without advantage."""
    turns = []
    for agent, policy in team.policy_of.items():
        for branch in range(team.num_branches[agent]):
            for turn in range(team.num_turns[agent]):
                response = [rng.randrange(TINY_VOCABULARY) for _ in range(rng.randint(1, 6))]
                sample = make_sample(
                    prompt=[rng.randrange(TINY_VOCABULARY) for _ in range(rng.randint(1, 6))],
                    response=response,
                    policy=policy,
                    temperature=rng.choice([0.7, 1.0, 1.3]),
                    logprobs=[-rng.uniform(0.05, 4.0) for _ in response],
                )
                row = replace(
                    sample.turn,
                    key=SampleKey(key.step, key.query, key.trajectory, agent, branch, turn),
                    finish_reason=FinishReason.LENGTH if rng.random() < 0.1 else FinishReason.STOP,
                )
                turns.append(replace(sample, turn=row))
    return turns


Samples = dict[PolicyName, list[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedStep:
    """Everything that the rollouts of a step gave; about one trajectory in eight failed."""

    team: Team
    queries: Sequence[tuple[Sequence[Sample], Sequence[OutcomeRecord]]]

    @classmethod
    def random(cls, team: Team, step: int, rng: Random) -> "GeneratedStep":
        queries = []
        for query in range(rng.randint(1, 2)):
            turns: list[Sample] = []
            outcomes = []
            for trajectory in range(rng.randint(2, 3)):
                key = TrajectoryKey(step, query, trajectory)
                own = random_turns(team, key, rng)
                turns.extend(own)
                if rng.random() >= 0.125:
                    outcomes.append(
                        OutcomeRecord(
                            trajectory=key,
                            attempt=0,
                            rewards={agent: rng.choice([0.0, 1.0, rng.random()]) for agent in team.policy_of},
                            turns=tuple(sorted(sample.turn.key for sample in own)),
                        )
                    )
            queries.append((turns, outcomes))
        return cls(team=team, queries=queries)

    def samples(self, algorithm: AlgorithmConfig, rng: Random | None = None) -> Samples:
        """The samples of each policy that train; with `rng`, everything arrives in another order."""
        found: Samples = {policy: [] for policy in POLICIES}
        for turns, outcomes in shuffled(self.queries, rng):
            by_key = {sample.turn.key: sample for sample in turns}
            closing = close_query(
                [
                    TurnFacts(key=sample.turn.key, finish_reason=sample.turn.finish_reason)
                    for sample in shuffled(turns, rng)
                ],
                shuffled(outcomes, rng),
                config=dict.fromkeys(POLICIES, algorithm),
                policy_of=self.team.policy_of,
            )
            for policy, values in closing.values.items():
                found[policy].extend(
                    replace(by_key[value.key], advantage=value.advantage, reward=value.reward)
                    for value in shuffled(values, rng)
                )
        return {policy: samples for policy, samples in found.items() if samples}


T = TypeVar("T")


def shuffled(items: Sequence[T], rng: Random | None) -> list[T]:
    return list(items) if rng is None else rng.sample(items, len(items))


def random_cut(samples: Sequence[Sample], rng: Random) -> list[list[Sample]]:
    """The samples in micro-batches."""
    ends = sorted(rng.sample(range(1, len(samples)), rng.randint(0, len(samples) - 1)))
    return [list(samples[start:end]) for start, end in zip([0, *ends], [*ends, len(samples)], strict=True)]
