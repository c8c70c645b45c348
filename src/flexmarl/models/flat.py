"""All parameters of a model in one contiguous buffer, so that publishing and loading weights is one copy.

Invariants (tests name them): every tensor starts at a multiple of 64 bytes; tied tensors lie there once and stay tied;
the order is that of the names, so any two processes give the same layout and digest for equal weights.
"""

from typing import TYPE_CHECKING

from flexmarl.core.errors import BackendError
from flexmarl.core.layout import ALIGNMENT_BYTES, Layout, PackedObject
from flexmarl.objects import as_flat_tensor, copy_into, tensor_layout, unpack

if TYPE_CHECKING:
    from torch import Tensor, nn


class FlatParameters:
    """Owns the memory of a model's parameters and persistent buffers."""

    def __init__(self, model: "nn.Module", *, buffer: "Tensor | None" = None) -> None:
        """Move the parameters of `model` into one buffer: a new one, or the start of `buffer` (an arena).

        `buffer` is one-dimensional, uint8, contiguous and begins at a multiple of 64 bytes; what it held is
        overwritten. The parameters stay the same objects, so an optimizer may have been built before; their old memory
        is let go.

        Raises:
            BackendError: `buffer` is too small or does not fit these rules.
        """
        aliases = _distinct_tensors(model)
        self._tensors = {name: tensors[0] for name, tensors in sorted(aliases.items())}
        self._layout = tensor_layout(self._tensors)
        self._buffer = _aligned_empty(self._layout.num_bytes) if buffer is None else _checked(buffer, self._layout)
        copy_into(self._buffer, self._layout, self._tensors)
        for name, view in unpack(self._layout, self._buffer).items():
            for tensor in aliases[name]:
                tensor.data = view

    @property
    def layout(self) -> Layout:
        """Where each tensor lies."""
        return self._layout

    @property
    def buffer(self) -> "Tensor":
        """The memory of all parameters, uint8, `layout.num_bytes` long. Writing to it changes the model."""
        return self._buffer

    @property
    def tensors(self) -> "dict[str, Tensor]":
        """The model's own parameters and persistent buffers, tied ones once, in layout order."""
        return dict(self._tensors)

    def packed(self) -> PackedObject:
        """Return the weights without a copy: read-only here, but it changes when the model does."""
        return PackedObject(layout=self._layout, buffer=memoryview(self._buffer.numpy().data).toreadonly())

    def copy_from(self, packed: PackedObject) -> None:
        """Take over the weights in `packed`, in one copy.

        Raises:
            BackendError: names, types or shapes differ; the message gives the first difference.
        """
        _check_same(packed.layout, self._layout)
        self._buffer.copy_(as_flat_tensor(packed.buffer))

    def digest(self) -> str:
        """Return the digest of the weights that the model holds now; equal to that of their object."""
        return self.packed().digest()


def _distinct_tensors(model: "nn.Module") -> "dict[str, list[Tensor]]":
    """Return the tensors of the state by their first name; those that share memory (tied) are listed under one."""
    first_name: dict[object, str] = {}
    distinct: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)
        distinct.setdefault(first_name.setdefault(place, name), []).append(tensor)
    return distinct


def _aligned_empty(num_bytes: int) -> "Tensor":
    import torch

    # Torch aligns its own memory to 64 bytes on Linux, and to less elsewhere.
    room = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT_BYTES
    return room[start : start + num_bytes]


def _checked(buffer: "Tensor", layout: Layout) -> "Tensor":
    import torch

    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise BackendError(
            f"the buffer is {buffer.dtype} of shape {tuple(buffer.shape)}; expected one contiguous row of uint8"
        )
    if buffer.data_ptr() % ALIGNMENT_BYTES:
        raise BackendError(f"the buffer begins at {buffer.data_ptr():#x}, which is no multiple of {ALIGNMENT_BYTES}")
    if len(buffer) < layout.num_bytes:
        raise BackendError(f"the buffer has {len(buffer)} bytes; the parameters need {layout.num_bytes}")
    return buffer[: layout.num_bytes]


def _check_same(got: Layout, expected: Layout) -> None:
    for new, own in zip(got.entries, expected.entries, strict=False):
        if new != own:
            raise BackendError(
                f"the weights do not fit the model: got {new.name} {new.dtype} {list(new.shape)}, "
                f"expected {own.name} {own.dtype} {list(own.shape)}"
            )
    if len(got.entries) != len(expected.entries):
        longer, what = (got, "unknown") if len(got.entries) > len(expected.entries) else (expected, "missing")
        first = longer.entries[min(len(got.entries), len(expected.entries))]
        raise BackendError(
            f"the weights do not fit the model: {len(got.entries)} tensors, expected {len(expected.entries)}; "
            f"{first.name} is {what}"
        )
