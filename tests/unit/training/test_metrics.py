"""How metrics of agents and micro-batches become those of a step, by hand."""

import pytest

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import AgentName
from flexmarl.testing.training import make_sample
from flexmarl.training.metrics import agent_metric, combine_metrics, sample_metrics, step_metrics

pytestmark = pytest.mark.unit

A, B = AgentName("a"), AgentName("b-2")


def test_samples_are_counted_by_agent() -> None:
    samples = [
        make_sample(0, agent="a", response=[1, 2, 3], reward=0.5, policy_version=4),
        make_sample(1, agent="b-2", response=[1], reward=1.0, policy_version=5),
        make_sample(2, agent="a", response=[1], reward=-1.5, policy_version=2),
    ]
    assert sample_metrics(samples, 5) == {
        "agent.a.trained_tokens_sum": 4.0,
        "agent.a.trained_samples_sum": 2.0,
        "agent.a.reward_sum": -1.0,
        "agent.a.staleness_sum": 4.0,
        "agent.a.staleness_max": 3.0,
        "agent.a.multi_version_sum": 0.0,
        "agent.b-2.trained_tokens_sum": 1.0,
        "agent.b-2.trained_samples_sum": 1.0,
        "agent.b-2.reward_sum": 1.0,
        "agent.b-2.staleness_sum": 0.0,
        "agent.b-2.staleness_max": 0.0,
        "agent.b-2.multi_version_sum": 0.0,
    }


def test_g3_a_sample_newer_than_the_trained_version_is_refused() -> None:
    # Counters that restart make the newest samples look least stale (F2-15).
    with pytest.raises(InvariantError, match=r"s0/q0/t1/.* by version 3, but version 2 is trained"):
        sample_metrics([make_sample(0, policy_version=2), make_sample(1, policy_version=3)], 2)


def test_means_are_of_sums_over_the_step_not_of_means() -> None:
    first = {agent_metric(A, "trained_tokens_sum"): 1.0, agent_metric(A, "logprob_gap_sum"): 1.0}
    second = {
        agent_metric(A, "trained_tokens_sum"): 3.0,
        agent_metric(A, "logprob_gap_sum"): 0.0,
        agent_metric(A, "logprob_gap_max"): 0.5,
        agent_metric(B, "trained_tokens_sum"): 4.0,
        agent_metric(B, "logprob_gap_sum"): 3.0,
        agent_metric(B, "logprob_gap_max"): 0.75,
        "computed_tokens_sum": 9.0,
    }
    found = step_metrics(combine_metrics(first, second))
    assert found.agents[A] == {"logprob_gap_mean": 0.25, "logprob_gap_max": 0.5, "trained_tokens": 4.0}
    assert found.agents[B] == {"logprob_gap_mean": 0.75, "logprob_gap_max": 0.75, "trained_tokens": 4.0}
    assert found.policy == {
        "logprob_gap_mean": 0.5,
        "logprob_gap_max": 0.75,
        "trained_tokens": 8.0,
        "computed_tokens": 9.0,
    }


def test_updates_of_one_step_are_averaged() -> None:
    updates = [
        {"grad_norm_sum": 1.0, "learning_rate_sum": 0.5, "num_updates_sum": 1.0},
        {"grad_norm_sum": 4.0, "learning_rate_sum": 0.25, "num_updates_sum": 1.0},
    ]
    found = step_metrics(combine_metrics(*updates)).policy
    assert found == {"grad_norm": 2.5, "learning_rate": 0.375, "num_updates": 2.0}


def test_counts_are_reported_as_whole_numbers() -> None:
    combined = combine_metrics(
        sample_metrics([make_sample(0, agent="a", response=[1, 2])], 3), {"num_updates_sum": 1.0}
    )
    found = step_metrics(combined)
    counts = {"trained_tokens", "trained_samples", "staleness_max"}
    assert {name for name, value in found.agents[A].items() if isinstance(value, int)} == counts
    assert {name for name, value in found.policy.items() if isinstance(value, int)} == {*counts, "num_updates"}


def test_a_name_that_cannot_be_combined_is_refused() -> None:
    with pytest.raises(InvariantError, match="'grad_norm' cannot be combined"):
        combine_metrics({}, {"grad_norm": 1.0})
