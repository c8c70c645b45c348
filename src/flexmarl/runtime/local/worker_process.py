"""A worker process, from the fork on: isolation, its channel, its pulse.

The pulse thread sends heartbeats and watches the socket's other end, so that the orchestrator knows that the process
lives, and the process ends with the orchestrator, also while it computes.
"""

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

from flexmarl.core.codec import from_plain, from_tagged
from flexmarl.core.protocols import WorkerContext, WorkerSpec
from flexmarl.objects import HostObjectPlane
from flexmarl.runtime.clock import MonotonicClock
from flexmarl.runtime.local.process_control import die_with_parent, set_process_name
from flexmarl.runtime.local.wire import FrameDecoder, FrameKind, encode_frame, encode_record
from flexmarl.runtime.service_host import STOP_ASKED, WorkerKilled, error_reason, host_service

logger = logging.getLogger(__name__)

_READ_BYTES = 1024 * 1024


class SocketChannel:
    """A `HostChannel` over a blocking socket. Raises WorkerKilled when the orchestrator has let go of its end."""

    def __init__(self, sock: socket.socket) -> None:
        """Own the connected `sock`."""
        self._sock = sock
        self._decoder = FrameDecoder()
        self._arrived: deque[tuple[FrameKind, Any]] = deque()
        self._write_lock = threading.Lock()

    def read_spec(self) -> dict[str, Any]:
        """Wait for the first frame and return its payload."""
        while not self._arrived:
            self._read(is_waiting=True)
        payload: dict[str, Any] = self._arrived.popleft()[1]
        return payload

    def receive(self, *, is_waiting: bool) -> list[object]:
        """Return the commands that have arrived, in order; with `is_waiting`, at least one."""
        while self._read(is_waiting=is_waiting and not self._arrived):
            continue
        commands: list[object] = []
        while self._arrived:
            kind, payload = self._arrived.popleft()
            commands.append(STOP_ASKED if kind is FrameKind.STOP else from_tagged(payload))
        return commands

    def send_fact(self, fact: object) -> None:
        """Send a fact. Usable from any thread."""
        self.write(encode_record(FrameKind.FACT, fact))

    def sleep(self, duration_s: float) -> None:
        """Let modelled time pass."""
        time.sleep(duration_s)

    def write(self, frame: bytes) -> None:
        """Send a whole frame; threads take turns."""
        try:
            with self._write_lock:
                self._sock.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerKilled from error

    def wait_for_hang_up(self, timeout_s: float) -> bool:
        """Return True when the other end was closed, False after `timeout_s`. Reads nothing."""
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        return bool(poller.poll(timeout_s * 1000))

    def _read(self, *, is_waiting: bool) -> bool:
        """Take in what the socket holds; False when that was nothing."""
        try:
            data = self._sock.recv(_READ_BYTES, 0 if is_waiting else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise WorkerKilled from error
        if not data:
            raise WorkerKilled
        self._arrived.extend(self._decoder.feed(data))
        return True


def run_worker_process(sock: socket.socket, *, name: str, log_path: str, parent_pid: int) -> None:
    """Turn a fresh fork into a worker and serve; the process ends here."""
    os.setpgid(0, 0)
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name(f"fm:{name}")
    _redirect_output(log_path)
    channel = SocketChannel(sock)
    try:
        code = _serve(channel)
    except WorkerKilled:
        end_process_group()
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_process_group() -> NoReturn:
    """End this process and those that it started, now."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # not reached: this process is in the group


def _serve(channel: SocketChannel) -> int:
    first = channel.read_spec()
    if channel.wait_for_hang_up(0):
        raise WorkerKilled
    heartbeat_s = float(first["heartbeat_s"])
    threading.Thread(target=_pulse, args=(channel, heartbeat_s), name="pulse", daemon=True).start()
    try:
        spec = from_plain(WorkerSpec, first["spec"])
        objects = HostObjectPlane(Path(first["object_folder"]))
        context = WorkerContext(
            worker_id=spec.worker_id, objects=objects, clock=MonotonicClock(), send=channel.send_fact
        )
        reason = host_service(spec, context, channel)
    except Exception as error:
        logger.exception("the worker could not start")
        reason = error_reason(error)
    if reason is not None:
        channel.write(encode_frame(FrameKind.ERROR, reason))
    return 0 if reason is None else 1


def _pulse(channel: SocketChannel, heartbeat_s: float) -> None:
    heartbeat = encode_frame(FrameKind.HEARTBEAT)
    try:
        while not channel.wait_for_hang_up(heartbeat_s):
            channel.write(heartbeat)
    except WorkerKilled:
        logger.warning("the orchestrator is gone")
    end_process_group()


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    faulthandler.enable(sys.stderr)
