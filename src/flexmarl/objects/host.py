"""The host tier of the object plane: objects are mapped files in a folder that belongs to the run.

An object is one file: a header, the packed bytes from DATA_OFFSET on, and behind them the manifest (JSON). It appears
and disappears by one rename, so a reader sees all of an object or none of it (`segments.py`).
"""

import json
import os
import struct
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import Layout, PackedObject, packed_digest
from flexmarl.core.protocols import ObjectInfo, Tier
from flexmarl.objects.segments import Segment, SegmentFolder, map_readonly
from flexmarl.objects.tensors import as_flat_tensor, copy_into, tensor_layout, unpack_object

if TYPE_CHECKING:
    from torch import Tensor

DATA_OFFSET = 4096
"""Where the packed bytes begin: a page, so that each tensor keeps the alignment of its offset."""
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"FLEXOBJ1"
_NO_DIGEST = "0" * 64
_WIDEST_VERSION = 10**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an object's file says of itself."""

    key: ObjectKey
    layout: Layout
    digest: str

    @property
    def info(self) -> ObjectInfo:
        """The same without the layout."""
        return ObjectInfo(key=self.key, num_bytes=self.layout.num_bytes, digest=self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSet:
    """A `set` that was done when the call returned."""

    info: ObjectInfo

    def result(self, timeout_s: float) -> ObjectInfo:
        """Return what was stored; `timeout_s` is not needed."""
        return self.info


class HostObjectPlane:
    """Objects in shared memory. Each process of a run builds its own over the same folder; threads may share one."""

    def __init__(self, folder: Path) -> None:
        """Use the folder that `create_run_folder` has made.

        Raises:
            StoreError: it does not exist, or cannot be written.
        """
        self._segments = SegmentFolder(folder)

    def set(
        self, key: ObjectKey, tensors: "Mapping[str, Tensor] | PackedObject", *, tier: Tier = Tier.HOST
    ) -> CompletedSet:
        """Store `tensors`, a mapping in name order; a PackedObject moves in one copy. See `ObjectPlane.set`."""
        if tier is not Tier.HOST:
            raise StoreError(f"{key}: this object plane has no {tier.value} tier; use tier=Tier.HOST")
        if isinstance(tensors, PackedObject):
            packed = tensors
            if len(packed.buffer) != packed.layout.num_bytes:
                raise StoreError(f"{key}: {len(packed.buffer)} bytes for a layout of {packed.layout.num_bytes}")
            return self._store(key, packed.layout, lambda view: _copy_bytes(view, packed.buffer))
        mapping = tensors
        layout = tensor_layout(mapping)
        return self._store(key, layout, lambda view: copy_into(as_flat_tensor(view), layout, mapping))

    def get(self, key: ObjectKey, *, device: str = "cpu") -> "Mapping[str, Tensor]":
        """Return the tensors, on `cpu` without a copy. See `ObjectPlane.get`."""
        return unpack_object(self.packed(key), device=device)

    def packed(self, key: ObjectKey) -> PackedObject:
        """Return the object as one read-only mapped buffer. See `ObjectPlane.packed`."""
        fd = self._segments.open(_file_name(key))
        if fd is None:
            raise StoreError(f"{key} is not on the object plane ({self._segments.object_path(_file_name(key))})")
        try:
            layout = self._read_manifest(fd, key).layout
            view = memoryview(map_readonly(fd))
        except OSError as error:
            raise StoreError(f"cannot map {key}: {error}") from error
        finally:
            os.close(fd)
        return PackedObject(layout=layout, buffer=view[DATA_OFFSET : DATA_OFFSET + layout.num_bytes])

    def info(self, key: ObjectKey) -> ObjectInfo | None:
        """Return key, size and digest of an object, or None. See `ObjectPlane.info`."""
        fd = self._segments.open(_file_name(key))
        if fd is None:
            return None
        try:
            return self._read_manifest(fd, key).info
        finally:
            os.close(fd)

    def delete(self, key: ObjectKey) -> None:
        """Forget an object; its segment is used again when its last reader has let go. See `ObjectPlane.delete`."""
        self._segments.retire(_file_name(key))

    def _store(self, key: ObjectKey, layout: Layout, fill: Callable[[memoryview], None]) -> CompletedSet:
        with self._segments.writing(_file_bytes(key, layout), what=str(key)) as segment:
            data = segment.view[DATA_OFFSET : DATA_OFFSET + layout.num_bytes]
            fill(data)
            manifest = Manifest(key=key, layout=layout, digest=packed_digest(layout, data))
            _write_manifest(segment, manifest)
            return self._publish(segment, manifest)

    def _publish(self, segment: Segment, manifest: Manifest) -> CompletedSet:
        name = _file_name(manifest.key)
        path = self._segments.object_path(name)
        with self._segments.locked(exclusive=True):
            if not path.exists():
                self._segments.publish(segment, name)
                return CompletedSet(info=manifest.info)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                existing = self._read_manifest(fd, manifest.key)
            finally:
                os.close(fd)
        if existing.digest != manifest.digest:
            raise StoreError(
                f"{manifest.key} exists with other content (digest {existing.digest[:12]}, the new one's is "
                f"{manifest.digest[:12]}); objects are immutable: delete it first, or use a new version"
            )
        return CompletedSet(info=existing.info)

    def _read_manifest(self, fd: int, key: ObjectKey) -> Manifest:
        path = self._segments.object_path(_file_name(key))
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise StoreError(f"{path} is damaged: it does not begin with the header of an object; delete the object")
        _, num_bytes, manifest_bytes = _HEADER.unpack(header)
        end, size = DATA_OFFSET + num_bytes + manifest_bytes, os.fstat(fd).st_size
        if size < end:
            raise StoreError(f"{path} is damaged: {size} bytes long, its header says {end}; delete the object")
        try:
            manifest = from_plain(Manifest, json.loads(os.pread(fd, manifest_bytes, DATA_OFFSET + num_bytes)))
        except (ConfigError, ValueError) as error:
            raise StoreError(f"{path} is damaged: its manifest cannot be read ({error}); delete the object") from error
        if manifest.key != key or manifest.layout.num_bytes != num_bytes:
            raise StoreError(f"{path} is damaged: it holds {manifest.info}, expected {key} of {num_bytes} bytes")
        return manifest


def _file_name(key: ObjectKey) -> str:
    """Return a file name that no other key has: `quote` leaves no comma in a part."""
    return ",".join(urllib.parse.quote(str(part), safe="") for part in (key.kind, key.owner, key.version))


def _file_bytes(key: ObjectKey, layout: Layout) -> int:
    """Return the length of an object's file: whole pages, the same for every version, so that segments fit again."""
    draft = Manifest(key=replace(key, version=_WIDEST_VERSION), layout=layout, digest=_NO_DIGEST)
    num_bytes = DATA_OFFSET + layout.num_bytes + len(_encode(draft))
    return -(-num_bytes // DATA_OFFSET) * DATA_OFFSET


def _copy_bytes(target: memoryview, source: memoryview) -> None:
    target[:] = source


def _encode(manifest: Manifest) -> bytes:
    return json.dumps(to_plain(manifest), separators=(",", ":")).encode()


def _write_manifest(segment: Segment, manifest: Manifest) -> None:
    encoded = _encode(manifest)
    start = DATA_OFFSET + manifest.layout.num_bytes
    segment.view[start : start + len(encoded)] = encoded
    segment.view[: _HEADER.size] = _HEADER.pack(_MAGIC, manifest.layout.num_bytes, len(encoded))
