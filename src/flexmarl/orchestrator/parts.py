"""What an orchestrator is built from, starts at and comes to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexmarl.config import RootConfig
from flexmarl.core.ids import PolicyName, WorkerId
from flexmarl.core.protocols import EventSink, ExperienceStore, Runtime, StoredStep, WorkerSpec
from flexmarl.core.records import CommitRecord
from flexmarl.orchestrator.evaluation import EvaluationResult
from flexmarl.orchestrator.trajectory_set import EndedTrajectory
from flexmarl.telemetry import MetricsLog, ProgressListener, TrackerGroup
from flexmarl.training.state import PolicyState, PolicyUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What an orchestrator is built from; `api` chooses the implementations."""

    config: RootConfig
    runtime: Runtime
    store: ExperienceStore
    events: EventSink
    flush_events: Callable[[], None]
    close: Callable[[], None]
    """Closes events, metrics and trackers; called by whoever built the parts."""
    metrics: MetricsLog
    trackers: TrackerGroup
    listener: ProgressListener
    instance_specs: Mapping[PolicyName, tuple[int, Callable[[WorkerId], WorkerSpec]]]
    """Number of instances and the maker of their specs."""
    trainer_specs: Mapping[PolicyName, Callable[[WorkerId], WorkerSpec]]
    episode_worker_spec: Callable[[WorkerId], WorkerSpec]
    train_queries: Sequence[Mapping[str, object]]
    held_out_queries: Sequence[Mapping[str, object]]
    run_dir: Path
    on_trajectory: Callable[[EndedTrajectory], None]
    """Called with sampled trajectories of each step, for trajectories.jsonl."""
    on_opened: Callable[[], None]
    """Called when every policy is served: the configuration works."""
    on_baseline: Callable[["RunResult"], None]
    """Called before the first step of a new run: what its end will be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """Where a run begins or goes on."""

    policy_version: int = 0
    policies: Mapping[PolicyName, PolicyState]
    commits: Sequence[CommitRecord] = ()
    """Steps after `policy_version` that are committed: their training side runs again from stored rows."""
    open_steps: Sequence[StoredStep] = ()
    """Steps after those that were in flight when the run was interrupted."""
    is_resumed: bool = False
    digests_before: Mapping[PolicyName, str] | None = None
    """Of the run's first version; None in a new run."""
    before: EvaluationResult | None = None
    """Evaluation of the run's first version, when it had one."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run came to."""

    policy_version: int = 0
    digests_before: dict[PolicyName, str] = field(default_factory=dict)
    updates: dict[PolicyName, PolicyUpdate] = field(default_factory=dict)
    """Newest state of each policy."""
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    """The last evaluation after a committed step."""
    evaluation_error: str | None = None
    """Why the last evaluation failed."""
    stopped_by: str | None = None
    checkpoint: Path | None = None
