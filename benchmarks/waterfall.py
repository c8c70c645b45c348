"""Where the time of a step goes, read from the event log of a run.

Two views of the same span, from one commit to the next. `phases` follow each other and add up to the span: they say
what the step waited for. `busy` is the time that workers worked, as a share of the time of all cores: it says what the
cores did; the rest is `idle_frac` (which includes what the orchestrator's own process used).
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from flexmarl.core.events import GroupClosed, RequestDispatched, StepCommitted, StepDispatched
from flexmarl.core.messages import Generated, GradientAccumulated, UpdateApplied, WeightsLoaded
from flexmarl.telemetry import read_events

PHASES = {
    "dispatch": "commit to the step's record on disk (store)",
    "first_requests": "to the first request at an instance (orchestrator, workflow)",
    "generation": "to the last answer of an instance; training of closed groups runs beside it",
    "closing": "to the last group closed (workflow, store, orchestrator)",
    "training": "to the last micro-batch in a gradient cache: what was not hidden behind generation",
    "update": "to the last optimizer step, its result published",
    "publish": "to the last instance that serves and has verified the new weights",
    "commit": "to the commit, durable (store)",
}


@dataclass(slots=True, kw_only=True)
class StepWaterfall:
    """One step, from the commit before it to its own; times in seconds."""

    start_s: float
    marks: dict[str, float] = field(default_factory=dict)
    """When each phase ended."""
    first_request_s: dict[str, float] = field(default_factory=dict)
    last_answer_s: dict[str, float] = field(default_factory=dict)
    """By instance."""
    work_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def duration_s(self) -> float:
        """From commit to commit."""
        return self.marks["commit"] - self.start_s

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase; they add up to `duration_s`."""
        seconds, last_s = {}, self.start_s
        for name in PHASES:
            # A policy may end a phase before another has ended the one before it.
            end_s = max(last_s, self.marks.get(name, last_s))
            seconds[name] = end_s - last_s
            last_s = end_s
        return seconds

    def busy(self) -> dict[str, float]:
        """Return the seconds that workers worked, summed over workers."""
        # An incarnation that died may have answered nothing.
        generating_s = sum(
            self.last_answer_s.get(name, start_s) - start_s for name, start_s in self.first_request_s.items()
        )
        return {"generation": generating_s, **self.work_s}


def step_waterfalls(events_path: Path) -> list[StepWaterfall]:
    """Return every step but the first, whose start no commit marks."""
    steps: list[StepWaterfall] = []
    current = StepWaterfall(start_s=0.0)
    for event in read_events(events_path):
        record, now_s = event.record, event.time_s
        match record:
            case StepCommitted():
                current.marks["commit"] = now_s
                steps.append(current)
                current = StepWaterfall(start_s=now_s)
            case StepDispatched():
                current.marks["dispatch"] = now_s
            case RequestDispatched():
                current.marks.setdefault("first_requests", now_s)
                current.first_request_s.setdefault(record.instance_id, now_s)
            case Generated():
                current.marks["generation"] = now_s
                current.last_answer_s[record.completion.instance_id] = now_s
            case GroupClosed():
                current.marks["closing"] = now_s
            case GradientAccumulated():
                current.marks["training"] = now_s
                current.work_s["training"] += record.duration_s
            case UpdateApplied():
                current.marks["update"] = now_s
                current.work_s["update"] += record.duration_s
            case WeightsLoaded():
                current.marks["publish"] = now_s
            case _:
                pass
    return steps[1:]


def mean_waterfall(steps: Sequence[StepWaterfall]) -> dict[str, Any]:
    """Return the means over steps."""
    phases = [step.phases() for step in steps]
    busy = [step.busy() for step in steps]
    step_s = fmean(step.duration_s for step in steps)
    num_cores = os.cpu_count() or 1
    busy_frac = {name: fmean(each.get(name, 0.0) for each in busy) / step_s / num_cores for name in sorted(busy[0])}
    return {
        "step_s": step_s,
        "phases_s": {name: fmean(each[name] for each in phases) for name in PHASES},
        "busy_frac": busy_frac,
        "idle_frac": max(0.0, 1.0 - sum(busy_frac.values())),
    }
