"""Records of the event log that are not messages: decisions of the orchestrator and milestones of a run.

Each line of `events.jsonl` is `{"seq", "time_s", "source", "kind", "version", "data"}`: first the facts of the inbox in
the order in which they were handled (kinds of `messages.py`), and between them what was decided (kinds of this module).
A reader refuses a version it does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.core.codec import tagged
from flexmarl.core.ids import AgentName, InstanceId, PolicyName, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.records import CommitRecord, DispatchRecord, StepExtension


@tagged("run_started")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A process began, or went on with, the run."""

    name: str
    seed: int
    policy_version: int
    is_resumed: bool


@tagged("step_dispatched")
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDispatched:
    """The step's content is durable; its trajectories may start."""

    dispatch: DispatchRecord


@tagged("step_extended")
@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtended:
    """More trajectories of a query are durable and may start."""

    extension: StepExtension
    reason: str


@tagged("step_restored")
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRestored:
    """A resumed run goes on with a step that was in flight."""

    dispatch: DispatchRecord
    num_ended: int
    """Trajectories that had ended."""
    num_open: int
    """Trajectories that run again, on their recorded turns as far as those go."""
    num_recorded_turns: int
    """Turns of open trajectories that need not be generated again."""


@tagged("step_replayed")
@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplayed:
    """The training side of a committed step was run again from stored rows, with the same digests."""

    step: int
    policy_version: int


@tagged("attempt_diverged")
@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDiverged:
    """A replayed trajectory asked for a turn with another prompt than the recorded one: a new attempt starts."""

    trajectory: TrajectoryKey
    attempt: int
    key: SampleKey


@tagged("request_dispatched")
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDispatched:
    """A dispatch rule chose an instance."""

    request_id: RequestId
    instance_id: InstanceId
    rule: str
    retry: int


@tagged("group_closed")
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClosed:
    """All trajectories of a query have ended: its advantages are final."""

    query: int
    num_ready: int
    num_masked: int


@tagged("samples_masked")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesMasked:
    """Samples that do not train, and why."""

    reason: str
    agent: AgentName
    keys: tuple[SampleKey, ...]


@tagged("micro_batch_leased")
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLeased:
    """The cut of a micro-batch and the process group that works on it."""

    policy: PolicyName
    micro_batch_id: str
    keys: tuple[SampleKey, ...]
    num_tokens: int


@tagged("allocation_decided")
@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationDecided:
    """A slot was given to a policy, or taken from it."""

    policy: PolicyName
    slot: int
    action: str
    reason: str


@tagged("worker_restarted")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestarted:
    """A worker that died is started again."""

    worker: str
    incarnation: int
    reason: str


@tagged("step_committed")
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """All policies have switched to the commit's version."""

    commit: CommitRecord


@tagged("checkpoint_written")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """A checkpoint is complete and durable."""

    policy_version: int
    path: str


@tagged("evaluation_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """Success on held-out queries at a version."""

    policy_version: int
    metrics: Mapping[str, float]
    error: str | None = None


@tagged("run_ended")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """Why the run ended."""

    policy_version: int
    reason: str
