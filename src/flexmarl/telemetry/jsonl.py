"""JSON-lines files that survive a kill in the middle of a write.

Invariant: only a torn last line, one without its newline, is ever cut off or left out; a damaged line anywhere else is
an error.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexmarl.core.errors import InvariantError, StoreError

_TAIL_BYTES = 1 << 16
_FIX = "free space, then resume the run"


class AppendFile:
    """Appends JSON objects, one a line, through a buffer of its own."""

    def __init__(self, path: Path, *, buffer_bytes: int = 1 << 16) -> None:
        """Open `path`, or create it; a torn last line is cut off.

        Raises:
            StoreError: the file cannot be opened.
        """
        self.path = path
        self._buffer: list[str] = []
        self._num_buffered = 0
        self._buffer_bytes = buffer_bytes
        try:
            self.last_line = _repair(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error}") from error

    def append(self, plain: Mapping[str, Any]) -> None:
        """Add one object; it is in the file at the latest after `flush`."""
        line = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, default=_refuse)
        self._buffer.append(line)
        self._num_buffered += len(line)
        if self._num_buffered >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: it then survives a kill of this process.

        Raises:
            StoreError: the file cannot be written, for example because the disk is full.
        """
        if not self._buffer:
            return
        # Lone surrogates of a user's text have no UTF-8 form; losing a character is better than losing the line.
        content = memoryview(("\n".join(self._buffer) + "\n").encode(errors="replace"))
        self._buffer.clear()
        self._num_buffered = 0
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error}; {_FIX}") from error

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = -1


def _refuse(value: object) -> None:
    raise InvariantError(f"{type(value).__name__} has no JSON form: {value!r:.80}")


def _repair(path: Path) -> dict[str, Any] | None:
    """Cut off a torn last line and return the last whole one.

    Raises:
        StoreError: the last whole line is not a JSON object: this is some other file, and cutting more would harm it.
    """
    if not path.exists():
        return None
    with path.open("r+b") as file:
        start, line = _last_line(file.fileno())
        if line and not line.endswith(b"\n"):
            file.truncate(start)
            start, line = _last_line(file.fileno())
    if not line:
        return None
    plain = _parse(line)
    if plain is None:
        raise StoreError(f"{path}: the last line is not a JSON object; move the file away")
    return plain


def _last_line(fd: int) -> tuple[int, bytes]:
    """Return where the last line starts, and the line with its newline if it has one."""
    end = os.fstat(fd).st_size
    start = end
    tail = b""
    while start > 0:
        start = max(0, start - _TAIL_BYTES)
        tail = os.pread(fd, end - start, start)
        newline = tail.rfind(b"\n", 0, len(tail) - 1)
        if newline >= 0:
            return start + newline + 1, tail[newline + 1 :]
    return 0, tail


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        plain = json.loads(line)
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else None


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number, counted from 1, and its object. A torn last line is left out.

    Raises:
        StoreError: the file cannot be read, or a whole line is damaged.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            plain = _parse(line)
            if plain is None:
                raise StoreError(
                    f"{path}:{number}: damaged line; restore the file, or move it away: store and checkpoints do not "
                    "need it"
                )
            yield number, plain


def write_atomically(path: Path, content: str) -> None:
    """Replace `path` by `content`, durably: a reader sees the old file or the new one, also after power loss.

    Raises:
        StoreError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}; {_FIX}") from error
