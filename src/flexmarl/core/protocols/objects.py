"""The seam of the object plane: immutable tensors by key."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject

if TYPE_CHECKING:
    from torch import Tensor


class Tier(StrEnum):
    """Where an object is kept."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What is known of a stored object."""

    key: ObjectKey
    num_bytes: int
    digest: str
    """`PackedObject.digest()` of the content."""


class PendingSet(Protocol):
    """A `set` that may still be copying."""

    def result(self, timeout_s: float) -> ObjectInfo:
        """Wait until the object is readable; raise StoreError on failure or time-out."""
        ...


class ObjectPlane(Protocol):
    """Immutable sets of named tensors by key, wherever they are. Usable from every process of a run."""

    def set(
        self, key: ObjectKey, tensors: "Mapping[str, Tensor] | PackedObject", *, tier: Tier = Tier.HOST
    ) -> PendingSet:
        """Store `tensors` in one buffer; the caller may change them once `result` has returned.

        What is already packed moves in one copy.

        Raises:
            StoreError: no room, or the key exists with other content. The same content again is a no-op.
        """
        ...

    def get(self, key: ObjectKey, *, device: str = "cpu") -> "Mapping[str, Tensor]":
        """Return the tensors. On `cpu` they are read-only maps of shared memory, valid while referenced.

        Raises:
            StoreError: the object does not exist, or is damaged.
        """
        ...

    def packed(self, key: ObjectKey) -> PackedObject:
        """Return the same as one read-only mapped buffer with its layout, without torch."""
        ...

    def info(self, key: ObjectKey) -> ObjectInfo | None:
        """Return what is known of an object, or None when there is none."""
        ...

    def delete(self, key: ObjectKey) -> None:
        """Forget an object; its memory is recycled when its last reader has let go. Unknown keys are ignored."""
        ...
