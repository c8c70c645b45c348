"""What a listener is told of a real run: steps, queues of every policy, versions, and an end."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from flexmarl.api import evaluate, train
from flexmarl.config import parse_config
from flexmarl.orchestrator.episodes import QUEUE_REPORT_S
from flexmarl.telemetry import EvaluationReport, PolicyQueue, RunSummary, SilentListener, StepReport
from flexmarl.telemetry.metrics_log import read_metrics
from flexmarl.testing.runs import scripted_config

pytestmark = pytest.mark.integration

NUM_SLOTS = 4


class Recorder(SilentListener):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.queues: list[Mapping[str, PolicyQueue]] = []
        self.steps: list[StepReport] = []

    def on_start(self, total_steps: int, run_dir: str) -> None:
        self.calls.append("start")

    def on_queue(self, queues: Mapping[str, PolicyQueue]) -> None:
        self.queues.append(queues)

    def on_step(self, report: StepReport) -> None:
        self.calls.append("step")
        self.steps.append(report)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.calls.append("evaluation")

    def on_end(self, summary: RunSummary) -> None:
        self.calls.append("end")


@pytest.fixture
def listener() -> Recorder:
    return Recorder()


def test_a_listener_is_told_of_steps_and_queues(tmp_path: Path, listener: Recorder) -> None:
    config = scripted_config() | {"runtime": {"kind": "simulated"}}
    config["pipeline"] |= {"num_steps": 2, "queries_per_step": 4, "trajectories_per_query": 4}
    config["rollout"]["backend"] |= {"token_s": 0.1, "num_slots": NUM_SLOTS}
    result = train(parse_config(config, [f"run.dir={tmp_path / 'run'}"]), listener=listener)

    assert listener.calls == ["start", "step", "step", "end"]
    assert [report.weights_versions for report in listener.steps] == [{"ju": 1, "wr": 1}, {"ju": 2, "wr": 2}]
    assert all(set(queues) == {"ju", "wr"} for queues in listener.queues)
    versions = [queues["wr"].weights_version for queues in listener.queues]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1, 2}
    # 16 trajectories begin with a request to wr, which has one instance of 4 slots.
    assert max(queues["wr"].num_running for queues in listener.queues) == NUM_SLOTS
    assert 4 <= max(queues["wr"].num_waiting for queues in listener.queues) <= 12
    assert all(queues["wr"].num_running == NUM_SLOTS for queues in listener.queues if queues["wr"].num_waiting)
    assert (listener.queues[-1]["wr"].num_running, listener.queues[-1]["wr"].num_waiting) == (0, 0)
    # Some five reports a (virtual) second, and two more a step.
    assert len(listener.queues) <= result.summary["wall_s"] / QUEUE_REPORT_S + 2 * 2 + 1


def test_an_agent_that_is_never_asked_shows_in_the_metrics(tmp_path: Path) -> None:
    config = scripted_config() | {"runtime": {"kind": "simulated"}}
    config["agents"]["third"] = {"policy": "ju"}
    config["pipeline"]["num_steps"] = 1
    train(parse_config(config, [f"run.dir={tmp_path / 'run'}"]))
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (row["agent/third/num_turns"], row["agent/judge/num_turns"]) == (0, 9)


def test_an_evaluation_alone_has_no_run_to_announce(listener: Recorder) -> None:
    config = scripted_config() | {"eval": {"num_queries": 2}, "runtime": {"kind": "simulated"}}
    report = evaluate(parse_config(config), listener=listener)
    assert listener.calls == ["evaluation"]
    assert (report.num_queries, report.num_failed) == (2, 0)
