"""Pipeline modes of whole runs under virtual time: which version generates, what overlaps, what trains how often."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import TrainResult, train
from flexmarl.config import parse_config
from flexmarl.core.errors import ConfigError
from flexmarl.core.events import MicroBatchLeased, StepCommitted, StepDispatched, StepExtended
from flexmarl.core.messages import Generated, Scored, TrajectoryEnded, UpdateApplied
from flexmarl.telemetry import LoggedEvent, read_events, read_metrics
from flexmarl.workflow import Episode, Outcome

pytestmark = pytest.mark.integration

NUM_STEPS = 6
TURNS_PER_STEP = 3 * 2 * 3
"""Queries, trajectories, turns."""


def load_queries(*, split: str, num_queries: int | None, seed: int) -> list[dict[str, Any]]:
    return [{"text": f"{split} {number}"} for number in range(num_queries or 6)]


async def team(episode: Episode) -> Outcome:
    """Three turns, so that a trajectory can span versions."""
    writer = episode.agent("writer")
    first = await writer.chat(episode.query["text"])
    verdict = await episode.agent("judge").chat(first.text)
    second = await writer.chat(verdict.text)
    return Outcome(rewards={"writer": float(len(second.text)), "judge": float(len(first.text) % 3)})


async def dull(episode: Episode) -> Outcome:
    """Every first reward of a query is the same."""
    turn = await episode.agent("writer").chat(episode.query["text"])
    await episode.agent("judge").chat(turn.text)
    is_first = turn.key.trajectory < 2
    return Outcome(rewards={"writer": 1.0 if is_first else float(turn.key.trajectory), "judge": 1.0})


def run(folder: Path, *overrides: str, workflow: str = "team") -> TrainResult:
    plain = {
        "run": {"name": "modes", "dir": str(folder)},
        "data": {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:{workflow}"},
        "policies": {"small": {"model": "none", "num_instances": 2}, "large": {"model": "none"}},
        "agents": {"writer": {"policy": "small"}, "judge": {"policy": "large"}},
        "algorithm": {"truncated": "train"},
        "pipeline": {"num_steps": NUM_STEPS, "queries_per_step": 3, "trajectories_per_query": 2},
        "rollout": {"backend": {"kind": "scripted", "token_s": 0.01, "num_slots": 4}, "max_new_tokens": 24},
        "training": {
            "backend": {"kind": "scripted", "token_s": 0.004, "update_s": 0.05, "num_parameters": 8},
            "micro_batch_tokens": 64,
            "seal_every": 3,
        },
        "eval": {"at_ends": False, "num_queries": 2},
        "store": {"kind": "memory"},
        "runtime": {"kind": "simulated"},
    }
    return train(parse_config(plain, overrides))


def events_of(result: TrainResult) -> list[LoggedEvent]:
    return list(read_events(result.run_dir / "events.jsonl"))


def of_kind(events: list[LoggedEvent], kind: type[Any]) -> list[Any]:
    return [event.record for event in events if isinstance(event.record, kind)]


def step_of(record: Generated) -> int:
    """Request ids name the key: `train/s3/q0/...`."""
    return int(record.completion.request_id.split("/")[1].removeprefix("s"))


def staleness(events: list[LoggedEvent]) -> Counter[int]:
    """Count the training turns by step minus oldest version."""
    return Counter(
        step_of(record) - min(span.policy_version for span in record.completion.version_spans)
        for record in of_kind(events, Generated)
        if record.completion.request_id.startswith("train")
    )


def check_trained_once(events: list[LoggedEvent], *, num_passes: int = 1) -> None:
    """Every turn of every step is leased so often, without deaths, and every step commits all of its samples."""
    leased = Counter(key for lease in of_kind(events, MicroBatchLeased) for key in lease.keys)
    turns = {key for record in of_kind(events, TrajectoryEnded) for key in record.outcome.turns}
    assert leased == Counter(dict.fromkeys(turns, num_passes))
    assert len(turns) == NUM_STEPS * TURNS_PER_STEP
    commits = [record.commit for record in of_kind(events, StepCommitted)]
    assert [commit.policy_version for commit in commits] == list(range(1, NUM_STEPS + 1))
    for commit in commits:
        assert sum(part.denominators.num_samples for part in commit.policies.values()) == TURNS_PER_STEP
        assert {part.num_passes for part in commit.policies.values()} == {num_passes}


def digests(result: TrainResult) -> dict[str, str]:
    return {name: policy["weights_digest"]["after"] for name, policy in result.summary["policies"].items()}


ASYNC = ["pipeline.mode=bounded_async"]
IN_FLIGHT = [*ASYNC, "pipeline.max_staleness=2", "rollout.max_new_tokens=96", "training.backend.token_s=0.0001"]
"""Long turns and quick training: weights are published while turns are generated."""


def test_g3_one_step_off_generates_each_step_by_the_version_before(tmp_path: Path) -> None:
    events = events_of(run(tmp_path / "run", "pipeline.mode=one_step_off"))
    check_trained_once(events)
    for record in of_kind(events, Generated):
        version = max(0, step_of(record) - 1)
        assert {span.policy_version for span in record.completion.version_spans} == {version}
    assert staleness(events) == Counter({0: TURNS_PER_STEP, 1: (NUM_STEPS - 1) * TURNS_PER_STEP})


def test_one_step_off_trains_a_step_while_the_next_is_generated(tmp_path: Path) -> None:
    results = {mode: run(tmp_path / mode, f"pipeline.mode={mode}") for mode in ("serial", "strict", "one_step_off")}
    events = events_of(results["one_step_off"])
    for step in range(NUM_STEPS - 1):
        leases = [e.seq for e in events if isinstance(e.record, MicroBatchLeased) and e.record.keys[0].step == step]
        turns = [e.seq for e in events if isinstance(e.record, Generated) and step_of(e.record) == step + 1]
        assert min(turns) < max(leases), f"step {step} trained before step {step + 1} was generated at all"
        commit = next(e.seq for e in events if isinstance(e.record, StepCommitted) and e.record.commit.step == step)
        assert max(turns) < commit  # publication waits for the rollouts of the next step
    wall_s = {mode: result.summary["wall_s"] for mode, result in results.items()}
    assert wall_s["one_step_off"] < wall_s["strict"] < wall_s["serial"]


@pytest.mark.parametrize("on_publish", ["drain", "continue"])
@pytest.mark.parametrize("bound", [1, 2, 3])
def test_g3_bounded_async_keeps_its_bound_and_drops_nothing(tmp_path: Path, bound: int, on_publish: str) -> None:
    overrides = [*ASYNC, f"pipeline.max_staleness={bound}", f"rollout.on_publish={on_publish}"]
    result = run(tmp_path / "run", *overrides)
    events = events_of(result)
    check_trained_once(events)
    found = staleness(events)
    assert max(found) <= bound
    assert set(found) > {0}, "nothing ran ahead"
    committed = 0
    for event in events:
        match event.record:
            case StepCommitted():
                committed += 1
            case StepDispatched():
                assert event.record.dispatch.step - committed <= bound
    rows = list(read_metrics(result.run_dir / "metrics.jsonl"))
    assert max(row["policy/small/staleness_max"] for row in rows) == max(found)  # type: ignore[type-var]
    assert all(f"agent/{agent}/staleness_mean" in row for row in rows for agent in ("writer", "judge"))


def test_g3_with_continue_a_turn_can_span_versions_and_the_oldest_counts(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *IN_FLIGHT, "rollout.on_publish=continue")
    spans = [record.completion.version_spans for record in of_kind(events_of(result), Generated)]
    rows = list(read_metrics(result.run_dir / "metrics.jsonl"))
    assert any(row["policy/small/multi_version_frac"] > 0 for row in rows)  # type: ignore[operator]
    assert any(len(each) > 1 for each in spans)
    for each in spans:
        assert [span.start for span in each[1:]] == [span.end for span in each[:-1]]
        versions = [span.policy_version for span in each]
        assert versions == sorted(set(versions))


def test_g3_with_drain_a_turn_has_one_version(tmp_path: Path) -> None:
    records = of_kind(events_of(run(tmp_path / "run", *IN_FLIGHT)), Generated)
    assert {len(record.completion.version_spans) for record in records} == {1}


@pytest.mark.parametrize("mode", ["one_step_off", "bounded_async"])
def test_evaluations_are_at_their_version_while_rollouts_run_ahead(tmp_path: Path, mode: str) -> None:
    overrides = [f"pipeline.mode={mode}", "eval.every=2", "eval.at_ends=true"]
    overrides += ["pipeline.max_staleness=2"] if mode == "bounded_async" else []
    events = events_of(run(tmp_path / "run", *overrides))
    for record in of_kind(events, Generated):
        if record.completion.request_id.startswith("eval"):
            assert {span.policy_version for span in record.completion.version_spans} == {step_of(record)}
    assert of_kind(events, StepCommitted)[-1].commit.policy_version == NUM_STEPS


# --- several updates, scored columns, extensions ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["serial", "one_step_off"])
def test_g2_each_sample_is_used_num_epochs_times(tmp_path: Path, mode: str) -> None:
    overrides = [f"pipeline.mode={mode}", "algorithm.num_epochs=3", "algorithm.num_minibatches=2"]
    result = run(tmp_path / "run", *overrides)
    events = events_of(result)
    check_trained_once(events, num_passes=3)
    updates = Counter((record.policy, record.policy_version) for record in of_kind(events, UpdateApplied))
    assert set(updates.values()) == {6}
    published = [record for record in of_kind(events, UpdateApplied) if record.weights_digest]
    assert len(published) == 2 * NUM_STEPS  # version and publication change once
    assert {record.column for record in of_kind(events, Scored)} == {"old_logprobs"}
    for commit in (record.commit for record in of_kind(events, StepCommitted)):
        for part in commit.policies.values():
            assert len(part.update_sizes) == 6
            assert sum(part.update_sizes) == len(part.micro_batches)
    assert digests(run(tmp_path / "again", *overrides)) == digests(result)
    assert digests(run(tmp_path / "slots", *overrides, "training.num_slots=1")) == digests(result)


def test_g1_a_reference_model_changes_the_gradient_and_no_schedule_does(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    strict = run(tmp_path / "strict", "algorithm.kl_coef=0.1")
    assert digests(strict) != digests(plain)
    assert digests(run(tmp_path / "serial", "algorithm.kl_coef=0.1", "pipeline.mode=serial")) == digests(strict)
    assert digests(run(tmp_path / "slots", "algorithm.kl_coef=0.1", "training.num_slots=1")) == digests(strict)
    in_reward = [run(tmp_path / f"reward_{mode}", *KL_IN_REWARD, f"pipeline.mode={mode}") for mode in MODES]
    assert digests(in_reward[0]) == digests(in_reward[1]) != digests(strict)


KL_IN_REWARD = ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"]
MODES = ["serial", "strict"]


def test_g2_a_step_is_extended_where_nothing_can_be_learned(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "pipeline.max_extensions=2", workflow="dull")
    events = events_of(result)
    extensions = [record.extension for record in of_kind(events, StepExtended)]
    assert {(each.step, each.query, each.first_trajectory) for each in extensions} == {
        (record.dispatch.step, query, 2)
        for record in of_kind(events, StepDispatched)
        for query in record.dispatch.queries
    }
    leased = Counter(key for lease in of_kind(events, MicroBatchLeased) for key in lease.keys)
    turns = {key for record in of_kind(events, TrajectoryEnded) for key in record.outcome.turns}
    assert leased == Counter(dict.fromkeys(turns, 1))
    assert len(turns) == NUM_STEPS * 3 * 4 * 2


def test_a_batch_statistic_needs_a_mode_that_can_close_it(tmp_path: Path) -> None:
    run(tmp_path / "serial", "pipeline.mode=serial", "algorithm.advantage_scale=batch_std")
    with pytest.raises(ConfigError, match=r"algorithm.advantage_scale=batch_std with pipeline.mode=strict"):
        run(tmp_path / "strict", "algorithm.advantage_scale=batch_std")
