"""Whole runs with real processes: scripted rollouts that end at different times, real training on a tiny model.

Tokens are scripted, so that they do not depend on float bits; canonical accumulation makes the training exact.
Then every schedule must give the same bits.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.events import AllocationDecided, MicroBatchLeased, RequestDispatched, StepDispatched
from flexmarl.core.messages import (
    Generated,
    GradientAccumulated,
    TrajectoryEnded,
    UpdateApplied,
)
from flexmarl.telemetry.event_log import LoggedEvent, read_events
from flexmarl.testing.runs import RunLab, TrainedStep, scripted_config, trained_steps, write_scripted_model

pytestmark = pytest.mark.integration

NUM_STEPS = 5
POLICIES = ("wr", "ju")


@dataclass(frozen=True)
class FinishedRun:
    run_dir: Path
    steps: dict[int, TrainedStep]
    events: list[LoggedEvent]

    def of(self, *kinds: type) -> list[Any]:
        return [event.record for event in self.events if isinstance(event.record, kinds)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("model") / "tiny")


def train(tmp_path_factory: pytest.TempPathFactory, model: Path, name: str, *overrides: str) -> FinishedRun:
    lab = RunLab(tmp_path_factory.mktemp(name))
    config = scripted_config()
    config["policies"] = {policy: {"model": str(model)} for policy in POLICIES}
    config["training"]["backend"] = {"kind": "torch", "accumulation": "canonical"}
    config["optimizer"] = {"learning_rate": 0.01}
    config["rollout"]["backend"]["token_s"] = 0.01
    config["pipeline"]["num_steps"] = NUM_STEPS
    lab.run("train", lab.write_config(config), "run.dir=run", *overrides)
    run_dir = lab.folder / "run"
    return FinishedRun(run_dir, trained_steps(run_dir), list(read_events(run_dir / "events.jsonl")))


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory, model: Path) -> FinishedRun:
    return train(tmp_path_factory, model, "serial", "pipeline.mode=serial")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, model: Path) -> FinishedRun:
    return train(tmp_path_factory, model, "strict", "pipeline.mode=strict")


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory, model: Path) -> FinishedRun:
    return train(tmp_path_factory, model, "interleaved", "training.num_slots=1")


def early_micro_batches(run: FinishedRun, kind: type) -> list[int]:
    """Return, per step, how many micro-batches were leased or accumulated before its last trajectory ended."""
    counts = []
    early = late = 0
    for record in run.of(StepDispatched, TrajectoryEnded, kind):
        if isinstance(record, StepDispatched):
            counts.append(early)
            early = late = 0
        elif isinstance(record, TrajectoryEnded):
            early += late
            late = 0
        else:
            late += 1
    return [*counts[1:], early]


def test_g1_strict_gives_the_bits_of_serial(serial: FinishedRun, strict: FinishedRun) -> None:
    assert sorted(serial.steps) == list(range(NUM_STEPS))
    assert strict.steps == serial.steps
    digests = [digest for step in serial.steps.values() for digest in step.weights_digests.values()]
    assert len(set(digests)) == 2 * NUM_STEPS  # every step moved both policies, differently


def test_g1_strict_trains_while_the_step_is_still_generated(serial: FinishedRun, strict: FinishedRun) -> None:
    assert early_micro_batches(serial, MicroBatchLeased) == [0] * NUM_STEPS
    assert all(count > 0 for count in early_micro_batches(strict, MicroBatchLeased))
    assert sum(early_micro_batches(strict, GradientAccumulated)) > 0


def test_g6_policies_on_one_slot_give_the_same_bits(strict: FinishedRun, interleaved: FinishedRun) -> None:
    assert interleaved.steps == strict.steps
    assert {decision.slot for decision in strict.of(AllocationDecided)} == {0, 1}
    decisions = interleaved.of(AllocationDecided)
    assert {decision.slot for decision in decisions} == {0}
    assert sum(decision.action == "suspend" for decision in decisions) >= NUM_STEPS
    first_step = next(i for i, event in enumerate(interleaved.events) if isinstance(event.record, StepDispatched))
    updates = [i for i, event in enumerate(interleaved.events) if isinstance(event.record, UpdateApplied)]
    in_step = [event.record for event in interleaved.events[first_step : updates[1]]]
    assert [record.action for record in in_step if isinstance(record, AllocationDecided)].count("activate") >= 2


def test_g2_every_sample_of_a_step_is_trained_once(strict: FinishedRun) -> None:
    generated = {
        record.completion.request_id for record in strict.of(Generated) if record.completion.request_id[:5] == "train"
    }
    trained = [key for step in strict.steps.values() for keys in step.keys.values() for key in keys]
    assert len(trained) == len(set(trained)) > 9 * 2 * NUM_STEPS
    assert {f"train/{key}/a0" for key in trained} == generated


def test_g3_every_token_was_generated_by_the_version_of_its_step(strict: FinishedRun) -> None:
    for record in strict.of(Generated):
        step = int(record.completion.request_id.split("/")[1].removeprefix("s"))
        assert {span.policy_version for span in record.completion.version_spans} == {step}
        assert record.completion.weights_version == step


def test_g8_a_request_goes_to_an_instance_of_its_agents_policy(strict: FinishedRun) -> None:
    instances = {"writer": "instance-wr-0.0", "judge": "instance-ju-0.0"}
    dispatched = strict.of(RequestDispatched)
    assert len(dispatched) == len({record.request_id for record in dispatched})
    assert all(record.instance_id == instances[record.request_id.split("/")[4]] for record in dispatched)


def test_a_run_leaves_a_readable_folder(strict: FinishedRun) -> None:
    summary = json.loads((strict.run_dir / "summary.json").read_text())
    assert summary["steps"] == NUM_STEPS
    for policy in POLICIES:
        assert summary["policies"][policy]["version"] == NUM_STEPS
        assert (
            summary["policies"][policy]["weights_digest"]["after"]
            == strict.steps[NUM_STEPS - 1].weights_digests[policy]  # type: ignore[index]
        )
    logs = {path.name: path.read_text() for path in (strict.run_dir / "logs").iterdir()}
    assert {name: text for name, text in logs.items() if text} == {}
