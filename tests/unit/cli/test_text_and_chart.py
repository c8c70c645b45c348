from dataclasses import replace

import pytest

from flexmarl.cli.chart import learning_curve
from flexmarl.cli.text import duration, evaluation_line, final_line, step_line, summary_lines
from flexmarl.telemetry import EvaluationReport, RunSummary, StepReport

pytestmark = pytest.mark.unit


def evaluation(success_frac: float | None = 0.25, error: str | None = None) -> EvaluationReport:
    return EvaluationReport(
        policy_version=4,
        success_frac=success_frac,
        greedy_success_frac=0.5,
        rewards={"a": 0.75, "b": 1},
        num_queries=64,
        duration_s=2.04,
        error=error,
    )


def test_step_line() -> None:
    report = StepReport(
        step=2,
        num_steps=20,
        rewards={"reducer": 0.625, "finisher": 0.5},
        success_frac=0.406,
        tokens_per_s=2340.4,
        num_samples=128,
        weights_versions={"p": 3},
        duration_s=1.23,
        eta_s=21.4,
    )
    assert step_line(report) == (
        "step  3/20  success  41%  reward reducer 0.62 finisher 0.50  128 samples  2340 tokens/s  1.2 s  21 s left"
    )


def test_evaluation_line() -> None:
    assert evaluation_line(evaluation()) == (
        "evaluation at version 4: success 25%  greedy 50%  reward a 0.75 b 1.00  (64 queries, 2.0 s)"
    )
    assert evaluation_line(replace(evaluation(), num_failed=3)).endswith("(64 queries, 3 trajectories failed, 2.0 s)")
    assert evaluation_line(evaluation(error="timed out")) == "evaluation at version 4 failed: timed out"


def test_final_line_says_what_was_gained() -> None:
    summary = RunSummary(
        name="r",
        run_dir="runs/r",
        policy_version=20,
        num_steps=20,
        duration_s=185.2,
        before=evaluation(0.25),
        after=evaluation(0.75),
    )
    assert final_line(summary) == (
        "done: 20 of 20 steps in 3 min 5 s; held-out success 25% -> 75%; held-out greedy success 50% -> 50%; "
        "run folder runs/r"
    )


def test_final_line_of_a_workflow_that_reports_no_success() -> None:
    before, after = replace(evaluation(None), greedy_success_frac=None), replace(evaluation(None), rewards={"a": 1.0})
    summary = RunSummary(
        name="r", run_dir="runs/r", policy_version=1, num_steps=1, duration_s=5, before=before, after=after
    )
    assert final_line(summary) == ("done: 1 of 1 steps in 5.0 s; held-out reward of a 0.75 -> 1.00; run folder runs/r")


def test_a_stopped_run_says_how_to_go_on() -> None:
    summary = RunSummary(
        name="r",
        run_dir="runs/r",
        policy_version=3,
        num_steps=20,
        duration_s=5,
        stopped_by="SIGINT",
        files={"checkpoint": "runs/r/checkpoints/step_3"},
    )
    assert summary_lines(summary) == [
        "checkpoint: runs/r/checkpoints/step_3",
        "to go on: flexmarl train runs/r --resume",
        "stopped by SIGINT: 3 of 20 steps in 5.0 s; run folder runs/r",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_learning_curve_by_hand() -> None:
    assert learning_curve([0.0, 0.5, None, 1.0], title="t", height=2) == [
        "t",
        "  1.00 |   █",
        "  0.00 |▁█ █",
        "       +----",
        "        1 step 4",
    ]


@pytest.mark.parametrize(
    ("first_step", "num_steps", "axis"),
    [(31, 1, "31 step 31"), (31, 4, "31 step 34"), (99, 12, "99  step 110"), (100, 200, f"100{'step 299':>57}")],
)
def test_learning_curve_labels_the_steps_of_a_resumed_run(first_step: int, num_steps: int, axis: str) -> None:
    lines = learning_curve([1.0] * num_steps, title="t", first_step=first_step)
    assert lines[-1] == f"        {axis}"


def test_learning_curve_averages_what_does_not_fit() -> None:
    lines = learning_curve([0, 1, 2, 3, 4, 5, 6, float("nan")], title="t", width=2, height=1)
    # Columns are the means 1.5 and 5.0: 2.4 and 8 eighths.
    assert lines[1] == "  5.00 |▂█"


@pytest.mark.parametrize("values", [[], [None], [float("nan")]])
def test_nothing_to_show(values: list[float | None]) -> None:
    assert learning_curve(values, title="t") == []


def test_all_zero_and_negative_values() -> None:
    assert learning_curve([0.0, 0.0], title="t", height=1)[1] == "  0.00 |▁▁"
    assert learning_curve([-1.0, 1.0], title="t", height=1)[1] == "  1.00 |▁█"
