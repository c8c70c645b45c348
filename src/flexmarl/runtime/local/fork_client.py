"""The orchestrator's end of a fork server."""

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack

from flexmarl.runtime.local.process_control import MARK_VARIABLE, kill_marked

logger = logging.getLogger(__name__)

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_MAX_REPORT_BYTES = 64 * 1024
_END_TIMEOUT_S = 15.0
"""A fork server that was let go kills what is left of the run, and ends, within this time, or is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerSettings:
    """What a fork server is started with."""

    preload: Sequence[str]
    """Modules it imports before the first fork."""
    threads_per_process: int
    mark: str
    """Of this fork server and everything that descends from it: `<run mark>/<number>`."""
    run_mark: str
    log_path: Path
    object_folder: Path
    record_path: Path


class ForkedProcess(Protocol):
    """Who is told what became of a forked process."""

    def take_forked(self, pid: int) -> None:
        """It runs."""
        ...

    def take_exited(self, reason: str) -> None:
        """It has ended, or was never made."""
        ...


class ForkServerClient:
    """Starts a fork server and speaks with it, without ever waiting for it.

    When the fork server dies, the kernel kills its children; each is reported as exited, once.
    """

    def __init__(
        self,
        settings: ForkServerSettings,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[["ForkServerClient"], None],
    ) -> None:
        """Start the process. It imports while requests queue; `on_end` is called once when it has ended."""
        self._settings = settings
        self._loop = loop
        self._on_end = on_end
        self._processes: dict[int, ForkedProcess] = {}
        self._num_forks = 0
        self._outbox: deque[tuple[bytes, socket.socket | None]] = deque()
        self._failure: str | None = None
        self._is_let_go = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _spawn(settings, theirs)
        self._control.setblocking(False)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._control, self._read)
        loop.add_reader(self._pidfd, self._take_end)
        self._request(_startup_message(settings))

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def fork(self, process: ForkedProcess, *, name: str, log_path: Path, channel: socket.socket) -> int:
        """Ask for a worker process that owns `channel`, and return the number by which it can be killed."""
        self._num_forks += 1
        serial = self._num_forks
        self._processes[serial] = process
        request = {"op": "fork", "serial": serial, "name": name, "log_path": str(log_path)}
        self._request(request, channel)
        return serial

    def kill(self, serial: int) -> None:
        """Have a worker's process group killed by its parent, for whom its id cannot have been reused."""
        self._request({"op": "kill", "serial": serial})

    def end_hung(self) -> None:
        """Kill a fork server that does not do what it was asked."""
        if not self.ended.done():
            logger.error("the fork server (pid %d) does not answer; killing it", self._process.pid)
            self._process.kill()

    async def close(self) -> None:
        """Let go of the fork server, which then ends what is left of the run, and wait for it."""
        self._is_let_go = True
        if not self.ended.done():
            self._control.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([self.ended], timeout=_END_TIMEOUT_S)
        if not self.ended.done():
            self.end_hung()
            await asyncio.wait([self.ended], timeout=_END_TIMEOUT_S)

    def _request(self, request: dict[str, object], channel: socket.socket | None = None) -> None:
        if self.ended.done() or self._is_let_go:
            if channel is not None:
                channel.close()
            return
        self._outbox.append((msgpack.packb(request, unicode_errors="surrogatepass"), channel))
        if len(self._outbox) == 1:
            self._write()

    def _write(self) -> None:
        while self._outbox:
            data, channel = self._outbox[0]
            try:
                socket.send_fds(self._control, [data], [] if channel is None else [channel.fileno()])
            except OSError as error:
                # Full, or too many descriptors in flight: a fork server that is importing has not read for long.
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
                    self._loop.add_writer(self._control, self._write)
                    return
                self._clear_outbox()  # it is gone, and its end is about to be noticed
                break
            self._outbox.popleft()
            if channel is not None:
                channel.close()
        self._loop.remove_writer(self._control)

    def _clear_outbox(self) -> None:
        for _, channel in self._outbox:
            if channel is not None:
                channel.close()
        self._outbox.clear()

    def _read(self) -> None:
        while (report := self._receive()) is not None:
            self._take_report(report)

    def _receive(self) -> dict[str, Any] | None:
        try:
            data = self._control.recv(_MAX_REPORT_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return None
        if not data:
            self._loop.remove_reader(self._control)  # closed; its end as a process follows
            return None
        report: dict[str, Any] = msgpack.unpackb(data, unicode_errors="surrogatepass")
        return report

    def _take_report(self, report: dict[str, Any]) -> None:
        if report["op"] == "ready":
            if report["num_threads"] != 1:
                logger.warning(
                    "the fork server runs %d threads after importing %s: a forked worker may inherit a held lock",
                    report["num_threads"],
                    ", ".join(self._settings.preload),
                )
        elif report["op"] == "failed":
            self._failure = report["reason"]
        elif report["op"] == "forked":
            self._processes[report["serial"]].take_forked(report["pid"])
        else:
            self._processes.pop(report["serial"]).take_exited(report["reason"])

    def _take_end(self) -> None:
        code = self._process.wait()
        self._read()
        for registered in (self._control, self._pidfd):
            self._loop.remove_reader(registered)
        self._loop.remove_writer(self._control)
        self._clear_outbox()
        self._control.close()
        os.close(self._pidfd)
        # The kernel has killed the children; what they had started, in groups of its own, is found by its mark.
        kill_marked(self._settings.mark)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        reason = f"its fork server ended: {self._failure or how}"
        if not self._is_let_go:
            logger.error("the fork server ended (%s); see %s", self._failure or how, self._settings.log_path)
        self.ended.set_result(None)
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.take_exited(reason)
        self._on_end(self)


def _spawn(settings: ForkServerSettings, control: socket.socket) -> subprocess.Popen[bytes]:
    environment = {**os.environ, MARK_VARIABLE: settings.mark, "TOKENIZERS_PARALLELISM": "false"}
    environment.update(dict.fromkeys(_THREAD_VARIABLES, str(settings.threads_per_process)))
    command = [
        sys.executable,
        "-P",
        "-m",
        "flexmarl.runtime.local.fork_server",
        str(control.fileno()),
        str(os.getpid()),
    ]
    with settings.log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C in the terminal is the orchestrator's to answer
        )


def _startup_message(settings: ForkServerSettings) -> dict[str, object]:
    return {
        "sys_path": list(sys.path),
        "argv": list(sys.argv),
        "preload": list(settings.preload),
        "mark": settings.run_mark,
        "object_folder": str(settings.object_folder),
        "record_path": str(settings.record_path),
    }
