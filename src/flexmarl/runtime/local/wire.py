"""Frames between the orchestrator and a worker process: four bytes of length, then msgpack of [kind, payload].

Only plain data crosses: payloads of commands and facts are what `core.codec.to_tagged` makes. Never pickle.
"""

import struct
from enum import StrEnum
from typing import Any

import msgpack

from flexmarl.core.codec import kind_of, to_tagged
from flexmarl.core.errors import BackendError

MAX_FRAME_BYTES = 512 * 2**20
"""More than any micro-batch needs; tensors travel on the object plane."""

LENGTH = struct.Struct(">I")
"""What goes before every body."""


class FrameKind(StrEnum):
    """What a frame is."""

    SPEC = "spec"
    """To the worker, first: what it shall be."""
    COMMAND = "command"
    STOP = "stop"
    """To the worker: end after the current step."""
    FACT = "fact"
    HEARTBEAT = "heartbeat"
    ERROR = "error"
    """From the worker, last: the error that ended its service."""


def encode_frame(kind: FrameKind, payload: object = None, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of plain data.

    Raises:
        BackendError: the payload is larger than `max_bytes`, or holds what msgpack cannot write (an int over 64 bits).
    """
    try:
        body: bytes = msgpack.packb([kind.value, payload], unicode_errors="surrogatepass")
    except (OverflowError, TypeError, ValueError) as error:
        raise BackendError(f"cannot write a {kind.value} frame: {error}") from error
    if len(body) > max_bytes:
        raise BackendError(
            f"a {kind.value} frame of {len(body)} bytes is over the limit of {max_bytes}: lower "
            "training.micro_batch_tokens, or send large content through the object plane"
        )
    return LENGTH.pack(len(body)) + body


def encode_record(kind: FrameKind, record: object, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of a command or fact. Raises BackendError like `encode_frame`, naming the record's kind."""
    try:
        return encode_frame(kind, to_tagged(record), max_bytes=max_bytes)
    except BackendError as error:
        raise BackendError(f"message {kind_of(record)}: {error}") from error


class FrameCutter:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """Start at a frame's first byte."""
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes, in order.

        Raises:
            BackendError: a frame claims more than `max_bytes`.
        """
        self._buffer += data
        bodies = []
        start = 0
        while (body := self._body_at(start)) is not None:
            bodies.append(body)
            start += LENGTH.size + len(body)
        del self._buffer[:start]
        return bodies

    def _body_at(self, start: int) -> bytes | None:
        body_start = start + LENGTH.size
        if len(self._buffer) < body_start:
            return None
        (num_bytes,) = LENGTH.unpack_from(self._buffer, start)
        if num_bytes > self._max_bytes:
            raise BackendError(f"a frame claims {num_bytes} bytes, over the limit of {self._max_bytes}")
        if len(self._buffer) < body_start + num_bytes:
            return None
        with memoryview(self._buffer) as view:  # a slice of the buffer itself would be a copy of its own
            return bytes(view[body_start : body_start + num_bytes])


class FrameDecoder:
    """Cuts a stream of bytes into frames and reads them."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """Start at a frame's first byte."""
        self._cutter = FrameCutter(max_bytes=max_bytes)

    def feed(self, data: bytes) -> list[tuple[FrameKind, Any]]:
        """Return the frames that `data` completes, in order.

        Raises:
            BackendError: the bytes are not frames.
        """
        return [_decode(body) for body in self._cutter.feed(data)]


def _decode(body: bytes) -> tuple[FrameKind, Any]:
    try:
        kind, payload = msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)
        return FrameKind(kind), payload
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BackendError(f"a frame of {len(body)} bytes cannot be read: {error}") from error
