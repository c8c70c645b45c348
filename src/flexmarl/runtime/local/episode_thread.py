"""An episode worker as a thread of the orchestrator's process, with an event loop of its own and a watchdog.

User code runs on that loop. When it holds the loop for too long, the watchdog says where, once per blockage.
"""

import asyncio
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flexmarl.config import RuntimeConfig
from flexmarl.core.ids import WorkerId
from flexmarl.core.messages import LoopBlocked, WorkerReady
from flexmarl.core.protocols import AsyncService, ObjectPlane, WorkerContext, WorkerSpec
from flexmarl.runtime.clock import MonotonicClock
from flexmarl.runtime.local.thread_worker import post_to_loop
from flexmarl.runtime.service_host import WorkerKilled, build_service, error_reason
from flexmarl.runtime.supervised import CLEAN_END, KILLED, SupervisedWorker

logger = logging.getLogger(__name__)

_CHECKS_PER_BLOCKAGE = 4
_DEFAULT_BLOCKED_LOOP_S = 1.0


class EpisodeThread(SupervisedWorker):
    """Hosts an `AsyncService`. Option `blocked_loop_s` says how long its loop may be held."""

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
        """Start the thread and its watchdog."""
        super().__init__(spec=spec, on_fact=on_fact, config=config, loop=loop, on_over=on_over)
        self._objects = objects
        self._lock = threading.Lock()
        self._backlog: list[object] = []
        """Commands that came before the service was built."""
        self._is_muted = threading.Event()
        self._host: _EpisodeHost | None = None
        self._is_stop_asked = False
        self.thread = threading.Thread(target=self._run, name=f"worker {spec.worker_id}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            reason = asyncio.run(self._serve())
            if reason is not None:
                post_to_loop(self.loop, self.note_error, reason)
            post_to_loop(self.loop, self.finish, CLEAN_END if reason is None else "exit code 1")
        except WorkerKilled:
            return
        except BaseException as error:  # noqa: BLE001 (user code stopped the loop, or cancelled all that runs on it)
            logger.error("worker %s: user code ended its event loop (%s)", self.worker_id, error_reason(error))
            post_to_loop(self.loop, self.note_error, f"user code ended its event loop: {error_reason(error)}")
            post_to_loop(self.loop, self.finish, "exit code 1")

    async def _serve(self) -> str | None:
        context = WorkerContext(
            worker_id=self.worker_id, objects=self._objects, clock=MonotonicClock(), send=self._send_fact
        )
        host = _EpisodeHost(asyncio.get_running_loop())
        blocked_loop_s = float(self.spec.options.get("blocked_loop_s", _DEFAULT_BLOCKED_LOOP_S))
        watchdog = LoopWatchdog(threading.get_ident(), asyncio.get_running_loop(), blocked_loop_s, self._send_fact)
        watchdog.start()
        try:
            host.service = build_service(self.spec, context)
            self._send_fact(WorkerReady(pid=os.getpid()))
            self._open(host)
            return await host.end
        except Exception as error:
            logger.exception("worker %s: its service failed", self.worker_id)
            return error_reason(error)
        finally:
            watchdog.stop()
            await self._close(host)

    def _open(self, host: "_EpisodeHost") -> None:
        """Pass on what has waited, then let the orchestrator's thread reach the host directly."""
        with self._lock:
            for message in self._backlog:
                host.loop.call_soon(host.handle, message)
            self._backlog.clear()
            self._host = host
            if self._is_stop_asked:
                host.loop.call_soon(host.stop)

    async def _close(self, host: "_EpisodeHost") -> None:
        with self._lock:
            self._host = None
        if host.service is None:
            return
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await host.service.close()
        except Exception as error:
            logger.exception("worker %s: its service failed to close", self.worker_id)
            post_to_loop(self.loop, self.note_error, error_reason(error))

    def _send_fact(self, fact: object) -> None:
        if not self._is_muted.is_set():
            post_to_loop(self.loop, self.deliver, fact)

    def _send(self, message: object) -> None:
        with self._lock:
            if self._host is None:
                self._backlog.append(message)
            else:
                self._host.loop.call_soon_threadsafe(self._host.handle, message)

    def _send_stop(self) -> None:
        with self._lock:
            self._is_stop_asked = True
            if self._host is not None:
                self._host.loop.call_soon_threadsafe(self._host.stop)

    def _end_now(self) -> None:
        self._is_muted.set()
        self._send_stop()
        self.loop.call_soon(self.finish, KILLED)

    def _release(self) -> None:
        self._is_muted.set()


class _EpisodeHost:
    """The service and its end, on the worker's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.service: AsyncService | None = None
        self.end: asyncio.Future[str | None] = loop.create_future()

    def handle(self, message: object) -> None:
        if self.end.done() or self.service is None:
            return
        try:
            self.service.handle(message)
        except Exception as error:
            logger.exception("an episode worker failed to handle a %s", type(message).__name__)
            self.end.set_result(error_reason(error))

    def stop(self) -> None:
        if not self.end.done():
            self.end.set_result(None)


class LoopWatchdog:
    """Reports when an event loop makes no tick for `blocked_loop_s`, and where its thread is then.

    Time is counted in the watchdog's own checks, so that a process that was stopped as a whole reports nothing.
    """

    def __init__(
        self,
        thread_id: int,
        loop: asyncio.AbstractEventLoop,
        blocked_loop_s: float,
        report: Callable[[LoopBlocked], None],
    ) -> None:
        """Watch `loop`, which runs in the thread `thread_id`; `report` is called in the watchdog's thread."""
        self._thread_id = thread_id
        self._loop = loop
        self._interval_s = blocked_loop_s / _CHECKS_PER_BLOCKAGE
        self._report = report
        self._num_ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)

    def start(self) -> None:
        """Begin; called on the loop."""
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        """End; called on the loop."""
        self._stopped.set()
        self._thread.join()  # it waits for nothing else

    def _tick(self) -> None:
        if not self._stopped.is_set():
            self._num_ticks += 1
            self._loop.call_later(self._interval_s / 2, self._tick)

    def _watch(self) -> None:
        num_ticks_seen = 0
        num_silent_checks = 0
        while not self._stopped.wait(min(self._interval_s, threading.TIMEOUT_MAX)):
            if self._num_ticks != num_ticks_seen:
                num_ticks_seen = self._num_ticks
                num_silent_checks = 0
                continue
            num_silent_checks += 1
            if num_silent_checks == _CHECKS_PER_BLOCKAGE:
                self._report_blockage(num_silent_checks * self._interval_s)

    def _report_blockage(self, duration_s: float) -> None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        location = user_location(frame)
        logger.warning("the event loop of the workflows is blocked at %s", location)
        try:
            self._report(LoopBlocked(duration_s=duration_s, location=location))
        except WorkerKilled:
            self._stopped.set()


def user_location(frame: FrameType) -> str:
    """Return `file:line` of the innermost frame outside the standard library and installed packages, if there is one.

    A call that blocks usually sits some frames below the line that its author can change.
    """
    library_folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    candidate: FrameType | None = frame
    while candidate is not None:
        path = candidate.f_code.co_filename
        is_library = path.startswith("<") or any(Path(path).is_relative_to(folder) for folder in library_folders)
        if not is_library:
            return f"{path}:{candidate.f_lineno}"
        candidate = candidate.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
