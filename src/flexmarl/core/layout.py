"""How named tensors lie in one contiguous buffer.

Offsets are multiples of 64 bytes: views that are not 16-byte aligned change the bits of small matrix products. The
bytes between tensors are zero, so equal contents have equal digests.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor in a packed buffer."""

    name: str
    dtype: str
    """Name as torch spells it without the module: `float32`, `bfloat16`, `int64`, `uint8`."""
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The table of a packed buffer, in buffer order."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int
    """Length of the buffer, padding included."""

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """The entries by tensor name."""
        return {entry.name: entry for entry in self.entries}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedObject:
    """Tensors in one buffer. Readers of the object plane get it read-only and mapped, without a copy."""

    layout: Layout
    buffer: memoryview
    """Format `B`, `layout.num_bytes` long."""

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of one tensor."""
        entry = self.layout.by_name[name]
        return self.buffer[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]

    def digest(self) -> str:
        """Return the SHA-256 over the layout table and the buffer, in hex."""
        return packed_digest(self.layout, self.buffer)


def plan_layout(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Layout:
    """Return the layout of tensors given as (name, dtype, shape, num_bytes), in that order."""
    entries = []
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset_bytes=end, num_bytes=num_bytes))
        end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(entries=tuple(entries), num_bytes=end)


def packed_digest(layout: Layout, buffer: memoryview) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, in hex."""
    table = [[entry.name, entry.dtype, list(entry.shape), entry.offset_bytes] for entry in layout.entries]
    digest = hashlib.sha256(json.dumps(table, separators=(",", ":")).encode())
    digest.update(buffer)
    return digest.hexdigest()
