"""Keys and values of the running sequences, in slots.

Axes: S slots, H key-value heads, C capacity in tokens, D head size; N different prompts, P the longest.

Invariants:
    * Position p of a sequence lies in column p of its slot.
    * What lies behind a sequence's last column is finite: attention masks it, and 0 x NaN would be NaN.
"""

import torch
from torch import Tensor

CAPACITY_STEP = 64
"""Capacity grows to a multiple of this many tokens."""


class SlotCache:
    """One tensor each for keys and values, [layer, slot, key-value head, capacity, head size]; grows in capacity."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Lay out a cache without capacity."""
        shape = (num_layers, num_slots, num_heads, 0, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self.keys.shape[3]

    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of `num_tokens`; copies what is held when the capacity has to grow."""
        if num_tokens <= self.capacity:
            return
        capacity = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
        self.keys = _grown(self.keys, capacity)
        self.values = _grown(self.values, capacity)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` columns of one slot over another."""
        self.keys[:, target, :, :num_tokens] = self.keys[:, source, :, :num_tokens]
        self.values[:, target, :, :num_tokens] = self.values[:, source, :, :num_tokens]

    def clear(self, slot: int) -> None:
        """Zero a slot: needed after a sequence that held numbers that are not finite."""
        self.keys[:, slot] = 0.0
        self.values[:, slot] = 0.0


def _grown(old: Tensor, capacity: int) -> Tensor:
    new = torch.zeros((*old.shape[:3], capacity, old.shape[4]), dtype=old.dtype, device=old.device)
    new[:, :, :, : old.shape[3]] = old
    return new


class PrefillView:
    """The cache as a forward pass over prompts sees it: stores each prompt in its slots, attends within the pass."""

    is_compileable = False

    def __init__(self, cache: SlotCache, is_token_NP: Tensor, row_of_slot: Tensor, first_slot: int) -> None:
        """Store row `row_of_slot[i]` of the pass in slot `first_slot + i`.

        `is_token_NP` is false on the padding at the left of the rows.
        """
        self._cache = cache
        places, self._pass_columns = is_token_NP[row_of_slot].nonzero(as_tuple=True)
        self._rows = row_of_slot[places]
        self._slots = places + first_slot
        self._columns = (is_token_NP.cumsum(dim=1) - 1)[self._rows, self._pass_columns]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store [N, H, P, D] and return it."""
        # Indexing with two tensors around a slice gives [tokens, H, D].
        for cached, new in ((self._cache.keys, keys), (self._cache.values, values)):
            cached[layer_idx][self._slots, :, self._columns] = new[self._rows, :, self._pass_columns]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the pass starts at the first position."""
        return 0


class DecodeView:
    """The cache as one decode step of the first slots sees it."""

    is_compileable = False

    def __init__(self, cache: SlotCache, columns: Tensor, num_columns: int) -> None:
        """Store the new token of slot s in `columns[s]`; attend over the first `num_columns` columns."""
        self._cache = cache
        self._num_live = len(columns)
        self._num_columns = num_columns
        num_heads = cache.keys.shape[2]
        slots = torch.arange(self._num_live, device=columns.device)
        heads = torch.arange(num_heads, device=columns.device)
        self._rows = ((slots[:, None] * num_heads + heads) * cache.capacity + columns[:, None]).flatten()

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store [live, H, 1, D] and return everything stored, [live, H, num_columns, D]."""
        return (
            self._store(self._cache.keys[layer_idx], keys),
            self._store(self._cache.values[layer_idx], values),
        )

    def _store(self, cached: Tensor, new: Tensor) -> Tensor:
        head_dim = cached.shape[3]
        cached.view(-1, head_dim).index_copy_(0, self._rows, new.reshape(-1, head_dim))
        return cached[: self._num_live, :, : self._num_columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns before this step of the longest sequence."""
        return self._num_columns - 1
