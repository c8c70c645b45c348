"""What the orchestrator and its workers say to each other, and the facts that reach its inbox.

A worker is an instance, a process group or an episode worker. Every message is a frozen record with a registered kind,
so any of them can cross a socket and be written to the event log. Messages *to* workers are commands; messages *from*
workers are facts, and are handled one at a time in the order of the inbox.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flexmarl.core.codec import tagged
from flexmarl.core.ids import ObjectKey, PolicyName, Purpose, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.records import (
    BULK,
    Completion,
    Denominators,
    GenerationRequest,
    OutcomeRecord,
    Sample,
    SamplingParams,
    TokenColumn,
    TokenValues,
    TrajectoryFailure,
    TurnRow,
)

# --- every worker -----------------------------------------------------------------------------------------------------


@tagged("worker_ready")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """The worker has built its service and takes messages."""

    pid: int


@tagged("worker_exited")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker ended. Made by the runtime, exactly once per started worker, as its last fact."""

    reason: str
    """`asked`, `exit code N`, `signal SIGKILL`, `no heartbeat for N s`, or the error that ended its service."""
    is_expected: bool
    """The orchestrator had asked for it."""


# --- instance ---------------------------------------------------------------------------------------------------------


@tagged("load_weights")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Serve `policy_version` of a policy. Weights already held at `weights_version` are only relabelled."""

    policy: PolicyName
    policy_version: int
    weights_version: int
    object_key: ObjectKey
    digest: str
    """What the loaded weights must digest to."""


@tagged("weights_loaded")
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """The instance serves this version; `digest` was computed over the parameters it really holds."""

    policy: PolicyName
    policy_version: int
    weights_version: int
    digest: str


@tagged("generate")
@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Generate one turn."""

    request: GenerationRequest


@tagged("cancel_requests")
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequests:
    """Forget these requests; no answer is sent for those not yet answered."""

    request_ids: tuple[RequestId, ...]


@tagged("generated")
@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The one good answer to a request."""

    completion: Completion


class GenerationFailureKind(StrEnum):
    """Whether trying a failed request again can help."""

    WRONG_VERSION = "wrong_version"
    REFUSED = "refused"
    """The request itself cannot be served: a prompt over the context, an unknown option. Retrying does not help."""
    ENGINE = "engine"


@tagged("generation_failed")
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFailed:
    """The one bad answer to a request."""

    request_id: RequestId
    failure_kind: GenerationFailureKind
    message: str


# --- process group ----------------------------------------------------------------------------------------------------


@tagged("activate")
@dataclass(frozen=True, slots=True, kw_only=True)
class Activate:
    """Hold a policy's full training state, ready for work."""

    policy: PolicyName
    policy_version: int
    state: ObjectKey | None
    """The state object to load; None takes the policy's model folder, with a fresh optimizer."""
    seal: ObjectKey | None
    """Gradient cache to continue from; None starts an empty one."""


@tagged("activated")
@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """The process group holds the state."""

    policy: PolicyName
    weights_digest: str
    num_parameters: int
    state_bytes: int
    duration_s: float


@tagged("publish_state")
@dataclass(frozen=True, slots=True, kw_only=True)
class PublishState:
    """Put the state and the weights on the object plane under these keys."""

    state_key: ObjectKey
    weights_key: ObjectKey


@tagged("state_published")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatePublished:
    """Both objects are readable."""

    policy: PolicyName
    weights_digest: str


@tagged("accumulate_gradient")
@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateGradient:
    """Forward and backward of one micro-batch; add to the gradient cache, unnormalised."""

    micro_batch_id: str
    policy_version: int
    """The version being trained: the step's number. Its distance to a sample's oldest token is the staleness."""
    samples: tuple[Sample, ...] = field(metadata=BULK)


@tagged("gradient_accumulated")
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAccumulated:
    """The micro-batch is in the gradient cache."""

    policy: PolicyName
    micro_batch_id: str
    denominators: Denominators
    metrics: Mapping[str, float]
    """Sums over samples or tokens; `training/metrics.py` says which."""
    duration_s: float


@tagged("score")
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Compute a token column of turns, forward only. Changes nothing that the process group holds."""

    score_id: str
    """Unique within the incarnation's life."""
    column: TokenColumn
    turns: tuple[TurnRow, ...] = field(metadata=BULK)


@tagged("scored")
@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The column of every turn of a Score, in its order."""

    policy: PolicyName
    score_id: str
    column: TokenColumn
    values: tuple[TokenValues, ...] = field(metadata=BULK)
    duration_s: float


@tagged("seal_cache")
@dataclass(frozen=True, slots=True, kw_only=True)
class SealCache:
    """Write the gradient cache to the object plane."""

    object_key: ObjectKey


@tagged("cache_sealed")
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSealed:
    """The sealed cache is readable."""

    policy: PolicyName
    object_key: ObjectKey
    denominators: Denominators


@tagged("apply_update")
@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyUpdate:
    """Divide the cache once by the denominators, clip, update, empty the cache; publish when it is the step's last."""

    policy_version: int
    """The version that the step makes."""
    denominators: Denominators
    """What the orchestrator counted; a process group whose own count differs refuses."""
    state_key: ObjectKey | None
    """Where the new state goes; None for an update that others of the same step follow: it is not published."""
    weights_key: ObjectKey | None
    """None together with `state_key`."""


@tagged("update_applied")
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateApplied:
    """New weights and state are readable under the keys of the command, if it had any."""

    policy: PolicyName
    policy_version: int
    weights_digest: str
    """Empty when nothing was published."""
    metrics: Mapping[str, float]
    """`grad_norm`, `learning_rate`, ..."""
    duration_s: float


# --- episode worker ---------------------------------------------------------------------------------------------------


@tagged("start_trajectory")
@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrajectory:
    """Run the workflow on a query."""

    purpose: Purpose
    key: TrajectoryKey
    attempt: int
    query: Mapping[str, object] = field(metadata=BULK)
    seed: int
    """Of `episode.rng`."""


@tagged("cancel_trajectory")
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTrajectory:
    """Stop the attempt; nothing more is reported of it."""

    purpose: Purpose
    key: TrajectoryKey
    attempt: int


@tagged("turn_requested")
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequested:
    """An agent of a running trajectory wants a turn."""

    request_id: RequestId
    purpose: Purpose
    key: SampleKey
    attempt: int
    prompt_tokens: tuple[int, ...] = field(metadata=BULK)
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]


@tagged("deliver_turn")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverTurn:
    """The answer to a TurnRequested: a completion or, when it is None, an error."""

    purpose: Purpose
    request_id: RequestId
    completion: Completion | None
    error: str | None = None


@tagged("trajectory_ended")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEnded:
    """The workflow returned an outcome."""

    purpose: Purpose
    outcome: OutcomeRecord


@tagged("trajectory_failed")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFailed:
    """The workflow ended without an outcome."""

    purpose: Purpose
    failure: TrajectoryFailure


@tagged("loop_blocked")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBlocked:
    """User code kept an episode worker's event loop for too long."""

    duration_s: float
    location: str
    """`file:line` where it was seen."""


# --- facts that no worker sends ---------------------------------------------------------------------------------------


@tagged("work_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """Work that a handler started through the runtime has finished."""

    name: str
    """Names the work and what it was about: `store.put_turn s0/q3/t1/solver/b0/n0`."""
    error: str | None = None


@tagged("timer_fired")
@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """A deadline that a handler set has passed."""

    name: str


@tagged("signal_received")
@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived:
    """The user, or the system, asks the run to stop."""

    signal: str
