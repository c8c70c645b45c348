"""Packed buffers as torch tensors and back. Torch is imported when a function is called."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexmarl.core.layout import ALIGNMENT_BYTES, Layout, PackedObject, plan_layout

if TYPE_CHECKING:
    from torch import Tensor


def as_flat_tensor(buffer: memoryview) -> "Tensor":
    """Return the bytes of `buffer` as a one-dimensional uint8 tensor over the same memory, which it keeps alive.

    Over a read-only map, writing to the tensor ends the process with a segmentation fault.
    """
    import torch

    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Torch has no read-only tensors and warns; that readers must not write is the contract of the object plane.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)


def unpack(layout: Layout, flat: "Tensor") -> "dict[str, Tensor]":
    """Return the tensors of `layout` as views of `flat`, a uint8 tensor on any device, in layout order."""
    import torch

    views = {}
    for entry in layout.entries:
        part = flat[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
        views[entry.name] = part.view(getattr(torch, entry.dtype)).view(entry.shape)
    return views


def tensor_layout(tensors: "Mapping[str, Tensor]") -> Layout:
    """Return the layout of `tensors` packed in name order."""
    return plan_layout(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in sorted(tensors.items())
    )


def copy_into(flat: "Tensor", layout: Layout, tensors: "Mapping[str, Tensor]") -> None:
    """Copy each tensor to its place in `flat`, from any device, and put zeros between them."""
    for name, view in unpack(layout, flat).items():
        view.copy_(tensors[name].detach())
    for entry in layout.entries:
        end = entry.offset_bytes + entry.num_bytes
        flat[end : end + -end % ALIGNMENT_BYTES].zero_()


def unpack_object(packed: PackedObject, *, device: str = "cpu") -> "dict[str, Tensor]":
    """Return the tensors of a packed object on `device`; on `cpu` over the same memory, else in one transfer."""
    return unpack(packed.layout, as_flat_tensor(packed.buffer).to(device))
