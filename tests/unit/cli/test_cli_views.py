import io
import sys

import pytest
from rich.console import Console

from flexmarl.cli.views import LiveView, PlainView, QuietView, make_view
from flexmarl.telemetry import ProgressListener, RunSummary, StepReport

pytestmark = pytest.mark.unit

SUMMARY = RunSummary(name="r", run_dir="runs/r", policy_version=1, num_steps=1, duration_s=2)


def step(success_frac: float | None) -> StepReport:
    return StepReport(
        step=0,
        num_steps=1,
        rewards={"a": 0.5},
        success_frac=success_frac,
        tokens_per_s=1,
        num_samples=1,
        weights_versions={},
        duration_s=1,
        eta_s=0,
    )


def play(view: QuietView) -> None:
    listener: ProgressListener = view
    with view:
        listener.on_start(1, "runs/[r]")
        listener.on_rollout_progress(1, 2)
        listener.on_step(step(None))
        listener.on_end(SUMMARY)


def test_view_depends_on_where_output_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(make_view(is_quiet=True)) is QuietView
    assert type(make_view(is_quiet=False)) is PlainView


def test_live_view_shows_lines_and_bars() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    play(LiveView(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run folder runs/[r], 1 steps" in text
    assert "trajectories" in text
    assert "1/2" in text
    assert "done: 1 of 1 steps" in text


def test_curve_of_rewards_when_the_workflow_reports_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    play(PlainView())
    assert "mean reward per step" in capsys.readouterr().out


def test_a_reader_that_goes_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        num_writes = 0

        def write(self, text: str) -> int:
            self.num_writes += 1
            raise BrokenPipeError

    closed = Closed()
    monkeypatch.setattr(sys, "stdout", closed)
    play(PlainView())
    assert closed.num_writes == 1


def test_output_that_knows_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    play(PlainView())
    assert b"0.50 |?" in raw.getvalue()
