"""A worker as a thread of the orchestrator's process: every instance and process group under `runtime.inline`."""

import asyncio
import queue
import threading
from collections.abc import Callable

from flexmarl.config import RuntimeConfig
from flexmarl.core.ids import WorkerId
from flexmarl.core.protocols import ObjectPlane, WorkerContext, WorkerSpec
from flexmarl.runtime.clock import MonotonicClock
from flexmarl.runtime.service_host import STOP_ASKED, WorkerKilled, host_service
from flexmarl.runtime.supervised import CLEAN_END, KILLED, SupervisedWorker


class ThreadChannel:
    """A `HostChannel` over a queue. Raises WorkerKilled once `kill` was called."""

    def __init__(self, post: Callable[[object], None]) -> None:
        """`post` takes each fact, in the worker's thread."""
        self._post = post
        self._commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._killed = threading.Event()

    def put(self, command: object) -> None:
        """Add a command; called by the orchestrator."""
        self._commands.put(command)

    def kill(self) -> None:
        """Have every further call of the worker raise, and wake it."""
        self._killed.set()
        self._commands.put(STOP_ASKED)

    def receive(self, *, is_waiting: bool) -> list[object]:
        """Return the commands that have arrived, in order; with `is_waiting`, at least one."""
        commands: list[object] = []
        try:
            while True:
                commands.append(self._commands.get(block=is_waiting and not commands))
        except queue.Empty:
            self._raise_if_killed()
            return commands

    def send_fact(self, fact: object) -> None:
        """Send a fact."""
        self._raise_if_killed()
        self._post(fact)

    def sleep(self, duration_s: float) -> None:
        """Let modelled time pass."""
        self._killed.wait(duration_s)
        self._raise_if_killed()

    def _raise_if_killed(self) -> None:
        if self._killed.is_set():
            raise WorkerKilled


def post_to_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Call `function` on the orchestrator's loop, from a worker's thread. Raises WorkerKilled when it is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError as error:
        raise WorkerKilled from error  # only a closed loop refuses


class ThreadWorker(SupervisedWorker):
    """The host loop in a daemon thread. A killed one acts no more, but its current step cannot be interrupted."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        on_fact: Callable[[WorkerId, object], None],
        config: RuntimeConfig,
        loop: asyncio.AbstractEventLoop,
        on_over: Callable[[SupervisedWorker], None],
        objects: ObjectPlane,
    ) -> None:
        """Start the thread."""
        super().__init__(spec=spec, on_fact=on_fact, config=config, loop=loop, on_over=on_over)
        self._objects = objects
        self._channel = ThreadChannel(lambda fact: post_to_loop(loop, self.deliver, fact))
        self.thread = threading.Thread(target=self._run, name=f"worker {spec.worker_id}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        context = WorkerContext(
            worker_id=self.worker_id, objects=self._objects, clock=MonotonicClock(), send=self._channel.send_fact
        )
        try:
            reason = host_service(self.spec, context, self._channel)
            if reason is not None:
                post_to_loop(self.loop, self.note_error, reason)
            post_to_loop(self.loop, self.finish, CLEAN_END if reason is None else "exit code 1")
        except WorkerKilled:
            return
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else int(request.code is not None)
            post_to_loop(self.loop, self.finish, f"exit code {code}")

    def _send(self, message: object) -> None:
        self._channel.put(message)

    def _send_stop(self) -> None:
        self._channel.put(STOP_ASKED)

    def _end_now(self) -> None:
        self._channel.kill()
        self.loop.call_soon(self.finish, KILLED)

    def _release(self) -> None:
        self._channel.kill()
