"""The payload log: token ids and log-probs of turns, appended to one file and never changed.

A record is its length and CRC-32 (little-endian uint32 each), then a msgpack body. The index holds offset, length and
checksum of each record, so a record that was torn, or that an older one shows through, is noticed by its reader.

Invariant: bytes before `num_bytes` are never overwritten; a failed append leaves `num_bytes` where it was.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgpack

from flexmarl.core.errors import StoreError
from flexmarl.core.records import TurnRow
from flexmarl.store.faults import translated

MAGIC = b"FLXPAY01"
"""First bytes of the file; the digits are the version of the record format."""

_HEADER = struct.Struct("<II")


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


class DiskBytes:
    """A file on disk, written without a buffer of this process: SIGKILL loses nothing that was written."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            StoreError: it cannot be opened for writing.
        """
        self.name = str(path)
        with translated(self.name):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

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
        """Free the memory."""
        self._content.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSlot:
    """Where a record lies."""

    offset: int
    num_bytes: int
    """Header included."""
    checksum: int
    """CRC-32 of the body."""

    @property
    def end(self) -> int:
        """Offset of the first byte behind the record."""
        return self.offset + self.num_bytes


class PayloadLog:
    """Appends records to a `ByteFile` and reads them back."""

    def __init__(self, file: ByteFile) -> None:
        """Take over `file`; an empty one becomes an empty log.

        Raises:
            StoreError: the file is no payload log of this format.
        """
        self._file = file
        magic = file.read_at(0, len(MAGIC))
        if magic != MAGIC and MAGIC.startswith(magic):
            # Also the tail of a creation that was killed between its bytes.
            file.truncate(0)
            file.write_at(0, MAGIC)
        elif magic != MAGIC:
            raise StoreError(
                f"{file.name} starts with {magic!r}, expected {MAGIC!r}: not a payload file of this version; "
                "move it away, or choose another run.dir"
            )
        self.num_bytes = file.size_bytes()

    @property
    def name(self) -> str:
        """The file, for messages."""
        return self._file.name

    def append(self, body: bytes) -> PayloadSlot:
        """Add a record at the end; it survives SIGKILL on return, and power loss after `sync`."""
        checksum = zlib.crc32(body)
        slot = PayloadSlot(offset=self.num_bytes, num_bytes=_HEADER.size + len(body), checksum=checksum)
        self._file.write_at(slot.offset, _HEADER.pack(len(body), checksum) + body)
        self.num_bytes = slot.end
        return slot

    def read(self, slot: PayloadSlot) -> bytes:
        """Return the body of a record.

        Raises:
            StoreError: the file does not hold this record.
        """
        body = self._intact_body(slot)
        if body is None:
            raise StoreError(
                f"{self.name} is damaged: the record at byte {slot.offset} ({slot.num_bytes} bytes) does not match "
                "its checksum; restore the file, or resume from an older checkpoint"
            )
        return body

    def is_intact(self, slot: PayloadSlot) -> bool:
        """Return whether the file holds this record."""
        return self._intact_body(slot) is not None

    def _intact_body(self, slot: PayloadSlot) -> bytes | None:
        data = self._file.read_at(slot.offset, slot.num_bytes)
        header, body = data[: _HEADER.size], data[_HEADER.size :]
        expected = _HEADER.pack(slot.num_bytes - _HEADER.size, slot.checksum)
        is_intact = header == expected and len(data) == slot.num_bytes and zlib.crc32(body) == slot.checksum
        return body if is_intact else None

    def truncate(self, num_bytes: int) -> int:
        """Drop what lies behind the first `num_bytes` and return how many bytes that were."""
        end = max(num_bytes, len(MAGIC))
        dropped = self.num_bytes - end
        if dropped > 0:
            self._file.truncate(end)
            self.num_bytes = end
        return max(dropped, 0)

    def sync(self) -> None:
        """Return once every record survives power loss."""
        self._file.sync()

    def close(self) -> None:
        """Release the file."""
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPayload:
    """The lists of a turn."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[tuple[int, int, int], ...]


def pack_turn(row: TurnRow) -> bytes:
    """Return the body of the record that holds the lists of `row`."""
    spans = [(span.start, span.end, span.policy_version) for span in row.version_spans]
    packed: bytes = msgpack.packb((row.prompt_tokens, row.response_tokens, row.logprobs, spans))
    return packed


def unpack_turn(body: bytes) -> TurnPayload:
    """Return what `pack_turn` packed."""
    prompt_tokens, response_tokens, logprobs, spans = msgpack.unpackb(body, use_list=False)
    return TurnPayload(
        prompt_tokens=prompt_tokens, response_tokens=response_tokens, logprobs=logprobs, version_spans=spans
    )
