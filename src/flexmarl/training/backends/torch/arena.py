"""A policy's training state, and its gradient cache, each in one contiguous buffer.

Invariants:
    Every section (parameters, both moments, gradient) lies as the parameters do, so the optimizer and the object plane
    each see one flat tensor, and a tensor of a section starts at a multiple of 64 bytes.
    The bytes between tensors are zero and stay so: their gradient is zero, so their update is zero.

Elements of a section are counted E, padding included.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexmarl.core.errors import BackendError
from flexmarl.core.layout import ALIGNMENT_BYTES, Layout, PackedObject, TensorEntry
from flexmarl.objects import as_flat_tensor, unpack

PARAMETERS, EXP_AVG, EXP_AVG_SQ, STEP = "parameters", "exp_avg", "exp_avg_sq", "step"
GRADIENT, NUM_SAMPLES, NUM_TOKENS = "gradient", "num_samples", "num_tokens"


class Arena:
    """Named tensors in one zeroed buffer that moves in one copy."""

    def __init__(self, layout: Layout) -> None:
        """Allocate the buffer; torch aligns it to 64 bytes."""
        self.layout = layout
        self.buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)

    def section(self, start_bytes: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a flat view of a part of the buffer."""
        return self.buffer[start_bytes : start_bytes + num_bytes].view(dtype)

    def tensor(self, name: str) -> Tensor:
        """Return a view of one tensor."""
        return self.tensors()[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return views of all tensors by name."""
        return unpack(self.layout, self.buffer)

    def packed(self) -> PackedObject:
        """Return the buffer itself, not a copy, as an object that can be published."""
        return PackedObject(layout=self.layout, buffer=self.buffer.numpy().data)

    def copy_from(self, packed: PackedObject) -> None:
        """Take the content of another buffer of the same layout, in one copy.

        Raises:
            BackendError: a name, type or shape differs.
        """
        if packed.layout != self.layout:
            raise BackendError(f"the object does not fit this policy: {_difference(packed.layout, self.layout)}")
        self.buffer.copy_(as_flat_tensor(packed.buffer))


def state_layout(weights: Layout, dtype: torch.dtype) -> Layout:
    """Return the layout of a full training state: parameters, both moments of AdamW, and its step."""
    sections = [(PARAMETERS, weights), (EXP_AVG, weights), (EXP_AVG_SQ, weights)]
    return _stack(sections, [_scalar(STEP, torch.float32)], dtype)


def cache_layout(weights: Layout, dtype: torch.dtype) -> Layout:
    """Return the layout of a gradient cache in `dtype` with its denominators."""
    return _stack([(GRADIENT, weights)], [_scalar(NUM_SAMPLES, torch.int64), _scalar(NUM_TOKENS, torch.int64)], dtype)


def _stack(sections: Sequence[tuple[str, Layout]], scalars: Sequence[TensorEntry], dtype: torch.dtype) -> Layout:
    """Return layouts one after the other with their names prefixed, in another type, and scalars behind them."""
    entries: list[TensorEntry] = []
    end = 0
    for prefix, layout in sections:
        for entry in layout.entries:
            # Offsets grow with the item size, so all sections have the same elements, padding included.
            size = dtype.itemsize // getattr(torch, entry.dtype).itemsize
            entries.append(
                replace(
                    entry,
                    name=f"{prefix}/{entry.name}",
                    dtype=str(dtype).removeprefix("torch."),
                    offset_bytes=end + entry.offset_bytes * size,
                    num_bytes=entry.num_bytes * size,
                )
            )
        end += layout.num_bytes * size
    for scalar in scalars:
        entries.append(replace(scalar, offset_bytes=end))
        end += ALIGNMENT_BYTES
    return Layout(entries=tuple(entries), num_bytes=end)


def _scalar(name: str, dtype: torch.dtype) -> TensorEntry:
    text = str(dtype).removeprefix("torch.")
    return TensorEntry(name=name, dtype=text, shape=(), offset_bytes=0, num_bytes=dtype.itemsize)


def _difference(found: Layout, expected: Layout) -> str:
    if differing := sorted(
        name
        for name in found.by_name.keys() | expected.by_name
        if found.by_name.get(name) != expected.by_name.get(name)
    ):
        name = differing[0]
        return f"{name} is {found.by_name.get(name)}, expected {expected.by_name.get(name)}"
    return f"{found.num_bytes} bytes, expected {expected.num_bytes}"
