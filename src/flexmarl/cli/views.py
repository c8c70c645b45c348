"""What the command line shows of a run: plain lines, or the final line with --quiet; `live.py` is for terminals."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self, cast

from flexmarl.cli.chart import learning_curve
from flexmarl.cli.text import evaluation_line, final_line, step_line, summary_lines
from flexmarl.telemetry.progress import EvaluationReport, RunSummary, SilentListener, StepReport


class QuietView(SilentListener):
    """Shows the final line; the base of the other views, and a context manager as they are."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.stopped_by: str | None = None
        self.has_reader = True

    def on_end(self, summary: RunSummary) -> None:
        """Show the final line."""
        self.stopped_by = summary.stopped_by
        self.show([final_line(summary)])

    def show(self, lines: Sequence[str]) -> None:
        """Write lines to standard output, as long as somebody reads it."""
        if not self.has_reader:
            return
        if sys.stdout is None:  # closed by whoever started this process
            return
        try:
            for line in lines:
                self.write_line(line)
        except BrokenPipeError:
            # `flexmarl train ... | head` must not end the run.
            self.has_reader = False

    def write_line(self, line: str) -> None:
        """Write one line to standard output."""
        encoding = sys.stdout.encoding or "utf-8"
        print(line.encode(encoding, errors="replace").decode(encoding), flush=True)

    def __enter__(self) -> Self:
        """Begin to show."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""


class PlainView(QuietView):
    """Writes a line per event of the run, and the learning curve at the end."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        super().__init__()
        self._steps: list[StepReport] = []

    def on_start(self, total_steps: int, run_dir: str) -> None:
        """Say where the run folder is."""
        self.show([f"run folder {run_dir}, {total_steps} steps"])

    def on_step(self, report: StepReport) -> None:
        """Show the step."""
        self.note_step(report)
        self.show([step_line(report)])

    def note_step(self, report: StepReport) -> None:
        """Keep the step for the learning curve."""
        self._steps.append(report)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Show the evaluation."""
        self.show([evaluation_line(report)])

    def on_message(self, message: str) -> None:
        """Show the message."""
        self.show([message])

    def on_end(self, summary: RunSummary) -> None:
        """Show the learning curve and the summary."""
        self.stopped_by = summary.stopped_by
        self.show([*_curve(self._steps), *summary_lines(summary)])


def make_view(*, is_quiet: bool) -> QuietView:
    """Return the view that fits standard output."""
    if is_quiet:
        return QuietView()
    from rich.console import Console

    from flexmarl.cli.live import LiveView
    from flexmarl.cli.terminal import LastingTerminal

    console = Console(file=cast("IO[str]", LastingTerminal()))
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView()


def _curve(steps: Sequence[StepReport]) -> list[str]:
    """Return the learning curve of team success or, when the workflow does not report it, of the mean reward."""
    first_step = steps[0].step + 1 if steps else 1
    if any(report.success_frac is not None for report in steps):
        successes = [report.success_frac for report in steps]
        return learning_curve(successes, title="team success per step", first_step=first_step)
    rewards = [sum(report.rewards.values()) / len(report.rewards) if report.rewards else None for report in steps]
    return learning_curve(rewards, title="mean reward per step", first_step=first_step)
