"""Whole runs of the unmodified orchestrator under virtual time: order, overlap, failures as data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flexmarl
from flexmarl.api import TrainResult, train
from flexmarl.config import parse_config
from flexmarl.core.errors import WorkflowError
from flexmarl.core.events import (
    AllocationDecided,
    EvaluationDone,
    GroupClosed,
    MicroBatchLeased,
    RequestDispatched,
    RunEnded,
    RunStarted,
    SamplesMasked,
    StepCommitted,
    StepDispatched,
)
from flexmarl.core.messages import Generated, StatePublished, TrajectoryEnded, TrajectoryFailed, UpdateApplied
from flexmarl.telemetry import LoggedEvent, read_events, read_metrics

pytestmark = pytest.mark.integration

NUM_STEPS = 3
NUM_QUERIES = 4
NUM_TRAJECTORIES = 4


# --- the team ---------------------------------------------------------------------------------------------------------


def load_queries(*, split: str, num_queries: int | None, seed: int) -> list[dict[str, Any]]:
    """A data source: `num_queries` rows, eight for training."""
    return [{"number": number, "text": f"{split} {number}"} for number in range(num_queries or 8)]


@flexmarl.workflow
async def write_and_judge(episode: flexmarl.Episode) -> flexmarl.Outcome:
    """Two agents in turn; rewards follow from their texts, so they differ within a group."""
    draft = await episode.agent("writer").chat(episode.query["text"])
    verdict = await episode.agent("judge").chat(draft.text)
    rewards = {"writer": float(len(draft.text) % 3), "judge": float(len(verdict.text) % 2)}
    return flexmarl.Outcome(rewards=rewards, success=len(draft.text) % 3 == 2, metrics={"length": len(draft.text)})


@flexmarl.workflow
async def sometimes_fails(episode: flexmarl.Episode) -> flexmarl.Outcome:
    """Raises in the first trajectory of each even query, after its writer has acted."""
    draft = await episode.agent("writer").chat(episode.query["text"])
    if episode.query["number"] % 2 == 0 and draft.key.trajectory == 0:
        raise ValueError(f"no answer to {episode.query['number']}")
    verdict = await episode.agent("judge").chat(draft.text)
    return flexmarl.Outcome(rewards={"writer": float(len(draft.text)), "judge": float(len(verdict.text))})


@flexmarl.workflow
async def always_fails(episode: flexmarl.Episode) -> flexmarl.Outcome:
    """A workflow with a bug."""
    raise LookupError(f"nothing known of {episode.query['text']}")


# --- runs -------------------------------------------------------------------------------------------------------------


def run(folder: Path, workflow: str = "write_and_judge", overrides: Sequence[str] = ()) -> TrainResult:
    plain = {
        "run": {"name": "simulated", "dir": str(folder)},
        "data": {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:{workflow}"},
        "policies": {"small": {"model": "none", "num_instances": 2}, "large": {"model": "none"}},
        "agents": {"writer": {"policy": "small"}, "judge": {"policy": "large", "max_new_tokens": 24}},
        "pipeline": {
            "num_steps": NUM_STEPS,
            "queries_per_step": NUM_QUERIES,
            "trajectories_per_query": NUM_TRAJECTORIES,
        },
        "rollout": {
            "backend": {"kind": "scripted", "token_s": 0.01, "prefill_token_s": 0.001, "num_slots": 4},
            "max_new_tokens": 32,
        },
        "training": {
            "backend": {"kind": "scripted", "token_s": 0.001, "update_s": 0.05, "num_parameters": 8},
            "micro_batch_tokens": 64,
            "seal_every": 3,
        },
        "eval": {"num_queries": 4, "samples_per_query": 2},
        "store": {"kind": "memory"},
        "runtime": {"kind": "simulated"},
    }
    return train(parse_config(plain, overrides))


def events_of(result: TrainResult) -> list[LoggedEvent]:
    return list(read_events(result.run_dir / "events.jsonl"))


def of_kind(events: list[LoggedEvent], kind: type[Any]) -> list[Any]:
    return [event.record for event in events if isinstance(event.record, kind)]


def digests(result: TrainResult) -> dict[str, str]:
    return {name: policy["weights_digest"]["after"] for name, policy in result.summary["policies"].items()}


def trained_keys(events: list[LoggedEvent]) -> list[tuple[str, str]]:
    """Every leased sample: without deaths each lease is trained."""
    return sorted((lease.policy, str(key)) for lease in of_kind(events, MicroBatchLeased) for key in lease.keys)


# --- tests ------------------------------------------------------------------------------------------------------------


def test_two_runs_are_the_same_event_by_event(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    events = events_of(first)
    assert events == events_of(second)
    assert first.summary == {**second.summary, "peak_pss_bytes": first.summary["peak_pss_bytes"]}
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert (tmp_path / "a/trajectories.jsonl").read_bytes() == (tmp_path / "b/trajectories.jsonl").read_bytes()
    other = run(tmp_path / "c", overrides=["run.seed=1"])
    assert digests(other) != digests(first)


def test_g1_serial_and_strict_train_the_same_samples_to_the_same_weights(tmp_path: Path) -> None:
    strict = run(tmp_path / "strict")
    serial = run(tmp_path / "serial", overrides=["pipeline.mode=serial"])
    assert digests(serial) == digests(strict)
    assert len(set(digests(strict).values())) == 2
    assert trained_keys(events_of(serial)) == trained_keys(events_of(strict))
    assert len(set(trained_keys(events_of(strict)))) == len(trained_keys(events_of(strict)))


def test_strict_training_overlaps_rollout_and_serial_does_not(tmp_path: Path) -> None:
    strict = run(tmp_path / "strict")
    serial = run(tmp_path / "serial", overrides=["pipeline.mode=serial"])
    assert num_leases_before_last_trajectory(events_of(strict)) == [True] * NUM_STEPS
    assert num_leases_before_last_trajectory(events_of(serial)) == [False] * NUM_STEPS
    assert strict.summary["wall_s"] < serial.summary["wall_s"]


def num_leases_before_last_trajectory(events: list[LoggedEvent]) -> list[bool]:
    """For each step: whether a micro-batch was leased before the last trajectory ended."""
    overlaps = []
    for step in range(NUM_STEPS):
        ends = [
            event.seq
            for event in events
            if isinstance(event.record, TrajectoryEnded)
            and event.record.purpose == "train"
            and event.record.outcome.trajectory.step == step
        ]
        leases = [
            event.seq
            for event in events
            if isinstance(event.record, MicroBatchLeased) and event.record.keys[0].step == step
        ]
        assert len(ends) == NUM_QUERIES * NUM_TRAJECTORIES
        assert leases
        overlaps.append(min(leases) < max(ends))
    return overlaps


def test_g3_g4_versions_advance_in_lockstep(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    events = events_of(result)
    commits = [record.commit for record in of_kind(events, StepCommitted)]
    assert [(commit.step, commit.policy_version) for commit in commits] == [(0, 1), (1, 2), (2, 3)]
    for commit in commits:
        assert {part.weights_version for part in commit.policies.values()} == {commit.policy_version}
    version = 0
    for event in events:
        match event.record:
            case StepCommitted():
                version += 1
            case StepDispatched():
                assert event.record.dispatch.max_version == version
            case Generated():
                spans = event.record.completion.version_spans
                assert {span.policy_version for span in spans} == {version}
    assert result.summary["steps"] == NUM_STEPS
    rows = list(read_metrics(result.run_dir / "metrics.jsonl"))
    assert [row["policy/small/weights_version"] for row in rows] == [1, 2, 3]


def test_g4_the_digest_of_each_update_is_what_instances_load_and_the_record_keeps(tmp_path: Path) -> None:
    events = events_of(run(tmp_path / "run"))
    updates = {(u.policy, u.policy_version): u.weights_digest for u in of_kind(events, UpdateApplied)}
    first = {(p.policy, 0): p.weights_digest for p in of_kind(events, StatePublished)}
    loaded = [event for event in events if type(event.record).__name__ == "WeightsLoaded"]
    assert len(loaded) == 3 * (NUM_STEPS + 1)
    for event in loaded:
        record: Any = event.record
        assert record.digest == (updates | first)[record.policy, record.policy_version]
    for commit in (record.commit for record in of_kind(events, StepCommitted)):
        for policy, part in commit.policies.items():
            assert part.weights_digest == updates[policy, commit.policy_version]


def test_g2_every_turn_of_a_step_is_trained_or_masked_once(tmp_path: Path) -> None:
    events = events_of(run(tmp_path / "run"))
    leased = [key for lease in of_kind(events, MicroBatchLeased) for key in lease.keys]
    masked = [key for record in of_kind(events, SamplesMasked) for key in record.keys]
    turns = {
        key for record in of_kind(events, TrajectoryEnded) if record.purpose == "train" for key in record.outcome.turns
    }
    assert sorted(leased + masked) == sorted(turns)
    assert len(turns) == NUM_STEPS * NUM_QUERIES * NUM_TRAJECTORIES * 2
    assert masked  # truncated turns: the default masks them
    counted = sum(
        part.denominators.num_samples
        for record in of_kind(events, StepCommitted)
        for part in record.commit.policies.values()
    )
    assert counted == len(leased)


def test_the_log_tells_the_run_from_start_to_end(tmp_path: Path) -> None:
    events = events_of(run(tmp_path / "run"))
    assert events[0].record == RunStarted(name="simulated", seed=0, policy_version=0, is_resumed=False)
    assert events[-1].record == RunEnded(policy_version=NUM_STEPS, reason="finished")
    assert len(of_kind(events, GroupClosed)) == NUM_STEPS * NUM_QUERIES
    assert [record.policy_version for record in of_kind(events, EvaluationDone)] == [0, NUM_STEPS]
    num_evaluated = 2 * 4 * (2 + 1) * 2  # twice, 4 queries, 2 samples and a greedy run, 2 agents
    num_trained = NUM_STEPS * NUM_QUERIES * NUM_TRAJECTORIES * 2
    assert len(of_kind(events, RequestDispatched)) == num_evaluated + num_trained
    queries = [record.dispatch.queries for record in of_kind(events, StepDispatched)]
    assert sorted(queries[0] + queries[1]) == list(range(8))  # an epoch is two steps


def test_an_evaluation_after_meets_the_same_random_numbers_as_before(tmp_path: Path) -> None:
    # Scripted tokens follow from the request's seed alone, so both evaluations must score the same.
    summary = run(tmp_path / "run").summary
    assert summary["eval"]["before"]["success"] == summary["eval"]["after"]["success"]
    assert summary["eval"]["difference"] == {"mean": 0.0, "lower_95": 0.0, "num_queries": 4}


def test_g6_one_shared_slot_gives_the_weights_of_a_slot_each(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone")
    shared = run(tmp_path / "shared", overrides=["training.num_slots=1"])
    assert digests(shared) == digests(alone)
    actions = [record.action for record in of_kind(events_of(shared), AllocationDecided)]
    assert actions.count("suspend") >= NUM_STEPS
    assert "suspend" not in [record.action for record in of_kind(events_of(alone), AllocationDecided)]


@pytest.mark.parametrize(
    "override",
    [
        "rollout.inter_query=1",
        "rollout.intra_query=1",
        "rollout.backend.num_slots=1",
        "training.micro_batch_tokens=1",
        "training.seal_every=1",
        "training.backend.token_s=0.5",
        "policies.large.num_instances=3",
    ],
)
def test_g1_no_schedule_changes_the_weights(tmp_path: Path, override: str) -> None:
    assert digests(run(tmp_path / "a")) == digests(run(tmp_path / "b", overrides=[override]))


def test_a_failed_trajectory_is_data_and_its_groups_close_over_the_survivors(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "sometimes_fails", ["eval.at_ends=false"])
    events = events_of(result)
    failures = of_kind(events, TrajectoryFailed)
    assert len(failures) == sum(
        query % 2 == 0 for record in of_kind(events, StepDispatched) for query in record.dispatch.queries
    )
    assert {failure.failure.kind for failure in failures} == {"workflow_error"}
    assert all("ValueError: no answer to" in failure.failure.message for failure in failures)
    closed = of_kind(events, GroupClosed)
    is_even = {record.query: record.query % 2 == 0 for record in closed}
    for record in closed:
        survivors = NUM_TRAJECTORIES - is_even[record.query]
        assert record.num_ready + record.num_masked == 2 * survivors
    leased = {key for lease in of_kind(events, MicroBatchLeased) for key in lease.keys}
    assert not [key for key in leased if key.query % 2 == 0 and key.trajectory == 0]
    rows = list(read_metrics(result.run_dir / "metrics.jsonl"))
    assert [row["rollout/num_failed_workflow_error"] for row in rows] == [
        sum(query % 2 == 0 for query in record.dispatch.queries) for record in of_kind(events, StepDispatched)
    ]


def test_g7_a_step_of_failures_ends_the_run_and_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError) as caught:
        run(tmp_path / "run", "always_fails", ["eval.at_ends=false", "workflow.dry_run=false"])
    assert (
        "all 16 trajectories of step 0 failed; the first: workflow_error: LookupError: nothing known of train"
        in str(caught.value)
    )
    assert "test_simulated_run.py:" in str(caught.value)
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert events[-1].record == RunEnded(policy_version=0, reason="error")
