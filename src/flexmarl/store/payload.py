"""The payload log: records of bytes, appended to segments and never changed.

A record is its length and CRC-32 (little-endian uint32 each), then its body (`packing.py`). The index holds segment,
offset, length and checksum of each record, so a record that was torn, or that an older one shows through, is noticed by
its reader. A segment is deleted as a whole (`prune`); numbers of segments are never used again.

Invariants: bytes before `end` are never overwritten; a failed append leaves `end` where it was; segments before the
current one have been synced.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flexmarl.core.errors import StoreError
from flexmarl.store.bytes_file import ByteFile, SegmentFiles

MAGIC = b"FLXPAY02"
"""First bytes of each segment; the digits are the version of the record format."""

SEGMENT_BYTES = 256 * 2**20
"""A longer segment is not appended to any more."""

_HEADER = struct.Struct("<II")


class PayloadSlot(NamedTuple):
    """Where a record lies."""

    segment: int
    offset: int
    num_bytes: int
    """Header included."""
    checksum: int
    """CRC-32 of the body."""

    @property
    def end(self) -> int:
        """Offset of the first byte behind the record."""
        return self.offset + self.num_bytes


class PayloadEnd(NamedTuple):
    """A place between two records; places compare in the order in which records were appended."""

    segment: int
    num_bytes: int


class PayloadReader:
    """Reads records of a payload log, also of one that another process appends to."""

    def __init__(self, files: SegmentFiles, pruned: Mapping[int, int]) -> None:
        """Read from `files`; `pruned` has the deleted segments, each with the policy_version that covers it."""
        self._files = files
        self._open: dict[int, ByteFile] = {}
        self.pruned = dict(pruned)
        """Segments that were deleted, each with the policy_version whose checkpoint covers it."""

    def read(self, slot: PayloadSlot) -> bytes:
        """Return the body of a record.

        Raises:
            StoreError: its segment has been pruned, or does not hold this record.
        """
        return self.read_many([slot])[0]

    def read_many(self, slots: Sequence[PayloadSlot]) -> list[bytes]:
        """Return the bodies of records; those that lie one behind the other are read at once.

        Raises:
            StoreError: a segment has been pruned, or does not hold its record.
        """
        content, places = self.read_records(slots)
        return [content[start:end] for start, end in places]

    def read_records(self, slots: Sequence[PayloadSlot]) -> tuple[bytes, list[tuple[int, int]]]:
        """Return bytes that hold the bodies of records, and where each begins and ends; raises like `read_many`."""
        parts: list[bytes] = []
        places: list[tuple[int, int]] = []
        shift = 0
        for run in _runs(slots):
            segment, start = run[0].segment, run[0].offset
            if segment in self.pruned:
                raise StoreError(
                    f"{self._files.name}: tokens of segment {segment} have been deleted: the checkpoint of version "
                    f"{self.pruned[segment]} covers their step; store.retention=all, set before training, keeps all"
                )
            file = self._file(segment)
            part = file.read_at(start, run[-1].end - start)
            data = memoryview(part)
            for slot in run:
                if not _is_intact(data[slot.offset - start : slot.end - start], slot):
                    raise StoreError(
                        f"{file.name} is damaged: the record at byte {slot.offset} ({slot.num_bytes} bytes) does not "
                        "match its checksum; restore the file, or resume from an older checkpoint"
                    )
                begin = shift + slot.offset - start + _HEADER.size
                places.append((begin, begin + slot.num_bytes - _HEADER.size))
            parts.append(part)
            shift += len(part)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), places

    def is_intact(self, slot: PayloadSlot) -> bool:
        """Return whether the log holds this record."""
        if slot.segment not in self._files.numbers():
            return False
        data = memoryview(self._file(slot.segment).read_at(slot.offset, slot.num_bytes))
        return _is_intact(data, slot)

    def _file(self, segment: int) -> ByteFile:
        file = self._open.get(segment)
        if file is None:
            file = self._files.open(segment)
            magic = file.read_at(0, len(MAGIC))
            if magic != MAGIC:
                file.close()
                raise StoreError(_other_format(file.name, magic))
            self._open[segment] = file
        return file

    def close(self) -> None:
        """Release the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class PayloadLog(PayloadReader):
    """Appends records to the newest segment and reads them back from any."""

    def __init__(
        self, files: SegmentFiles, pruned: Mapping[int, int] | None = None, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Take over `files`; without any there is a new, empty segment. `pruned` has deleted ones and their versions.

        Raises:
            StoreError: the newest segment is no payload file of this format.
        """
        super().__init__(files, pruned or {})
        self._segment_bytes = segment_bytes
        self.newest_steps: dict[int, int] = {}
        """At least the newest step with a record in it, by segment; segments without records are left out."""
        self._numbers = set(files.numbers())
        for segment in sorted(self._numbers & self.pruned.keys()):
            # The last process died between writing that it is pruned and deleting it.
            self._remove(segment)
        self._begin(max(self._numbers, default=max(self.pruned, default=0) + 1))

    def _begin(self, number: int) -> None:
        file = self._files.open(number, create=True)
        magic = file.read_at(0, len(MAGIC))
        if magic != MAGIC and MAGIC.startswith(magic):
            # Also the tail of a creation that was killed between its bytes.
            file.truncate(0)
            file.write_at(0, MAGIC)
        elif magic != MAGIC:
            file.close()
            raise StoreError(_other_format(file.name, magic))
        self._open[number] = file
        self._numbers.add(number)
        self.end = PayloadEnd(number, file.size_bytes())

    @property
    def name(self) -> str:
        """The newest segment, for messages."""
        return self._open[self.end.segment].name

    def append(self, bodies: Sequence[bytes], step: int) -> list[PayloadSlot]:
        """Add records of a step at the end in one write; they survive SIGKILL on return, power loss after `sync`."""
        if self.end.num_bytes >= self._segment_bytes:
            self.roll()
        segment, offset = self.end
        slots: list[PayloadSlot] = []
        parts: list[bytes] = []
        for body in bodies:
            checksum = zlib.crc32(body)
            slot = PayloadSlot(segment, offset, _HEADER.size + len(body), checksum)
            slots.append(slot)
            parts += (_HEADER.pack(len(body), checksum), body)
            offset = slot.end
        self._open[segment].write_at(self.end.num_bytes, b"".join(parts))
        self.end = PayloadEnd(segment, offset)
        self.newest_steps[segment] = max(step, self.newest_steps.get(segment, step))
        return slots

    def roll(self) -> None:
        """Begin a new segment, unless the newest one is empty."""
        if self.end.num_bytes > len(MAGIC):
            self.sync()
            self._begin(self.end.segment + 1)
            self._files.sync_names()

    def size_bytes(self, segment: int) -> int:
        """Return the length of a segment; 0 when it is not there."""
        return self._file(segment).size_bytes() if segment in self._numbers else 0

    def segment_name(self, segment: int) -> str:
        """Return the name of a segment, for messages."""
        return f"{self._files.name}/payload-{segment}.bin"

    # --- dropping -----------------------------------------------------------------------------------------------------

    def below(self, step: int) -> list[int]:
        """Return the segments, without the newest, all of whose records are of earlier steps."""
        segments = sorted(self._numbers - {self.end.segment})
        return [segment for segment in segments if self.newest_steps.get(segment, -1) < step]

    def prune(self, segments: Iterable[int], policy_version: int) -> None:
        """Delete segments that the checkpoint of `policy_version` covers; no index on disk may need them any more."""
        for segment in segments:
            self.pruned[segment] = policy_version
            self._remove(segment)

    def trim(self, ends: Mapping[int, int]) -> int:
        """Drop what lies behind the last record of the newest segment, and segments without any; return the bytes.

        `ends` has the offset behind the last record of each segment that has one.
        """
        dropped = 0
        for segment in sorted(self._numbers - ends.keys() - {self.end.segment}):
            dropped += self.size_bytes(segment)
            self._remove(segment)
        newest = self.end.segment
        end = max(ends.get(newest, 0), len(MAGIC))
        if self.end.num_bytes > end:
            self._open[newest].truncate(end)
            dropped += self.end.num_bytes - end
            self.end = PayloadEnd(newest, end)
        return dropped

    def _remove(self, segment: int) -> None:
        file = self._open.pop(segment, None)
        if file is not None:
            file.close()
        self._files.remove(segment)
        self._numbers.discard(segment)
        self.newest_steps.pop(segment, None)

    def sync(self) -> None:
        """Return once every record survives power loss."""
        self._open[self.end.segment].sync()


def _other_format(name: str, magic: bytes) -> str:
    return (
        f"{name} starts with {magic!r}, expected {MAGIC!r}: not a payload file of this version; "
        "move it away, or choose another run.dir"
    )


def _runs(slots: Sequence[PayloadSlot]) -> list[list[PayloadSlot]]:
    """Split into runs of slots that lie one behind the other."""
    runs: list[list[PayloadSlot]] = []
    for slot in slots:
        if runs and (runs[-1][-1].segment, runs[-1][-1].end) == (slot.segment, slot.offset):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _is_intact(data: memoryview, slot: PayloadSlot) -> bool:
    header, body = data[: _HEADER.size], data[_HEADER.size :]
    expected = _HEADER.pack(slot.num_bytes - _HEADER.size, slot.checksum)
    return header == expected and len(data) == slot.num_bytes and zlib.crc32(body) == slot.checksum
