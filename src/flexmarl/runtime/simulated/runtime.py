"""`SimulatedRuntime`: workers as coroutines, time as the event loop passes it.

Deadlines, reasons and the order of facts are those of `runtime/supervised.py`, as in the local runtime; hosting keeps
the invariants of `service_host.py`. The same inputs give the same order of events, always.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from flexmarl.config import RuntimeConfig
from flexmarl.core.codec import to_plain
from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import WorkerId
from flexmarl.core.messages import WorkerReady
from flexmarl.core.protocols import AsyncService, Service, ServiceKind, WorkerContext, WorkerSpec
from flexmarl.runtime.service_host import STOP_ASKED, StopAsked, build_service, error_reason
from flexmarl.runtime.simulated.objects import MemoryObjectPlane
from flexmarl.runtime.simulated.virtual_time import VirtualTimeLoop
from flexmarl.runtime.supervised import CLEAN_END, KILLED, SupervisedWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")


def run_virtual(main: "Callable[[SimulatedRuntime], Awaitable[T]]", config: RuntimeConfig | None = None) -> T:
    """Run `main` under virtual time, starting at 0 s, and return what it returns.

    Raises:
        VirtualDeadlock: nothing can happen any more, but `main` has not ended.
    """

    async def run() -> T:
        runtime = SimulatedRuntime(config or RuntimeConfig(kind="simulated"))
        try:
            return await main(runtime)
        finally:
            await runtime.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


class LoopClock:
    """The time of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read `loop`."""
        self._loop = loop

    def now_s(self) -> float:
        """Return seconds since the loop's start."""
        return self._loop.time()


class SimulatedRuntime:
    """Runs workers on the running event loop, which is a `VirtualTimeLoop` (any loop works, in its own time)."""

    def __init__(self, config: RuntimeConfig) -> None:
        """Use the running event loop."""
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._objects = MemoryObjectPlane()
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        self._calls: deque[tuple[Callable[[], Any], float, asyncio.Future[Any]]] = deque()
        self._caller: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def clock(self) -> LoopClock:
        """Virtual time."""
        return self._clock

    @property
    def objects(self) -> MemoryObjectPlane:
        """Objects in this process."""
        return self._objects

    async def call(self, function: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        """Let `cost_s` pass, then run `function(*args)` inline; calls run one at a time, in order.

        As in the local runtime, an accepted call runs also when its caller no longer waits.
        """
        if self._is_closed:
            raise InvariantError(f"call of {function!r} on a closed runtime")
        if cost_s == 0.0 and self._caller is None:
            return function(*args)
        done: asyncio.Future[T] = self._loop.create_future()
        self._calls.append((lambda: function(*args), cost_s, done))
        if self._caller is None:
            self._caller = self._loop.create_task(self._run_calls(), name="runtime calls")
        return await done

    async def _run_calls(self) -> None:
        while self._calls:
            function, cost_s, done = self._calls.popleft()
            if cost_s > 0:
                await asyncio.sleep(cost_s)
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 (passed on to the caller)
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)
        self._caller = None

    def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> "SimulatedWorker":
        """Start a worker as a coroutine.

        Raises:
            InvariantError: a worker of this id still runs, the runtime is closed, or the options are not plain data.
        """
        if self._is_closed:
            raise InvariantError(f"worker {spec.worker_id} started on a closed runtime")
        if spec.worker_id in self._workers:
            raise InvariantError(f"worker {spec.worker_id} started while one of this id runs")
        to_plain(spec.options)  # refuses what could not reach a process
        worker = SimulatedWorker(
            spec=spec, on_fact=on_fact, config=self._config, loop=self._loop, on_over=self._forget, runtime=self
        )
        self._workers[spec.worker_id] = worker
        return worker

    def _forget(self, worker: SupervisedWorker) -> None:
        del self._workers[worker.worker_id]

    async def close(self) -> None:
        """Stop every worker, run the accepted calls, forget every object."""
        if self._is_closed:
            return
        self._is_closed = True
        workers = list(self._workers.values())
        for worker in workers:
            worker.stop()
        if workers:
            await asyncio.wait([worker.over for worker in workers])
            await asyncio.wait([worker.task for worker in workers], timeout=self._config.stop_timeout_s)
        if self._caller is not None:
            await self._caller
        self._objects.clear()


class SimulatedWorker(SupervisedWorker):
    """A worker hosted by a task."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        on_fact: Callable[[WorkerId, object], None],
        config: RuntimeConfig,
        loop: asyncio.AbstractEventLoop,
        on_over: Callable[[SupervisedWorker], None],
        runtime: SimulatedRuntime,
    ) -> None:
        """Create the task; it runs on a later turn of the loop."""
        super().__init__(spec=spec, on_fact=on_fact, config=config, loop=loop, on_over=on_over)
        self._runtime = runtime
        self._commands: deque[object] = deque()
        self._has_arrived = asyncio.Event()
        self._is_killed = False
        self.task = loop.create_task(self._run(), name=f"worker {spec.worker_id}")

    async def _run(self) -> None:
        context = WorkerContext(
            worker_id=self.worker_id,
            objects=self._runtime.objects,
            clock=self._runtime.clock,
            send=self._send_fact,
        )
        is_episode_worker = self.spec.kind is ServiceKind.EPISODE_WORKER
        host = self._host_async(context) if is_episode_worker else self._host(context)
        try:
            await host
        except Exception as error:
            logger.exception("worker %s: its service failed", self.worker_id)
            self.note_error(error_reason(error))
            self.finish("exit code 1")
        else:
            self.finish(CLEAN_END)

    async def _host(self, context: WorkerContext) -> None:
        service: Service = build_service(self.spec, context)
        try:
            self._send_fact(WorkerReady(pid=0))
            await self._serve(service)
        finally:
            if not self._is_killed:  # SIGKILL gives no time to close
                service.close()

    async def _serve(self, service: Service) -> None:
        is_idle = False
        while True:
            for command in await self._receive(is_waiting=is_idle):
                if isinstance(command, StopAsked):
                    return
                service.handle(command)
            step = service.step()
            is_idle = step is None
            if step is None:
                continue
            # Also without cost: others run between the steps of a worker that always has work.
            await asyncio.sleep(step.cost_s)
            for message in step.messages:
                self._send_fact(message)

    async def _host_async(self, context: WorkerContext) -> None:
        service: AsyncService = build_service(self.spec, context)
        try:
            self._send_fact(WorkerReady(pid=0))
            while True:
                for command in await self._receive(is_waiting=True):
                    if isinstance(command, StopAsked):
                        return
                    service.handle(command)
        finally:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await service.close()

    async def _receive(self, *, is_waiting: bool) -> list[object]:
        if is_waiting:
            await self._has_arrived.wait()
        self._has_arrived.clear()
        commands = list(self._commands)
        self._commands.clear()
        return commands

    def _send_fact(self, fact: object) -> None:
        if not self._is_killed:
            self.deliver(fact)

    def _send(self, message: object) -> None:
        self._commands.append(message)
        self._has_arrived.set()

    def _send_stop(self) -> None:
        self._send(STOP_ASKED)

    def _end_now(self) -> None:
        self._is_killed = True
        self.task.cancel()
        self.loop.call_soon(self.finish, KILLED)

    def _release(self) -> None:
        self._is_killed = True
