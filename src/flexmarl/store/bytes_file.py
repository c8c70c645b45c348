"""Files of bytes that the payload log appends to: on disk, or in memory for runs that keep nothing."""

import os
import re
from pathlib import Path
from typing import Protocol

from flexmarl.core.errors import StoreError
from flexmarl.store.faults import translated

_NAME = re.compile(r"payload-(\d+)\.bin")


class ByteFile(Protocol):
    """Random access to bytes."""

    name: str
    """For messages."""

    def write_at(self, offset: int, data: bytes) -> None:
        """Write all of `data`, or raise StoreError."""
        ...

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes; fewer at the end of the file."""
        ...

    def size_bytes(self) -> int:
        """Return the length of the file."""
        ...

    def truncate(self, num_bytes: int) -> None:
        """Drop what lies behind the first `num_bytes`."""
        ...

    def sync(self) -> None:
        """Return once everything written survives power loss."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class SegmentFiles(Protocol):
    """The files of one payload log by their numbers."""

    name: str
    """For messages."""

    def numbers(self) -> list[int]:
        """Return the numbers of the files that there are, in order."""
        ...

    def open(self, number: int, *, create: bool = False) -> ByteFile:
        """Open a file. Raises StoreError when it is not there, unless `create`."""
        ...

    def remove(self, number: int) -> None:
        """Delete a file that is closed."""
        ...

    def sync_names(self) -> None:
        """Return once the names of the files survive power loss."""
        ...


class DiskBytes:
    """A file on disk, written without a buffer of this process: SIGKILL loses nothing that was written."""

    def __init__(self, path: Path, *, flags: int = os.O_RDWR) -> None:
        """Open the file.

        Raises:
            StoreError: it cannot be opened so.
        """
        self.name = str(path)
        with translated(self.name):
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o644)

    def write_at(self, offset: int, data: bytes) -> None:
        """Write all of `data`, or raise StoreError."""
        view = memoryview(data)
        with translated(self.name):
            while view:
                num_written = os.pwrite(self._fd, view, offset)
                offset += num_written
                view = view[num_written:]

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes; fewer at the end of the file."""
        with translated(self.name):
            return os.pread(self._fd, num_bytes, offset)

    def size_bytes(self) -> int:
        """Return the length of the file."""
        return os.fstat(self._fd).st_size

    def truncate(self, num_bytes: int) -> None:
        """Drop what lies behind the first `num_bytes`."""
        with translated(self.name):
            os.ftruncate(self._fd, num_bytes)

    def sync(self) -> None:
        """Return once everything written survives power loss."""
        with translated(self.name):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)


class DiskSegments:
    """Files `payload-<number>.bin` in a folder."""

    def __init__(self, folder: Path, *, is_read_only: bool = False) -> None:
        self.name = str(folder)
        self._folder = folder
        self._flags = os.O_RDONLY if is_read_only else os.O_RDWR

    def _path(self, number: int) -> Path:
        return self._folder / f"payload-{number}.bin"

    def numbers(self) -> list[int]:
        """Return the numbers of the files that there are, in order."""
        with translated(self.name):
            found = [_NAME.fullmatch(name) for name in os.listdir(self._folder)]
        return sorted(int(match[1]) for match in found if match)

    def open(self, number: int, *, create: bool = False) -> DiskBytes:
        """Open a file. Raises StoreError when it is not there, unless `create`."""
        return DiskBytes(self._path(number), flags=self._flags | (os.O_CREAT if create else 0))

    def remove(self, number: int) -> None:
        """Delete a file that is closed."""
        with translated(str(self._path(number))):
            self._path(number).unlink(missing_ok=True)

    def sync_names(self) -> None:
        """Return once the names of the files survive power loss."""
        with translated(self.name):
            fd = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class MemoryBytes:
    """Bytes that end with the process."""

    name = "payload in memory"

    def __init__(self) -> None:
        self._content = bytearray()

    def write_at(self, offset: int, data: bytes) -> None:
        """Write all of `data`."""
        self._content[offset : offset + len(data)] = data

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes; fewer at the end."""
        return bytes(self._content[offset : offset + num_bytes])

    def size_bytes(self) -> int:
        """Return the length."""
        return len(self._content)

    def truncate(self, num_bytes: int) -> None:
        """Drop what lies behind the first `num_bytes`."""
        del self._content[num_bytes:]

    def sync(self) -> None:
        """Do nothing: memory does not survive power loss."""

    def close(self) -> None:
        """Do nothing: the content stays until its segment is removed."""


class MemorySegments:
    """Segments that end with the process."""

    name = "payload in memory"

    def __init__(self) -> None:
        self._files: dict[int, MemoryBytes] = {}

    def numbers(self) -> list[int]:
        """Return the numbers of the segments that there are, in order."""
        return sorted(self._files)

    def open(self, number: int, *, create: bool = False) -> MemoryBytes:
        """Open a segment. Raises StoreError when it is not there, unless `create`."""
        if number not in self._files:
            if not create:
                raise StoreError(f"{self.name}: segment {number} is not there")
            self._files[number] = MemoryBytes()
        return self._files[number]

    def remove(self, number: int) -> None:
        """Free a segment."""
        self._files.pop(number, None)

    def sync_names(self) -> None:
        """Do nothing: memory does not survive power loss."""
