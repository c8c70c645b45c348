"""The live view of a run on a terminal: plain lines scroll by above a panel of what happens now.

step          ━━━━━━━━━━━━━━━━━━━━━━━━━━━━  12/60  3 min 5 s left
trajectories  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━  87/128
success 41%  2340 tokens/s  reward reducer 0.62 finisher 0.50
policy    version  running  waiting
reducer        12       64       23
"""

import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from flexmarl.cli.text import duration, percent, rewards_text, short_step_line
from flexmarl.cli.views import PlainView
from flexmarl.telemetry.progress import PolicyQueue, RunSummary, StepReport

REFRESH_PER_S = 4.0
_MAX_BAR_WIDTH = 40


class LiveView(PlainView):
    """Lines above a panel. Rich's thread draws the panel from records that the run's thread replaces, never changes."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Show on `console`; `clock` counts the time left down."""
        super().__init__()
        self._clock = clock
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=_MAX_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._steps_task = self._bars.add_task("step", total=None, visible=False, note="")
        self._rollout_task = self._bars.add_task("trajectories", total=None, visible=False, note="")
        self._queues: Mapping[str, PolicyQueue] = {}
        self._last_step: StepReport | None = None
        self._last_step_s = 0.0
        self._live = Live(console=console, get_renderable=self.panel, refresh_per_second=REFRESH_PER_S, transient=True)

    def on_start(self, total_steps: int, run_dir: str) -> None:
        """Begin the bar of the steps."""
        super().on_start(total_steps, run_dir)
        if total_steps > 0:
            self._bars.update(self._steps_task, total=total_steps, visible=True)

    def on_rollout_progress(self, num_ended: int, num_trajectories: int) -> None:
        """Move the bar of the trajectories."""
        self._bars.update(self._rollout_task, completed=num_ended, total=num_trajectories, visible=True)

    def on_queue(self, queues: Mapping[str, PolicyQueue]) -> None:
        """Keep the queues for the next drawing."""
        self._queues = dict(queues)

    def on_step(self, report: StepReport) -> None:
        """Show the step and move the bar."""
        self._last_step_s = self._clock()
        self._last_step = report
        self.note_step(report)
        self._bars.update(self._steps_task, completed=report.step + 1)
        self._bars.update(self._rollout_task, completed=0)
        if self.has_reader:
            self._console.print(
                short_step_line(report), markup=False, highlight=False, no_wrap=True, overflow="ellipsis"
            )

    def on_end(self, summary: RunSummary) -> None:
        """Take the panel away and show the end."""
        self._live.stop()
        super().on_end(summary)

    def write_line(self, line: str) -> None:
        """Write one line above the panel."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "LiveView":
        """Begin to show."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the panel away."""
        self._live.stop()

    def panel(self) -> RenderableType:
        """Return what stands below the lines at this moment."""
        report = self._last_step
        if report is not None:
            self._bars.update(self._steps_task, note=self._time_left(report))
        parts: list[RenderableType] = [self._bars] if self._bars.tasks[0].visible or self._queues else []
        if report is not None:
            success = "" if report.success_frac is None else f"success {percent(report.success_frac)}  "
            rates = f"{success}{report.tokens_per_s:.0f} tokens/s  reward {rewards_text(report.rewards)}"
            parts.append(Text(rates, no_wrap=False))
        if self._queues:
            parts.append(_queue_table(self._queues))
        return Group(*parts) if parts else Text("starting", style="dim")

    def _time_left(self, report: StepReport) -> str:
        if report.eta_s is None:
            return ""
        left_s = max(report.eta_s - (self._clock() - self._last_step_s), 0.0)
        return f"{duration(left_s)} left"


def _queue_table(queues: Mapping[str, PolicyQueue]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("policy", overflow="ellipsis", no_wrap=True)
    for name in ("version", "running", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy, queue in queues.items():
        table.add_row(Text(policy), str(queue.weights_version), str(queue.num_running), str(queue.num_waiting))
    return table
