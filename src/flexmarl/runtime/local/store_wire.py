"""What crosses the socket between the owner of an experience store and its clients: msgpack of plain data.

A request is `[number, operation, arguments]`; its answer is `[number, error, value]`: the class of an error and its
message, or null and the result. `number` is null in the answer to bytes that are no request. Arguments are those of the
method of `ExperienceStore`, in its order; they and the result are written as the method's type hints say, but for the
three operations that are about many rows (`store_rows.py`). Never pickle.
"""

import inspect
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgpack

from flexmarl.core import errors
from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import ConfigError, FlexMARLError, InvariantError, StoreError
from flexmarl.core.protocols import ExperienceStore
from flexmarl.runtime.local.wire import LENGTH

WIRE_VERSION = 1
"""Rises when owner and client of different versions would misread each other."""
SOCKET_NAME = "socket"
"""In the folder of the store."""
MAX_FRAME_BYTES = 256 * 2**20
"""Of one request or answer; a batch of rows beyond it has to be split."""

HELLO = "hello"
"""First request of a connection, with the wire version and its holder or null; the answer is `holder_timeout_s`."""
BEAT = "beat"
"""A sign of life of a holder, over any connection."""

PUT_FINISHED = "put_finished"
CLAIM = "claim"
ACKNOWLEDGE = "acknowledge"
"""These three are about many rows, and have a form of their own (`store_rows.py`)."""
HOLDER_OPERATIONS = frozenset({CLAIM, ACKNOWLEDGE, "lease", "seal"})
"""Operations that a connection may call for its own holder only."""
LENT_OPERATIONS = HOLDER_OPERATIONS | {
    "open_step",
    "extend_step",
    PUT_FINISHED,
    "begin_attempt",
    "put_turn",
    "record_outcome",
    "record_failure",
    "fill",
    "fill_tokens",
    "mask",
    "ready",
    "current_seal",
    "commit",
    "progress",
    "last_commit",
    "trained_ids",
    "commits_after",
    "micro_batch",
    "open_steps",
    "pruned_version",
}
"""All but those that are the owner's alone: declare, fence, release, prune, rewind, close."""

_ERRORS = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, FlexMARLError)
}
_BUFFER_BYTES = 2**20
"""The system allows less, and gives the most that it allows."""
_SUN_PATH_BYTES = 107
"""Longest path that a socket's address holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How one method of the store travels."""

    name: str
    parameters: tuple[str, ...]
    hints: tuple[Any, ...]
    """Of the parameters."""
    keyword_only: frozenset[str]
    result: Any
    """Its type hint."""

    def decode_arguments(self, plain: Any) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            ConfigError: they do not fit the method.
        """
        if not isinstance(plain, list) or len(plain) != len(self.parameters):
            raise ConfigError(f"{self.name}: expected the arguments {', '.join(self.parameters)}, got {plain!r:.80}")
        try:
            return {
                name: from_plain(hint, value)
                for name, hint, value in zip(self.parameters, self.hints, plain, strict=True)
            }
        except (ConfigError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.name}: an argument cannot be read: {error}") from error


@cache
def operation(name: str) -> Operation:
    """Return a lent operation.

    Raises:
        ConfigError: there is no such operation, or it is not lent.
    """
    if name not in LENT_OPERATIONS:
        raise ConfigError(f"unknown operation {name!r:.80}; known: {', '.join(sorted(LENT_OPERATIONS))}")
    method = getattr(ExperienceStore, name)
    hints = get_type_hints(method)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return Operation(
        name=name,
        parameters=tuple(each.name for each in parameters),
        hints=tuple(hints[each.name] for each in parameters),
        keyword_only=frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY),
        result=hints["return"],
    )


def frame_of(content: Sequence[object], *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of plain data.

    Raises:
        StoreError: it would be larger than `max_bytes`, or holds a number over 64 bits.
    """
    try:
        body: bytes = msgpack.packb(content, unicode_errors="surrogatepass")
    except (OverflowError, TypeError, ValueError) as error:
        raise StoreError(f"a call of the store cannot be written to its socket: {error}") from error
    if len(body) > max_bytes:
        raise StoreError(f"a call of the store has {len(body)} bytes, over the limit of {max_bytes}: send fewer rows")
    return LENGTH.pack(len(body)) + body


def read_body(body: bytes) -> Any:
    """Return the content of a frame.

    Raises:
        StoreError: it is not msgpack.
    """
    try:
        return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise StoreError(f"a frame of {len(body)} bytes is not msgpack: {error}") from error


def error_answer(number: object, error: Exception) -> list[object]:
    """Return the answer that raises `error` at the client; one of no class of ours becomes an InvariantError."""
    if isinstance(error, FlexMARLError):
        return [number, type(error).__name__, str(error)]
    return [number, InvariantError.__name__, f"{type(error).__name__}: {error}"]


def raised_by(answer_error: object, message: object) -> FlexMARLError:
    """Return the error that an answer names."""
    cls = _ERRORS.get(str(answer_error), StoreError)
    return cls(str(message))


def encode_arguments(arguments: Sequence[object]) -> list[Any]:
    """Return the arguments as plain data."""
    return [to_plain(argument) for argument in arguments]


@contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """Return an address of the store's socket that is short enough, however long the path of the folder is."""
    path = folder / SOCKET_NAME
    if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
        yield str(path)
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


def widen(sock: socket.socket) -> None:
    """Let a batch of rows leave in one piece, so that both ends are woken less often."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def listen(folder: Path) -> socket.socket:
    """Return a socket that listens in the folder, for this user alone; one of a dead owner is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before the name exists, so that nobody gets in between.
        os.fchmod(sock.fileno(), 0o600)
        (folder / SOCKET_NAME).unlink(missing_ok=True)
        with socket_address(folder) as address:
            sock.bind(address)
        sock.listen()
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
