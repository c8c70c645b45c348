"""The seams of time, events, workers and runtimes.

A worker is a process (thread, or coroutine under virtual time) that hosts one `Service`. The orchestrator starts it
through a `Runtime`, sends it commands and receives its facts. Work that blocks runs through `Runtime.call`.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from flexmarl.core.ids import WorkerId
from flexmarl.core.protocols.objects import ObjectPlane

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
    is_process: bool = False
    """Of an episode worker: a process of its own instead of a thread of the orchestrator's."""


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

    def start(
        self,
        name: str,
        work: Coroutine[Any, Any, T],
        then: Callable[[T], None],
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        """Run `work`; its end is a WorkDone fact whose handler is `then(result)`.

        After a FencedError it is `on_fenced()`: without one it is dropped, since whoever it was about has mostly been
        replaced. Any other error ends the run.
        """
        ...

    def set_timer(self, name: str, delay_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` as the handler of a TimerFired fact after `delay_s`, unless cancelled before."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        ...
