"""An object plane in the memory of one process. Objects that are already packed need no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject
from flexmarl.core.protocols import ObjectInfo, Tier
from flexmarl.objects.tensors import as_flat_tensor, copy_into, tensor_layout, unpack_object

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneSet:
    """A `set` whose copy has been made."""

    info: ObjectInfo

    def result(self, timeout_s: float) -> ObjectInfo:
        """Return what is known of the object."""
        return self.info


class MemoryObjectPlane:
    """A dictionary of packed objects; both tiers are the same."""

    def __init__(self) -> None:
        """Start empty."""
        self._objects: dict[ObjectKey, tuple[PackedObject, ObjectInfo]] = {}

    def set(self, key: ObjectKey, tensors: "Mapping[str, Tensor] | PackedObject", *, tier: Tier = Tier.HOST) -> DoneSet:
        """Copy `tensors` under `key`.

        Raises:
            StoreError: the key exists with other content. The same content again is a no-op.
        """
        source = tensors if isinstance(tensors, PackedObject) else _pack(tensors)
        packed = PackedObject(layout=source.layout, buffer=memoryview(bytes(source.buffer)))
        info = ObjectInfo(key=key, num_bytes=packed.layout.num_bytes, digest=packed.digest())
        if (existing := self.info(key)) is not None and existing.digest != info.digest:
            raise StoreError(
                f"object {key} exists with other content (digest {existing.digest:.12}): use a new version"
            )
        self._objects.setdefault(key, (packed, info))
        return DoneSet(info=info)

    def get(self, key: ObjectKey, *, device: str = "cpu") -> "dict[str, Tensor]":
        """Return the tensors, read-only on `cpu`. Raises StoreError when there is no such object."""
        return unpack_object(self.packed(key), device=device)

    def packed(self, key: ObjectKey) -> PackedObject:
        """Return the object with its read-only buffer. Raises StoreError when there is no such object."""
        if key not in self._objects:
            raise StoreError(f"object {key} does not exist")
        return self._objects[key][0]

    def info(self, key: ObjectKey) -> ObjectInfo | None:
        """Return what is known of an object, or None."""
        return self._objects[key][1] if key in self._objects else None

    def delete(self, key: ObjectKey) -> None:
        """Forget an object; readers keep what they hold."""
        self._objects.pop(key, None)

    def clear(self) -> None:
        """Forget every object."""
        self._objects.clear()


def _pack(tensors: "Mapping[str, Tensor]") -> PackedObject:
    layout = tensor_layout(tensors)
    buffer = memoryview(bytearray(layout.num_bytes))
    copy_into(as_flat_tensor(buffer), layout, tensors)
    return PackedObject(layout=layout, buffer=buffer)
