"""What `flexmarl inspect` shows: tables of a run's store, as lines of text."""

import io
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexmarl.cli.text import DIGEST_LENGTH

if TYPE_CHECKING:
    from flexmarl.api.inspect_records import InspectReport, StepDetail, StepFacts, TrajectoryFacts, VersionFacts

MAX_ROWS = 10
"""Versions, steps and ended leases that are shown, the newest ones; `--json` has all."""
_MIN_WIDTH = 100
_FILE_WIDTH = 1000
"""Where nobody's window is too narrow."""


def report_lines(report: "InspectReport") -> list[str]:
    """Return a report as lines; in a terminal the cells of a table that is too wide are folded."""
    parts: list[str | Table] = [_head(report)]
    if report.trajectory is not None:
        parts += _trajectory(report.trajectory)
    else:
        parts += [_versions(report.versions), _steps(report.steps)]
        if report.detail is not None:
            parts += _detail(report.detail)
    text = io.StringIO()
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = max(shutil.get_terminal_size().columns, _MIN_WIDTH) if is_terminal else _FILE_WIDTH
    console = Console(file=text, width=width, color_system=None)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _head(report: "InspectReport") -> str:
    life = "not live" if report.live_pid is None else f"live (pid {report.live_pid})"
    return (
        f"run {report.name} in {report.run_dir}: {life}, version {report.policy_version}; store format "
        f"{report.format_version}, {report.store_bytes / 1e6:.1f} MB"
    )


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, num_left_out: int = 0
) -> Table | str:
    """A table whose numbers are aligned right; one line when it is empty."""
    if not rows:
        return f"{title}: none"
    more = f" (the last {len(rows)}; {num_left_out} earlier ones are left out)" if num_left_out > 0 else ""
    table = Table(title=f"{title}{more}", title_justify="left", title_style="", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        is_number = any(isinstance(row[number], int | float) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _versions(versions: Sequence["VersionFacts"]) -> Table | str:
    shown = versions[-MAX_ROWS:]
    return _table(
        "\nversions",
        ("version", "policy", "weights_version", "digest", "samples", "tokens", "micro-batches"),
        [
            (
                version.policy_version,
                each.policy,
                each.weights_version,
                each.weights_digest[:DIGEST_LENGTH],
                each.num_samples,
                each.num_tokens,
                each.num_micro_batches,
            )
            for version in shown
            for each in version.policies
        ],
        num_left_out=len(versions) - len(shown),
    )


def _steps(steps: Sequence["StepFacts"]) -> Table | str:
    shown = steps[-MAX_ROWS:]
    statuses = sorted({status for step in shown for status in step.rows}, key=_STATUS_ORDER.index)
    return _table(
        "\nsteps",
        ("step", "state", "queries", "trajectories", "ended", "failed", *statuses),
        [
            (
                step.step,
                "open" if step.policy_version is None else f"committed {step.policy_version}",
                step.num_queries,
                step.num_trajectories,
                step.num_ended,
                step.num_failed,
                *(step.rows.get(status, 0) for status in statuses),
            )
            for step in shown
        ],
        num_left_out=len(steps) - len(shown),
    )


_STATUS_ORDER = ["partial", "ready", "leased", "acknowledged", "sealed", "committed", "masked", "failed", "superseded"]


def _detail(detail: "StepDetail") -> Iterator[Table | str]:
    yield _table(
        f"\nrows of step {detail.step}",
        ("policy", "status", "reason", "rows"),
        [(each.policy, each.status, each.reason, each.num_rows) for each in detail.rows],
    )
    yield _table(
        f"\ngroups of step {detail.step}",
        ("query", "policy", "trajectories", "ended", "failed", "rows", "reward", "min", "max"),
        [
            (
                group.query,
                group.policy,
                group.num_trajectories,
                group.num_ended,
                group.num_failed,
                group.num_rows,
                group.reward_mean,
                group.reward_min,
                group.reward_max,
            )
            for group in detail.groups
        ],
    )
    shown = detail.leases[-MAX_ROWS:]
    yield _table(
        f"\nleases of step {detail.step}",
        ("lease", "policy", "micro-batch", "holder", "rows", "status"),
        [
            (lease.lease_id, lease.policy, lease.micro_batch_id, lease.holder, lease.num_rows, lease.status)
            for lease in shown
        ],
        num_left_out=len(detail.leases) - len(shown),
    )
    yield _table(
        f"\nseals of step {detail.step}",
        ("policy", "seal", "holder", "micro-batches", "samples", "tokens"),
        [
            (seal.policy, seal.number, seal.holder, seal.num_micro_batches, seal.num_samples, seal.num_tokens)
            for seal in detail.seals
        ],
    )


def _trajectory(trajectory: "TrajectoryFacts") -> Iterator[Table | str]:
    yield _table(
        f"\nattempts of {trajectory.key}",
        ("attempt", "ended", "success", "rewards", "message"),
        [
            (
                each.attempt,
                each.ended or "running",
                each.success,
                " ".join(f"{agent} {reward:.4g}" for agent, reward in each.rewards.items()),
                each.message,
            )
            for each in trajectory.attempts
        ],
    )
    yield _table(
        f"\nturns of {trajectory.key}",
        (
            *("turn", "attempt", "policy", "status", "reason", "prompt_tokens", "response_tokens", "finish"),
            *("version", "reward", "advantage", "columns"),
        ),
        [
            (
                f"{turn.key.agent}/b{turn.key.branch}/n{turn.key.turn}",
                turn.attempt,
                turn.policy,
                turn.status,
                turn.reason,
                turn.num_prompt_tokens,
                turn.num_response_tokens,
                turn.finish_reason,
                turn.policy_version,
                turn.reward,
                turn.advantage,
                " ".join(f"{name}={value}" for name, value in turn.columns.items()),
            )
            for turn in trajectory.turns
        ],
    )
