"""Groups do not depend on order, and every turn gets an advantage or a reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.algorithms import TurnFacts, close_query
from flexmarl.config import AlgorithmConfig
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import FinishReason, OutcomeRecord, TurnReward

pytestmark = pytest.mark.property

AGENTS = [AgentName(name) for name in ("a", "b", "c")]
POLICY_OF = {AGENTS[0]: PolicyName("p"), AGENTS[1]: PolicyName("p"), AGENTS[2]: PolicyName("q")}
rewards = st.floats(-1e6, 1e6, allow_nan=False)


@st.composite
def queries(draw: st.DrawFn) -> tuple[list[TurnFacts], list[OutcomeRecord]]:
    facts, outcomes = [], []
    for trajectory in range(draw(st.integers(0, 5))):
        places = draw(st.sets(st.tuples(st.sampled_from(AGENTS), st.integers(0, 1), st.integers(0, 2)), max_size=5))
        keys = [SampleKey(1, 2, trajectory, *place) for place in sorted(places)]
        facts += [TurnFacts(key=key, finish_reason=draw(st.sampled_from(list(FinishReason)))) for key in keys]
        own = [TurnReward(key=key, reward=draw(rewards)) for key in keys if draw(st.booleans())]
        outcomes.append(
            OutcomeRecord(
                trajectory=TrajectoryKey(1, 2, trajectory),
                attempt=0,
                rewards={agent: draw(rewards) for agent in AGENTS},
                turn_rewards=tuple(own),
                turns=tuple(keys),
            )
        )
    return facts, outcomes


configs = st.builds(
    AlgorithmConfig,
    group_key=st.sampled_from(["agent", "query", "agent_turn"]),
    advantage_scale=st.sampled_from(["std", "none"]),
    truncated=st.sampled_from(["train", "mask"]),
)


@settings(deadline=None)
@given(query=queries(), config=configs, data=st.data())
def test_every_turn_is_judged_once_whatever_the_order(
    query: tuple[list[TurnFacts], list[OutcomeRecord]], config: AlgorithmConfig, data: st.DataObject
) -> None:
    facts, outcomes = query
    algorithms = {PolicyName("p"): config, PolicyName("q"): config}
    closing = close_query(facts, outcomes, config=algorithms, policy_of=POLICY_OF)
    judged = [value.key for values in closing.values.values() for value in values]
    judged += [sample.key for samples in closing.masked.values() for sample in samples]
    assert sorted(judged) == sorted(fact.key for fact in facts)
    shuffled = close_query(
        data.draw(st.permutations(facts)), data.draw(st.permutations(outcomes)), config=algorithms, policy_of=POLICY_OF
    )
    assert shuffled == closing


@settings(deadline=None)
@given(query=queries(), config=configs)
def test_advantages_of_a_group_sum_to_zero(
    query: tuple[list[TurnFacts], list[OutcomeRecord]], config: AlgorithmConfig
) -> None:
    """Over trajectories, each once, when no turn is masked."""
    facts = [TurnFacts(key=fact.key, finish_reason=FinishReason.STOP) for fact in query[0]]
    algorithms = {PolicyName("p"): config, PolicyName("q"): config}
    closing = close_query(facts, query[1], config=algorithms, policy_of=POLICY_OF)
    for policy, values in closing.values.items():
        groups: dict[object, dict[int, float]] = {}
        for value in values:
            key = value.key
            group = {"agent": key.agent, "query": policy, "agent_turn": (key.agent, key.branch, key.turn)}
            groups.setdefault(group[config.group_key], {})[key.trajectory] = value.advantage
        for advantages in groups.values():
            assert abs(sum(advantages.values())) <= 1e-9 * (1 + sum(map(abs, advantages.values())))
