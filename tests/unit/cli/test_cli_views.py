import io
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from flexmarl.cli.live import LiveView
from flexmarl.cli.views import PlainView, QuietView, make_view
from flexmarl.telemetry import PolicyQueue, ProgressListener, RunSummary, StepReport

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


class Screen:
    """A terminal of 80 columns that keeps what was written."""

    def __init__(self, width: int = 80) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, force_terminal=True, width=width, height=24, legacy_windows=False)

    def lines(self) -> list[str]:
        """Every line ever drawn, without colours and cursor movements."""
        return [
            line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._file.getvalue()))
        ]

    def panel(self, view: LiveView) -> list[str]:
        """The panel as it is now."""
        with self.console.capture() as captured:
            self.console.print(view.panel())
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.get())
        return [line.rstrip() for line in text.splitlines()]


def test_live_view_shows_lines_and_leaves_no_panel_behind() -> None:
    screen = Screen()
    play(LiveView(screen.console))
    lines = screen.lines()
    assert lines[0] == "run folder runs/[r], 1 steps"
    assert "step 1/1  reward a 0.50  1.0 s" in lines
    assert lines[-2] == "done: 1 of 1 steps in 2.0 s; run folder runs/r"


def test_the_panel_says_step_rates_queues_versions_and_time_left() -> None:
    screen, now_s = Screen(), [100.0]
    view = LiveView(screen.console, clock=lambda: now_s[0])
    assert screen.panel(view) == ["starting"]
    view.on_start(60, "runs/r")
    view.on_rollout_progress(87, 128)
    view.on_queue(
        {
            "reducer": PolicyQueue(num_waiting=23, num_running=64, weights_version=12),
            "finisher": PolicyQueue(num_waiting=0, num_running=10, weights_version=11),
        }
    )
    report = replace(
        step(0.41), step=11, num_steps=60, rewards={"reducer": 0.625, "finisher": 0.5}, tokens_per_s=2340.4, eta_s=185.0
    )
    view.on_step(report)
    view.on_rollout_progress(87, 128)
    now_s[0] += 5.0
    steps, trajectories, *rest = screen.panel(view)
    assert re.fullmatch(r"step +[\S]+ +12/60 +3 min 0 s left", steps)
    assert re.fullmatch(r"trajectories +[\S]+ +87/128", trajectories)
    assert rest == [
        "success 41%  2340 tokens/s  reward reducer 0.62 finisher 0.50",
        "policy    version  running  waiting",
        "reducer        12       64       23",
        "finisher       11       10        0",
    ]
    now_s[0] += 1000.0
    assert screen.panel(view)[0].endswith("0.0 s left")


def test_no_line_of_the_live_view_is_wider_than_the_terminal() -> None:
    screen = Screen()
    view = LiveView(screen.console)
    names = [f"an-agent-with-a-long-name-{number}" for number in range(6)]
    report = replace(step(0.5), rewards=dict.fromkeys(names, 0.25), num_steps=1000)
    with view:
        view.on_start(1000, "r")
        view.on_queue({name: PolicyQueue(num_waiting=1, num_running=1, weights_version=1) for name in names})
        view.on_step(report)
        panel = screen.panel(view)
    assert max(len(line) for line in [*panel, *screen.lines()]) <= 80
    assert any(line.endswith("\N{HORIZONTAL ELLIPSIS}") for line in screen.lines())


def test_a_new_step_begins_with_no_trajectory() -> None:
    screen = Screen()
    view = LiveView(screen.console)
    view.on_start(2, "r")
    view.on_rollout_progress(8, 8)
    view.on_step(step(None))
    assert screen.panel(view)[1].endswith(" 0/8")


def test_curve_of_rewards_when_the_workflow_reports_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    play(PlainView())
    assert "mean reward per step" in capsys.readouterr().out


def test_curve_after_a_resume_has_the_numbers_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView()
    for number in range(30, 34):
        view.on_step(replace(step(0.5), step=number, num_steps=60))
    view.on_end(SUMMARY)
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("team success per step") + 10] == "        31 step 34"


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
