"""A worker as a process of its own, seen from the orchestrator."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexmarl.config import RuntimeConfig
from flexmarl.core.codec import from_tagged, to_plain
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import WorkerId
from flexmarl.core.protocols import WorkerSpec
from flexmarl.runtime.local.fork_client import ForkServerClient
from flexmarl.runtime.local.frame_socket import FrameSocket
from flexmarl.runtime.local.silence import CHECKS_PER_TIMEOUT, SilenceWatch
from flexmarl.runtime.local.wire import FrameKind, encode_frame, encode_record
from flexmarl.runtime.supervised import KILLED, SupervisedWorker

logger = logging.getLogger(__name__)

KILL_GRACE_S = 5.0
"""A killed process is gone within this time, or its fork server is taken as hung and killed too."""


class ProcessWorker(SupervisedWorker):
    """Frames over a socket, exits from the fork server; any byte that arrives is a sign of life."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        on_fact: Callable[[WorkerId, object], None],
        config: RuntimeConfig,
        loop: asyncio.AbstractEventLoop,
        on_over: Callable[[SupervisedWorker], None],
        server: ForkServerClient,
        log_path: Path,
        object_folder: Path,
    ) -> None:
        """Ask `server` for the process."""
        first = encode_frame(
            FrameKind.SPEC,
            {
                "spec": to_plain(spec),
                "object_folder": str(object_folder),
                "heartbeat_s": min(1.0, config.heartbeat_timeout_s / CHECKS_PER_TIMEOUT),
                "stop_timeout_s": config.stop_timeout_s,
            },
        )
        super().__init__(spec=spec, on_fact=on_fact, config=config, loop=loop, on_over=on_over)
        self._pid: int | None = None
        self._exit_reason: str | None = None
        self._is_drained = False
        self._deadlines: list[asyncio.TimerHandle] = []
        self._watch: SilenceWatch | None = None
        self._num_bytes_seen = 0
        self._server = server
        ours, theirs = socket.socketpair()
        self._frames = FrameSocket(ours, loop, on_frame=self._take_frame, on_end=self._take_end_of_stream)
        self._frames.send(first)
        self._serial = server.fork(self, name=spec.worker_id, log_path=log_path, channel=theirs)

    @property
    def pid(self) -> int | None:
        """Process id, once known."""
        return self._pid

    def take_forked(self, pid: int) -> None:
        """The fork server has made the process."""
        if self.is_over:
            return
        self._pid = pid
        self._watch = SilenceWatch(
            self.loop,
            timeout_s=self.config.heartbeat_timeout_s,
            has_spoken=self._has_spoken,
            on_silent=self.end_because,
        )

    def take_exited(self, reason: str) -> None:
        """The process is gone; what it said before may still be in the socket."""
        if self.is_over:
            return
        self._exit_reason = reason
        self._finish_when_complete()
        self._after_grace(self.finish, reason)

    def _take_frame(self, kind: FrameKind, payload: Any) -> None:
        if kind is FrameKind.ERROR:
            self.note_error(payload)
        elif kind is FrameKind.FACT:
            try:
                fact = from_tagged(payload)
            except ConfigError as error:
                self.end_because(f"sent a fact that cannot be read: {error}")
                return
            self.deliver(fact)

    def _take_end_of_stream(self, problem: str | None) -> None:
        self._is_drained = True
        if problem is not None:
            self.end_because(f"sent what cannot be read: {problem}")
        elif self._exit_reason is None:
            self._after_grace(self.end_because, "closed its connection but did not end")
        self._finish_when_complete()

    def _finish_when_complete(self) -> None:
        if self._is_drained and self._exit_reason is not None:
            # Not at once: the fork server's report may have been read inside a call of the handle's owner.
            self.loop.call_soon(self.finish, self._exit_reason)

    def _has_spoken(self) -> bool:
        has_spoken = self._frames.num_received_bytes > self._num_bytes_seen
        self._num_bytes_seen = self._frames.num_received_bytes
        return has_spoken

    def _after_grace(self, function: Callable[..., None], *args: Any) -> None:
        self._deadlines.append(self.loop.call_later(KILL_GRACE_S, function, *args))

    def _send(self, message: object) -> None:
        self._frames.send(encode_record(FrameKind.COMMAND, message))

    def _send_stop(self) -> None:
        self._frames.send(encode_frame(FrameKind.STOP))

    def _end_now(self) -> None:
        if self._exit_reason is not None:
            return
        self._server.kill(self._serial)
        if self._pid is None:
            # Nothing was forked yet, and a fork server that still imports would not answer for long. Should it fork
            # later, the process finds its socket closed and ends before it builds anything.
            self.loop.call_soon(self.finish, KILLED)
        else:
            self._after_grace(self._server.end_hung)

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for timer in self._deadlines:
            timer.cancel()
        self._frames.close()
