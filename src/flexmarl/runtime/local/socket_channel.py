"""A worker process's end of its connection to the orchestrator."""

import select
import socket
import threading
import time
from collections import deque
from typing import Any

from flexmarl.core.codec import from_tagged
from flexmarl.runtime.local.wire import FrameDecoder, FrameKind, encode_record
from flexmarl.runtime.service_host import STOP_ASKED, WorkerKilled

_READ_BYTES = 1024 * 1024


class SocketChannel:
    """A `HostChannel` over a blocking socket. Raises WorkerKilled when the orchestrator has let go of its end."""

    def __init__(self, sock: socket.socket) -> None:
        """Own the connected `sock`."""
        self._sock = sock
        self._decoder = FrameDecoder()
        self._arrived: deque[tuple[FrameKind, Any]] = deque()
        self._write_lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when commands arrive."""
        return self._sock.fileno()

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
