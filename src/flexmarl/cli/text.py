"""Reports as lines of text."""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexmarl.telemetry.progress import EvaluationReport, RunSummary, StepReport

if TYPE_CHECKING:
    from flexmarl.api import InspectReport, ReplayedStep, ReplayResult

DIGEST_LENGTH = 12
"""Characters of a digest that are shown: enough to tell any two of a run apart."""


def step_line(report: StepReport) -> str:
    """Return one line about a committed step."""
    parts = [
        *_step_head(report),
        f"{report.num_samples} samples",
        f"{report.tokens_per_s:.0f} tokens/s",
        duration(report.duration_s),
    ]
    if report.eta_s is not None and report.step + 1 < report.num_steps:
        parts.append(f"{duration(report.eta_s)} left")
    return "  ".join(parts)


def short_step_line(report: StepReport) -> str:
    """Return the step without what the live view shows below it: short enough for a narrow terminal."""
    return "  ".join([*_step_head(report), duration(report.duration_s)])


def _step_head(report: StepReport) -> list[str]:
    width = len(str(report.num_steps))
    parts = [f"step {report.step + 1:>{width}}/{report.num_steps}"]
    if report.success_frac is not None:
        parts.append(f"success {percent(report.success_frac):>4}")
    return [*parts, f"reward {rewards_text(report.rewards)}"]


def evaluation_line(report: EvaluationReport) -> str:
    """Return one line about an evaluation."""
    head = f"evaluation at version {report.policy_version}"
    if report.error is not None:
        return f"{head} failed: {report.error}"
    parts = [
        f"{name} {percent(value)}"
        for name, value in (("success", report.success_frac), ("greedy", report.greedy_success_frac))
        if value is not None
    ]
    parts.append(f"reward {rewards_text(report.rewards)}")
    failed = f"{report.num_failed} trajectories failed, " if report.num_failed else ""
    return f"{head}: {'  '.join(parts)}  ({report.num_queries} queries, {failed}{duration(report.duration_s)})"


def summary_lines(summary: RunSummary) -> list[str]:
    """Return what a user wants to know at the end of a run, the final line last."""
    lines = [f"{what}: {path}" for what, path in summary.files.items()]
    if summary.stopped_by is not None:
        lines.append(f"to go on: flexmarl train {summary.run_dir} --resume")
    return [*lines, final_line(summary)]


def final_line(summary: RunSummary) -> str:
    """Return the run in one line: how far it came, what it gained, where it lies."""
    how = "done" if summary.stopped_by is None else f"stopped by {summary.stopped_by}"
    parts = [f"{how}: {summary.policy_version} of {summary.num_steps} steps in {duration(summary.duration_s)}"]
    if summary.before is not None and summary.after is not None:
        for name, before, after in (
            ("success", summary.before.success_frac, summary.after.success_frac),
            ("greedy success", summary.before.greedy_success_frac, summary.after.greedy_success_frac),
        ):
            if before is not None and after is not None:
                parts.append(f"held-out {name} {percent(before)} -> {percent(after)}")
        if summary.after.success_frac is None:
            parts += [
                f"held-out reward of {agent} {summary.before.rewards[agent]:.2f} -> {reward:.2f}"
                for agent, reward in summary.after.rewards.items()
                if agent in summary.before.rewards
            ]
    elif summary.before is not None and summary.before.success_frac is not None:
        parts.append(f"held-out success {percent(summary.before.success_frac)} before")
    parts.append(f"run folder {summary.run_dir}")
    return "; ".join(parts)


def replayed_step_line(step: "ReplayedStep") -> str:
    """Return one line about a step that was trained again; versions are counted as in checkpoints' names."""
    parts = []
    for policy in step.policies:
        digest = policy.recorded_digest[:DIGEST_LENGTH]
        if not policy.is_equal:
            parts.append(f"{policy.policy} DIFFERENT (recorded {digest}, now {policy.replayed_digest[:DIGEST_LENGTH]})")
        elif policy.num_micro_batches == 0:
            parts.append(f"{policy.policy} unchanged {digest}")
        else:
            parts.append(f"{policy.policy} equal {digest} ({policy.num_samples} samples)")
    return f"step {step.step} -> version {step.policy_version}  {'  '.join(parts)}  {duration(step.duration_s)}"


def replay_line(result: "ReplayResult") -> str:
    """Return a replay in one line."""
    start = "the start models" if result.start is None else result.start.name
    num_equal = sum(step.is_equal for step in result.steps)
    how = "all equal" if result.is_equal else "different"
    return f"{how}: {num_equal} of {len(result.steps)} replayed steps have the recorded weights; began at {start}"


def json_line(report: "ReplayResult | InspectReport") -> str:
    """Return a report as one line of JSON with the names of its fields."""
    plain = dataclasses.asdict(report)
    return json.dumps(plain, default=str, ensure_ascii=False)


def percent(frac: float) -> str:
    """Return a share as a whole percentage."""
    return f"{100 * frac:.0f}%"


def duration(seconds: float) -> str:
    """Return seconds in the units that people read: `0.8 s`, `42 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rewards_text(rewards: Mapping[str, float]) -> str:
    """Return each agent's reward."""
    return " ".join(f"{agent} {reward:.2f}" for agent, reward in rewards.items()) or "none"
