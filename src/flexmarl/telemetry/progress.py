"""What a run reports while it goes: the seam between a run and whoever watches it (terminal, notebook, test)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One committed step."""

    step: int
    """Counted from 0."""
    num_steps: int
    """Of the whole run."""
    rewards: Mapping[str, float]
    """Mean trajectory reward per agent."""
    success_frac: float | None
    """Share of trajectories in which the team succeeded; None when the workflow does not say."""
    tokens_per_s: float
    """Generated tokens over the step's seconds."""
    num_samples: int
    """Trained samples of all policies."""
    weights_versions: Mapping[str, int]
    """Per policy, after the commit."""
    duration_s: float
    eta_s: float | None
    """Expected time to the end of the run; None when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Success on held-out queries at one version."""

    policy_version: int
    success_frac: float | None
    """Share of sampled trajectories in which the team succeeded; None when the workflow does not say, or on error."""
    greedy_success_frac: float | None
    """The same at temperature 0; None when that is switched off too."""
    rewards: Mapping[str, float]
    """Mean trajectory reward per agent, sampled."""
    num_queries: int
    duration_s: float
    num_failed: int = 0
    """Trajectories that ended without an outcome; they count as no success."""
    error: str | None = None
    """Why the evaluation failed; the run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended."""

    name: str
    run_dir: str
    policy_version: int
    """Committed steps."""
    num_steps: int
    duration_s: float
    before: EvaluationReport | None = None
    after: EvaluationReport | None = None
    stopped_by: str | None = None
    """Signal that asked the run to stop before its last step."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What was written that a user may look for next: what it is, and its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyQueue:
    """The generation requests of one policy at one moment."""

    num_waiting: int
    """Requests that no slot of an instance works on yet."""
    num_running: int
    weights_version: int
    """What its instances serve, or are loading."""


class ProgressListener(Protocol):
    """Watches a run. Calls come from the run's event loop, in order; they must return quickly and must not raise."""

    def on_start(self, total_steps: int, run_dir: str) -> None:
        """The run begins or goes on."""
        ...

    def on_rollout_progress(self, num_ended: int, num_trajectories: int) -> None:
        """So many trajectories of the step in progress, or of an evaluation, have ended."""
        ...

    def on_queue(self, queues: Mapping[str, PolicyQueue]) -> None:
        """The requests of every policy; told some five times a second while trajectories run."""
        ...

    def on_step(self, report: StepReport) -> None:
        """A step is committed."""
        ...

    def on_evaluation(self, report: EvaluationReport) -> None:
        """An evaluation has ended."""
        ...

    def on_message(self, message: str) -> None:
        """Something that the user should know: a restart, a warning, a checkpoint."""
        ...

    def on_end(self, summary: RunSummary) -> None:
        """The run is over; called once, not called when it ends with an error."""
        ...


class SilentListener:
    """A ProgressListener that shows nothing."""

    def on_start(self, total_steps: int, run_dir: str) -> None:
        """Do nothing."""

    def on_rollout_progress(self, num_ended: int, num_trajectories: int) -> None:
        """Do nothing."""

    def on_queue(self, queues: Mapping[str, PolicyQueue]) -> None:
        """Do nothing."""

    def on_step(self, report: StepReport) -> None:
        """Do nothing."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Do nothing."""

    def on_message(self, message: str) -> None:
        """Do nothing."""

    def on_end(self, summary: RunSummary) -> None:
        """Do nothing."""
