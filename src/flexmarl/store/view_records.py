"""What `StoreView` finds in a store, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import PolicyColumns
from flexmarl.core.records import (
    ColumnScalar,
    CommitRecord,
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    Seal,
    StepExtension,
    TokenColumn,
    TrajectoryFailure,
)
from flexmarl.store.lifecycle import LeaseStatus, RowStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSummary:
    """The store as a whole."""

    format_version: int
    columns: Mapping[PolicyName, PolicyColumns]
    """Of each policy that has a table."""
    fenced: tuple[HolderId, ...]
    pruned_version: int
    """Payloads of steps below it may have been deleted; 0 when none was."""
    file_bytes: Mapping[str, int]
    """Length of each file of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of one policy's step."""

    by_status: Mapping[RowStatus, int]
    by_reason: Mapping[tuple[RowStatus, str], int]
    """Of masked, failed and superseded rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A step that was dispatched."""

    dispatch: DispatchRecord
    extensions: tuple[StepExtension, ...]
    commit: CommitRecord | None
    num_trajectories: int
    """Dispatched, extensions included."""
    num_outcomes: int
    num_failures: int
    rows: Mapping[PolicyName, RowCounts]
    """Of policies that have rows in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSummary:
    """Rewards of several rows; a trajectory counts once for each of its rows."""

    num_rows: int
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What the trajectories of one query did with one policy."""

    query: int
    policy: PolicyName
    num_trajectories: int
    """Dispatched, extensions included."""
    num_outcomes: int
    num_failures: int
    num_rows: int
    """Superseded ones left out."""
    by_status: Mapping[RowStatus, int]
    rewards: RewardSummary | None
    """None as long as no row has a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A lease of a step, released ones included."""

    lease_id: int
    policy: PolicyName
    holder: HolderId
    micro_batch_id: str
    num_rows: int
    status: LeaseStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SealView:
    """A seal of a step."""

    number: int
    """From 1, per policy."""
    holder: HolderId
    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A row, without its lists."""

    key: SampleKey
    attempt: int
    policy: PolicyName
    policy_version: int
    weights_version: int
    temperature: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_response_tokens: int
    status: RowStatus
    reason: str | None
    reward: float | None
    advantage: float | None
    lease_id: int | None
    num_passes: int
    columns: Mapping[str, ColumnScalar]
    """User columns that are filled."""
    scored: tuple[TokenColumn, ...]
    """Token columns that are filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt of a trajectory; with neither outcome nor failure it was superseded or has not ended."""

    attempt: int
    outcome: OutcomeRecord | None
    failure: TrajectoryFailure | None
    turns: tuple[TurnView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    """A trajectory with all its attempts."""

    key: TrajectoryKey
    attempts: tuple[AttemptView, ...]
