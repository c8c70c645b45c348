"""The orchestrator's end of a worker's socket: never blocks, keeps every frame, in order."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from flexmarl.core.errors import BackendError
from flexmarl.runtime.local.wire import FrameDecoder, FrameKind

logger = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
"""Read per turn of the event loop, so that one talkative worker does not starve the others."""


_MAX_BUFFERS = 256
"""Frames per system call; Linux takes up to 1024."""


class FrameSocket:
    """Frames over a connected stream socket, driven by the event loop's readiness.

    What the socket does not take at once waits here and leaves as it drains. After the peer is gone sends do nothing.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_frame: Callable[[FrameKind, Any], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        """Own `sock`. `on_end` is called once, after the last frame, with what was wrong with the stream or None."""
        sock.setblocking(False)
        self._sock = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._outbox: deque[memoryview] = deque()
        self._is_open = True
        self.num_received_bytes = 0
        """Rises with every sign of life of the peer."""
        loop.add_reader(sock, self._read)

    def send(self, frame: bytes) -> None:
        """Send a frame after all earlier ones, without waiting."""
        if not self._is_open:
            return
        self._outbox.append(memoryview(frame))
        if len(self._outbox) == 1:
            # At the end of this turn of the loop: frames of one turn leave in one system call.
            self._loop.call_soon(self._write)

    def close(self) -> None:
        """Let go of the socket without a word; the peer reads an end of file."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._outbox.clear()
            self._sock.close()

    def _write(self) -> None:
        while self._outbox and self._is_open:
            try:
                num_sent = self._sock.sendmsg(list(islice(self._outbox, _MAX_BUFFERS)))
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._write)
                return
            except (BrokenPipeError, ConnectionResetError):
                # The peer is gone. What it said before is still to be read: its end is found by reading.
                self._outbox.clear()
                break
            self._forget(num_sent)
        if self._is_open:
            self._loop.remove_writer(self._sock)

    def _forget(self, num_sent: int) -> None:
        """Drop what has left from the front of the outbox."""
        while num_sent:
            head = self._outbox[0]
            if num_sent < len(head):
                self._outbox[0] = head[num_sent:]
                return
            num_sent -= len(head)
            self._outbox.popleft()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            data = b""
        self.num_received_bytes += len(data)
        if not data:
            self._end(None)
            return
        try:
            frames = self._decoder.feed(data)
        except BackendError as error:
            self._end(str(error))
            return
        for kind, payload in frames:
            if self._is_open:
                self._on_frame(kind, payload)

    def _end(self, problem: str | None) -> None:
        self.close()
        self._on_end(problem)
