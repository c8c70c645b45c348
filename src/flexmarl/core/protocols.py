"""The seams of the system. Engines, stores and runtimes implement these; nothing imports an implementation but `api`.

A worker is a process (thread, or coroutine under virtual time) that hosts one `Service`. The orchestrator starts it
through a `Runtime`, sends it commands and receives its facts. Work that blocks runs through `Runtime.call`.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flexmarl.core.ids import HolderId, ObjectKey, PolicyName, RequestId, SampleKey, TrajectoryKey, WorkerId
from flexmarl.core.layout import PackedObject
from flexmarl.core.messages import Generated, GenerationFailed
from flexmarl.core.records import (
    CommitRecord,
    Completion,
    Denominators,
    DispatchRecord,
    GenerationRequest,
    OutcomeRecord,
    Sample,
    SamplingParams,
    Seal,
    TrajectoryFailure,
    TurnRow,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Clock(Protocol):
    """The only source of time in the layers above `core`."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        ...


class EventSink(Protocol):
    """Takes facts and decisions in order."""

    def emit(self, record: object, *, source: str = "orchestrator") -> int:
        """Append a registered record and return its sequence number, counted from 0 over the whole run."""
        ...


# --- objects ----------------------------------------------------------------------------------------------------------


class Tier(StrEnum):
    """Where an object is kept."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What is known of a stored object."""

    key: ObjectKey
    num_bytes: int
    digest: str
    """`PackedObject.digest()` of the content."""


class PendingSet(Protocol):
    """A `set` that may still be copying."""

    def result(self, timeout_s: float) -> ObjectInfo:
        """Wait until the object is readable; raise StoreError on failure or time-out."""
        ...


class ObjectPlane(Protocol):
    """Immutable sets of named tensors by key, wherever they are. Usable from every process of a run."""

    def set(
        self, key: ObjectKey, tensors: "Mapping[str, Tensor] | PackedObject", *, tier: Tier = Tier.HOST
    ) -> PendingSet:
        """Store `tensors` in one buffer; the caller may change them once `result` has returned.

        What is already packed moves in one copy.

        Raises:
            StoreError: no room, or the key exists with other content. The same content again is a no-op.
        """
        ...

    def get(self, key: ObjectKey, *, device: str = "cpu") -> "Mapping[str, Tensor]":
        """Return the tensors. On `cpu` they are read-only maps of shared memory, valid while referenced.

        Raises:
            StoreError: the object does not exist, or is damaged.
        """
        ...

    def packed(self, key: ObjectKey) -> PackedObject:
        """Return the same as one read-only mapped buffer with its layout, without torch."""
        ...

    def info(self, key: ObjectKey) -> ObjectInfo | None:
        """Return what is known of an object, or None when there is none."""
        ...

    def delete(self, key: ObjectKey) -> None:
        """Forget an object; its memory is recycled when its last reader has let go. Unknown keys are ignored."""
        ...


# --- workers and runtimes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStep:
    """What one step of a service did."""

    messages: tuple[object, ...] = ()
    """Facts to send, in order."""
    cost_s: float = 0.0
    """Modelled time to let pass *before* the messages are sent; real work has already taken its time and gives 0."""


class Service(Protocol):
    """The content of an instance or a process group: plain synchronous code, one thread."""

    def handle(self, message: object) -> None:
        """Take a command. Must be quick: long work belongs into `step`."""
        ...

    def step(self) -> ServiceStep | None:
        """Do one unit of work, or return None when there is none until the next message."""
        ...

    def close(self) -> None:
        """Release what the service holds; called once, also after an error."""
        ...


class AsyncService(Protocol):
    """The content of an episode worker: coroutines on one event loop."""

    def handle(self, message: object) -> None:
        """Take a command, on the loop."""
        ...

    async def close(self) -> None:
        """Cancel what runs; called once."""
        ...


class ServiceKind(StrEnum):
    """How a worker is hosted."""

    INSTANCE = "instance"
    PROCESS_GROUP = "process_group"
    EPISODE_WORKER = "episode_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a service is built with, beside its options."""

    worker_id: WorkerId
    objects: ObjectPlane
    clock: Clock
    send: Callable[[object], None]
    """Sends a fact at any time (used by async services; a `Service` returns facts from `step`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start."""

    worker_id: WorkerId
    kind: ServiceKind
    factory: str
    """`module:function`, called as `function(context, options)`; returns a Service, or an AsyncService for an
    episode worker."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Plain data."""


class WorkerHandle(Protocol):
    """A started worker as the orchestrator sees it."""

    @property
    def worker_id(self) -> WorkerId:
        """The id it was started with."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id, once known; None for threads and coroutines."""
        ...

    def send(self, message: object) -> None:
        """Send a command, in order, without waiting. To a worker that is gone it does nothing: its exit is a fact."""
        ...

    def stop(self) -> None:
        """Ask the worker to end; after a grace period it is killed. WorkerExited follows."""
        ...

    def kill(self) -> None:
        """End the worker now. WorkerExited follows."""
        ...


class Runtime(Protocol):
    """Starts workers and runs blocking work; the only thing that differs between laptop, cluster and simulation."""

    @property
    def clock(self) -> Clock:
        """Time as this runtime passes it."""
        ...

    @property
    def objects(self) -> ObjectPlane:
        """The run's object plane."""
        ...

    async def call(self, function: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        """Run blocking `function(*args)` off the event loop; calls run one at a time, in order.

        Under virtual time it runs inline and `cost_s` passes.
        """
        ...

    def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> WorkerHandle:
        """Start a worker. `on_fact` is called on the event loop with each of its facts, in order.

        The first fact is WorkerReady, unless it dies before; the last is WorkerExited.
        """
        ...

    async def close(self) -> None:
        """End every worker and free every object, within a deadline."""
        ...


class Timer(Protocol):
    """A deadline that has been set."""

    def cancel(self) -> None:
        """Forget it; after this its handler is not called."""
        ...


class Inbox(Protocol):
    """The one ordered inbox: every fact is handled before the next, by a synchronous handler.

    Handlers change state, decide, and start work; they never wait. Work reports back as a fact.
    """

    def post(self, source: str, fact: object, handler: Callable[[], None]) -> None:
        """Queue a fact; `handler` runs when its turn comes."""
        ...

    def start(self, name: str, work: Coroutine[Any, Any, T], then: Callable[[T], None]) -> None:
        """Run `work`; its end is a WorkDone fact whose handler is `then(result)`.

        FencedError is logged and dropped: whoever it was about has been replaced. Any other error ends the run.
        """
        ...

    def set_timer(self, name: str, delay_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` as the handler of a TimerFired fact after `delay_s`, unless cancelled before."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        ...


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStep:
    """What one step of an inference engine did."""

    answers: tuple[Generated | GenerationFailed, ...] = ()
    cost_s: float = 0.0


class InferenceBackend(Protocol):
    """An engine that generates tokens with the weights of one policy. It knows nothing of versions."""

    def load_weights(self, weights: ObjectKey) -> str:
        """Copy the weights from the object plane and return the digest of the parameters now held.

        Not called while requests are unfinished. Raises BackendError when names or shapes do not fit.
        """
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ConfigError when it can never be served (prompt over the context)."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request, if it is there."""
        ...

    def step(self, describe: "CompletionStamp") -> BackendStep:
        """Advance every running sequence and let waiting ones in; return what finished."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet answered."""
        ...


class CompletionStamp(Protocol):
    """Adds to an engine's result what only the instance knows."""

    def __call__(
        self, request: GenerationRequest, tokens: Sequence[int], logprobs: Sequence[float], *, is_stopped: bool
    ) -> Completion:
        """Return the completion with versions and instance id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """What a micro-batch added to the gradient cache."""

    denominators: Denominators
    metrics: Mapping[str, float]
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an optimizer update did."""

    metrics: Mapping[str, float]
    cost_s: float = 0.0


class TrainingBackend(Protocol):
    """The training state of one policy: parameters, optimizer, gradient cache. It knows nothing of leases."""

    def load_model(self) -> None:
        """Take the policy's model folder, with a fresh optimizer and an empty cache."""
        ...

    def load_state(self, state: ObjectKey) -> None:
        """Take a full state from the object plane, with an empty cache."""
        ...

    def load_seal(self, seal: ObjectKey) -> Denominators:
        """Continue from a sealed gradient cache and return what it counts."""
        ...

    def accumulate(self, samples: Sequence[Sample]) -> GradientResult:
        """Add the unnormalised gradient sums of `samples` to the cache; parameters do not change."""
        ...

    def seal(self, key: ObjectKey) -> Denominators:
        """Write the cache to the object plane."""
        ...

    def update(self, denominators: Denominators) -> UpdateResult:
        """Divide once, clip, update, empty the cache."""
        ...

    def publish(self, *, state: ObjectKey, weights: ObjectKey) -> str:
        """Put state and weights on the object plane; return the digest of the weights."""
        ...

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        ...

    @property
    def state_bytes(self) -> int:
        """Size of the full state."""
        ...


# --- experience store -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageValue:
    """The data columns that the close of a group fills."""

    key: SampleKey
    advantage: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Rows that one holder may train, until it acknowledges, dies or is fenced."""

    lease_id: int
    """Also the fencing token: it rises with every lease of the run."""
    policy: PolicyName
    holder: HolderId
    micro_batch_id: str
    keys: tuple[SampleKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProgress:
    """Number of rows of a policy's step by status."""

    num_partial: int = 0
    num_ready: int = 0
    num_leased: int = 0
    num_acknowledged: int = 0
    num_sealed: int = 0
    num_committed: int = 0
    num_masked: int = 0
    num_failed: int = 0
    num_superseded: int = 0


class ExperienceStore(Protocol):
    """One table per policy; rows live `partial -> ready -> leased -> acknowledged -> sealed -> committed`.

    Calls that return have survived SIGKILL of any process; dispatch, commit and checkpoint records also power loss.
    Repeating a call with the same key, attempt and content changes nothing; other content raises InvariantError.
    """

    async def open_step(self, dispatch: DispatchRecord) -> None:
        """Record the content of a step before its first request."""
        ...

    async def begin_attempt(self, trajectory: TrajectoryKey) -> int:
        """Return the number of a new attempt (0 is the first); rows of older attempts become superseded with it."""
        ...

    async def put_turn(self, row: TurnRow) -> None:
        """Add a partial row. Raises FencedError when its attempt is no longer the newest."""
        ...

    async def record_outcome(self, outcome: OutcomeRecord) -> None:
        """Record an attempt's end for all its agents in one transaction.

        Raises InvariantError when a turn of the outcome is not in the store; FencedError for an old attempt.
        """
        ...

    async def record_failure(self, failure: TrajectoryFailure) -> None:
        """Record that a trajectory failed for good; its rows become failed with the reason."""
        ...

    async def fill(self, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
        """Fill the advantage columns; rows whose attempt has an outcome become ready."""
        ...

    async def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        """Take rows out of training, with a reason."""
        ...

    async def ready(self, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order, each with its number of prompt and response tokens."""
        ...

    async def lease(
        self, policy: PolicyName, holder: HolderId, micro_batch_id: str, keys: Sequence[SampleKey]
    ) -> tuple[Lease, list[Sample]]:
        """Lease ready rows to a holder, all or none, and read them. Raises CapacityError when one is not ready."""
        ...

    async def acknowledge(self, lease: Lease) -> None:
        """The holder's gradient cache includes the rows. Raises FencedError when the lease has ended."""
        ...

    async def release(self, holder: HolderId) -> list[SampleKey]:
        """The holder is gone: its leased and unsealed acknowledged rows are ready again. Returns them."""
        ...

    async def seal(self, holder: HolderId, seal: Seal) -> None:
        """Make a sealed cache current and its micro-batches' rows sealed, in one transaction."""
        ...

    async def current_seal(self, policy: PolicyName, step: int) -> Seal | None:
        """Return the newest seal of the policy's step."""
        ...

    async def commit(self, record: CommitRecord) -> None:
        """Make the step's trained rows committed, durably, for all policies at once.

        Raises InvariantError when a row of the step is neither acknowledged, sealed, masked, failed nor superseded.
        """
        ...

    async def progress(self, step: int) -> dict[PolicyName, PolicyProgress]:
        """Count rows by status."""
        ...

    async def last_commit(self) -> CommitRecord | None:
        """Return the newest commit record."""
        ...

    async def trained_ids(self, step: int) -> dict[PolicyName, list[SampleKey]]:
        """Return the committed rows of a step in key order."""
        ...

    async def rewind(self, policy_version: int) -> None:
        """Forget everything of steps at or after `policy_version`: resume from a checkpoint without replay."""
        ...

    async def close(self) -> None:
        """Release the files."""
        ...


# --- workflow ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation, as chat templates take it."""

    role: str
    content: str


class Tokenizer(Protocol):
    """Text to token ids and back for one policy's model, with its chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens."""
        ...

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of a conversation, ready for the assistant's next message."""
        ...

    def render_continuation(self, messages: Sequence[ChatMessage], *, is_stopped: bool) -> list[int]:
        """Return what follows the assistant's last tokens when `messages` are added after them.

        `is_stopped` says that those tokens already end with the stop token.
        """
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant message."""
        ...


class AgentClient(Protocol):
    """What an Episode calls to get a turn."""

    async def generate(
        self, key: SampleKey, prompt_tokens: Sequence[int], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> Completion:
        """Return the completion. Raises WorkflowError when the generation failed for good."""
        ...
