"""What `flexmarl.inspect` returns: flat records, which `--json` prints with the same names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import ColumnScalar, FinishReason
from flexmarl.store.lifecycle import LeaseStatus, RowStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """A step that was dispatched."""

    step: int
    policy_version: int | None
    """Version that it made; None while it is open."""
    num_queries: int
    num_trajectories: int
    """Those of extensions included."""
    num_ended: int
    """With an outcome."""
    num_failed: int
    rows: Mapping[RowStatus, int]
    """Number of rows by status, over the shown policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Rows of a step that share policy, status and reason."""

    policy: PolicyName
    status: RowStatus
    reason: str | None
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What one policy's agents did on one query of a step."""

    query: int
    policy: PolicyName
    num_trajectories: int
    num_ended: int
    num_failed: int
    num_rows: int
    reward_mean: float | None
    """Over its rows; None while no reward is known."""
    reward_min: float | None
    reward_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """A lease on the rows of a micro-batch."""

    lease_id: int
    policy: PolicyName
    micro_batch_id: str
    holder: HolderId
    num_rows: int
    status: LeaseStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SealFacts:
    """A sealed gradient cache."""

    policy: PolicyName
    number: int
    holder: HolderId
    num_micro_batches: int
    """Those of its predecessors too."""
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """One attempt of a trajectory."""

    attempt: int
    ended: str | None
    """`outcome` or `failure`; None while it runs, or when a newer one took its place."""
    success: bool | None
    rewards: Mapping[str, float]
    message: str
    """Of a failure, its kind first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """One turn as its row has it."""

    key: SampleKey
    attempt: int
    policy: PolicyName
    status: RowStatus
    reason: str | None
    num_prompt_tokens: int
    num_response_tokens: int
    finish_reason: FinishReason
    policy_version: int
    """Oldest version that generated a token of it."""
    weights_version: int
    reward: float | None
    """The one that was compared within the group."""
    advantage: float | None
    columns: Mapping[str, ColumnScalar]
    """User columns that have a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFacts:
    """One trajectory from close by."""

    key: TrajectoryKey
    attempts: tuple[AttemptFacts, ...]
    turns: tuple[TurnFacts, ...]
    """In key order, those of older attempts before newer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersionFacts:
    """One policy at a version."""

    policy: PolicyName
    weights_version: int
    weights_digest: str
    num_samples: int
    """Trained by the step that made the version."""
    num_tokens: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """A committed version."""

    policy_version: int
    policies: tuple[PolicyVersionFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetail:
    """One step from close by."""

    step: int
    rows: tuple[RowFacts, ...]
    groups: tuple[GroupFacts, ...]
    leases: tuple[LeaseFacts, ...]
    """Ended ones too, in the order in which they were given."""
    seals: tuple[SealFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """What a run's store holds, as of one moment."""

    run_dir: Path
    name: str
    live_pid: int | None
    """Process that runs it now."""
    format_version: int
    """Of the store."""
    store_bytes: int
    policy_version: int
    versions: tuple[VersionFacts, ...]
    steps: tuple[StepFacts, ...]
    detail: StepDetail | None
    """Of the step that was asked for, or else of the newest one; None when no step was dispatched yet."""
    trajectory: TrajectoryFacts | None
    """When one was asked for."""
