"""A client's connection to the owner of an experience store."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexmarl.core.errors import BackendError, StoreError
from flexmarl.runtime.local.store_wire import (
    MAX_FRAME_BYTES,
    frame_of,
    raised_by,
    read_body,
    socket_address,
    widen,
)
from flexmarl.runtime.local.wire import FrameCutter

_READ_BYTES = 256 * 1024
_NOT_ACCEPTED_S = 5.0
"""How long an owner may take to accept a connection."""


class Line:
    """One connection to the owner: a request, then its answer."""

    def __init__(self, folder: Path) -> None:
        """Connect.

        Raises:
            StoreError: nobody lends the store in this folder.
        """
        self._where = str(folder)
        self._lock = threading.RLock()
        self._num_requests = 0
        self._cutter = FrameCutter(max_bytes=MAX_FRAME_BYTES)
        self._bodies: deque[bytes] = deque()
        self._answers: dict[int, tuple[str | None, Any]] = {}
        """Of requests that were sent and whose answer nobody has taken."""
        self._is_over = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        widen(self._sock)
        self._sock.settimeout(_NOT_ACCEPTED_S)
        try:
            with socket_address(folder) as address:
                self._sock.connect(address)
        except OSError as error:
            self._sock.close()
            raise StoreError(f"nobody lends the store in {folder}: {error}; start its owner first") from error

    def ask(self, name: str, plain: Sequence[Any], timeout_s: float) -> Any:
        """Return the result of a request as plain data.

        Raises:
            FlexMARLError: what the owner raised.
            StoreError: the owner ended the connection, or did not answer in time; the line is closed then.
        """
        with self._lock:
            return self.receive(self.send(name, plain, timeout_s), timeout_s)

    def send(self, name: str, plain: Sequence[Any], timeout_s: float) -> int:
        """Send a request and return its number, for `receive`; raises StoreError like `ask`."""
        with self._lock:
            self._num_requests += 1
            frame = frame_of([self._num_requests, name, plain])
            with self._translated(timeout_s):
                self._sock.sendall(frame)
            return self._num_requests

    def receive(self, number: int, timeout_s: float) -> Any:
        """Return the result of a request that was sent; raises like `ask`."""
        with self._lock:
            while number not in self._answers:
                with self._translated(timeout_s):
                    answered, kind, value = read_body(self._read_frame())
                if answered is None:
                    self.close()
                    raise raised_by(kind, value)
                self._answers[answered] = (kind, value)
            kind, value = self._answers.pop(number)
        if kind is not None:
            raise raised_by(kind, value)
        return value

    @contextmanager
    def _translated(self, timeout_s: float) -> Iterator[None]:
        """Raise what happens to the connection as a StoreError that says so."""
        if self._is_over:
            raise StoreError(f"the connection to the store in {self._where} is closed")
        self._sock.settimeout(timeout_s)
        try:
            yield
        except TimeoutError as error:
            self.close()
            raise StoreError(f"the owner of the store in {self._where} did not answer for {timeout_s:g} s") from error
        except OSError as error:
            parting = self._parting_words()
            self.close()
            raise StoreError(f"the owner of the store in {self._where} is gone: {parting or error}") from error

    def _parting_words(self) -> str | None:
        """Return why the owner hung up: it says so before it does."""
        try:
            while True:
                answered, _, message = read_body(self._read_frame())
                if answered is None:
                    return str(message)
        except (OSError, BackendError):
            return None

    def _read_frame(self) -> bytes:
        while not self._bodies:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("it ended the connection")
            self._bodies += self._cutter.feed(data)
        return self._bodies.popleft()

    def close(self) -> None:
        """Hang up; a call in another thread that waits for its answer fails."""
        self._is_over = True
        with contextlib.suppress(OSError):  # the owner was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
