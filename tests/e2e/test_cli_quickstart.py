"""The command line trains the quick start team, small, with the shipped model: what it writes, prints and returns."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.events import EvaluationDone, RunEnded, StepCommitted, StepDispatched
from flexmarl.telemetry.event_log import read_events
from flexmarl.telemetry.metrics_log import read_metrics
from flexmarl.testing.runs import RunLab, trained_steps, wait_until

pytestmark = pytest.mark.e2e

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SMALL = ("pipeline.queries_per_step=4", "pipeline.trajectories_per_query=4", "eval.num_queries=8")


def read_summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> RunLab:
    """Holds a finished run in `run`."""
    lab = RunLab(tmp_path_factory.mktemp("quickstart"))
    output = lab.run("train", QUICKSTART, "run.dir=run", "pipeline.num_steps=2", *SMALL)
    assert "step 2/2" in output
    assert output.splitlines()[-1].startswith("done: 2 of 2 steps")
    return lab


def test_summary_says_what_the_run_came_to(lab: RunLab) -> None:
    summary = read_summary(lab.folder / "run")
    assert summary["steps"] == 2
    assert 0 < summary["wall_s"] < 600
    assert summary["stopped_by"] is None
    assert summary["peak_pss_bytes"] > 100e6  # it holds torch
    committed = trained_steps(lab.folder / "run")[1].weights_digests
    assert sorted(summary["policies"]) == sorted(committed) == ["finisher", "reducer"]
    for policy, digest in committed.items():
        assert summary["policies"][policy]["version"] == 2
        assert summary["policies"][policy]["weights_digest"]["after"] == digest
        assert summary["policies"][policy]["weights_digest"]["before"] != digest


def test_summary_compares_the_held_out_success_before_and_after(lab: RunLab) -> None:
    result = read_summary(lab.folder / "run")["eval"]
    events = [event.record for event in read_events(lab.folder / "run" / "events.jsonl")]
    for moment, event in zip(
        ("before", "after"), [event for event in events if isinstance(event, EvaluationDone)], strict=True
    ):
        assert result[moment]["num_queries"] == 8
        assert result[moment]["success"] * 8 in range(9)
        assert result[moment]["greedy_success"] * 8 in range(9)
        assert result[moment]["success"] == event.metrics["success_frac"]
    assert result["difference"]["num_queries"] == 8
    difference = result["after"]["success"] - result["before"]["success"]
    assert result["difference"]["mean"] == pytest.approx(difference)
    assert result["difference"]["lower_95"] <= result["difference"]["mean"]


def test_metrics_have_a_row_per_step(lab: RunLab) -> None:
    rows = read_metrics(lab.folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["rollout/num_trajectories"] == 16
        assert row["policy/finisher/weights_version"] == int(row["step"] or 0) + 1
        assert 0 <= float(row["agent/reducer/reward"] or 0) <= 1


def test_events_tell_the_run_in_order(lab: RunLab) -> None:
    events = [event.record for event in read_events(lab.folder / "run" / "events.jsonl")]
    milestones = [e for e in events if isinstance(e, (StepDispatched, StepCommitted, EvaluationDone, RunEnded))]
    assert [type(e).__name__ for e in milestones] == [
        "EvaluationDone",
        *("StepDispatched", "StepCommitted") * 2,
        "EvaluationDone",
        "RunEnded",
    ]
    assert milestones[-1] == RunEnded(policy_version=2, reason="finished")


def test_exported_models_load_with_transformers(lab: RunLab) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for policy in ("reducer", "finisher"):
        folder = lab.folder / "run" / "export" / policy
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.num_parameters() > 100_000
        assert AutoTokenizer.from_pretrained(folder).encode("7+5-3")


def test_a_finished_run_is_not_overwritten(lab: RunLab) -> None:
    output = lab.run("train", QUICKSTART, "run.dir=run", "pipeline.num_steps=2", *SMALL, expect=2)
    assert "already holds a run: add --resume" in output
    assert str(lab.folder / "run") in output
    assert read_summary(lab.folder / "run")["steps"] == 2


def test_resume_of_a_finished_run_changes_nothing(lab: RunLab) -> None:
    before = read_summary(lab.folder / "run")
    steps = trained_steps(lab.folder / "run")
    lab.run("train", "run", "--resume", "--quiet")
    after = read_summary(lab.folder / "run")
    assert trained_steps(lab.folder / "run") == steps
    assert after["policies"] == before["policies"]
    assert after["eval"]["before"] == before["eval"]["before"]
    assert after["eval"]["after"]["success"] == before["eval"]["after"]["success"]


def test_eval_of_a_run_measures_its_newest_checkpoint(lab: RunLab) -> None:
    success = read_summary(lab.folder / "run")["eval"]["after"]["success"]
    before = sorted(lab.folder.joinpath("run").rglob("*"))
    output = lab.run("eval", "run", "--quiet")
    assert output.startswith(f"evaluation at version 2: success {100 * success:.0f}%")
    assert sorted(lab.folder.joinpath("run").rglob("*")) == before


def test_validate_says_what_the_configuration_resolves_to(lab: RunLab) -> None:
    lines = lab.run("validate", QUICKSTART).splitlines()
    assert lines[-1] == "valid"
    assert any("policy reducer" in line and "shipped:chain_sum" in line for line in lines)


def test_ctrl_c_in_mid_run_saves_and_resume_goes_on(tmp_path: Path) -> None:
    lab = RunLab(tmp_path)
    run_dir = tmp_path / "run"
    with lab.start("train", QUICKSTART, "run.dir=run", "pipeline.num_steps=50", *SMALL) as live:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() and read_metrics(run_dir / "metrics.jsonl"), "a step")
        os.kill(live.process.pid, signal.SIGINT)
        assert live.wait() == 130, live.output()
        live.check_nothing_is_left()
        assert "to go on: flexmarl train" in live.output()
    stopped = read_summary(run_dir)
    num_steps = stopped["steps"]
    assert stopped["stopped_by"] == "SIGINT"
    assert (run_dir / "checkpoints" / f"step_{num_steps}" / "manifest.json").exists()
    assert "after" not in stopped["eval"] or stopped["eval"]["after"]["policy_version"] == 0

    lab.run("train", "run", "--resume", f"pipeline.num_steps={num_steps + 1}", "--quiet")
    resumed = read_summary(run_dir)
    assert resumed["steps"] == num_steps + 1
    assert resumed["eval"]["before"] == stopped["eval"]["before"]
    assert resumed["eval"]["after"]["policy_version"] == num_steps + 1
    assert resumed["eval"]["difference"]["num_queries"] == 8
    for policy, entry in resumed["policies"].items():
        assert entry["weights_digest"]["before"] == stopped["policies"][policy]["weights_digest"]["before"]
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(num_steps + 1))


def test_a_run_of_threads_in_one_process(tmp_path: Path) -> None:
    lab = RunLab(tmp_path)
    lab.run("train", QUICKSTART, "run.dir=run", "pipeline.num_steps=1", *SMALL, "runtime.inline=true", "--quiet")
    summary = read_summary(tmp_path / "run")
    assert summary["steps"] == 1
    assert summary["eval"]["difference"]["num_queries"] == 8


@pytest.mark.parametrize("is_checked_before", [True, False])
def test_g10_a_prompt_over_the_context_ends_the_run_with_a_clear_message(
    tmp_path: Path, is_checked_before: bool
) -> None:
    lab = RunLab(tmp_path)
    question = "+".join(["1"] * 100)
    lines = [json.dumps({"question": question, "answer": "100"}) for _ in range(4)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    output = lab.run(
        *("train", QUICKSTART, "run.dir=run", *SMALL, "eval.at_ends=false", f"workflow.dry_run={is_checked_before}"),
        *("data.source=null", f"data.train_file={tmp_path / 'long.jsonl'}"),
        expect=2 if is_checked_before else 1,
    )
    assert "Traceback" not in output
    if is_checked_before:
        assert f"fails on {tmp_path / 'long.jsonl'}:1" in output
        assert "has 203 tokens, and the context of its model has 128" in output
        assert not (tmp_path / "run").exists()
    else:
        assert "all 16 trajectories of step 0 failed" in output
        assert "the prompt has 203 tokens, but the model's context of 128 must hold it" in output
