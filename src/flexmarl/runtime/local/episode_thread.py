"""An episode worker as a thread of the orchestrator's process, with an event loop of its own."""

import asyncio
import threading
from collections.abc import Callable

from flexmarl.config import RuntimeConfig
from flexmarl.core.ids import WorkerId
from flexmarl.core.protocols import ObjectPlane, WorkerContext, WorkerSpec
from flexmarl.runtime.clock import MonotonicClock
from flexmarl.runtime.local.episode_host import EpisodeHost, host_episodes
from flexmarl.runtime.local.thread_worker import post_to_loop
from flexmarl.runtime.service_host import WorkerKilled
from flexmarl.runtime.supervised import CLEAN_END, KILLED, SupervisedWorker


class EpisodeThread(SupervisedWorker):
    """Hosts an `AsyncService`, and is the `EpisodeChannel` of its host."""

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
        self._host: EpisodeHost | None = None
        self._is_stop_asked = False
        self.thread = threading.Thread(target=self._run, name=f"worker {spec.worker_id}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        context = WorkerContext(
            worker_id=self.worker_id, objects=self._objects, clock=MonotonicClock(), send=self._send_fact
        )
        try:
            reason = host_episodes(
                self.spec, context, self, stop_timeout_s=self.config.stop_timeout_s, closes_loop=True
            )
            if reason is not None:
                post_to_loop(self.loop, self.note_error, reason)
            post_to_loop(self.loop, self.finish, CLEAN_END if reason is None else "exit code 1")
        except WorkerKilled:
            return

    def open(self, host: EpisodeHost) -> None:
        """Pass on what has waited, then let the orchestrator's thread reach the host directly."""
        with self._lock:
            for message in self._backlog:
                host.loop.call_soon(host.handle, message)
            self._backlog.clear()
            self._host = host
            if self._is_stop_asked:
                host.loop.call_soon(host.stop)

    def close(self) -> None:
        """Let the orchestrator's thread reach the host no more."""
        with self._lock:
            self._host = None

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
