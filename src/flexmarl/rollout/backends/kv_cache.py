"""Keys and values of the running sequences, in slots.

Axes: S slots, H key-value heads, B blocks, C tokens of a block, D head size; N different prompts, P the longest.

Invariants:
    * Position p of a sequence lies in column p % C of block p // C of its slot.
    * What lies behind a sequence's last column is finite: attention masks it, and 0 x NaN would be NaN.
"""

import torch
from torch import Tensor

CAPACITY_STEP = 64
"""The capacity of a cache of one block grows to a multiple of this many tokens."""


class SlotCache:
    """One tensor each for keys and values, [layer, block, slot, key-value head, token of the block, head size].

    With blocks of a fixed size it grows by blocks, so that the columns in use lie close together: on CPU, attention
    over a few columns of a wide cache loses more time to address translation than to arithmetic. Without, there is
    one block that grows, and a sequence's columns are one view, as the models of transformers need it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int | None = None,
    ) -> None:
        """Lay out a cache without capacity; `block_tokens` None makes it one block that grows."""
        self._is_one_block = block_tokens is None
        num_blocks, width = (1, 0) if block_tokens is None else (0, block_tokens)
        shape = (num_layers, num_blocks, num_slots, num_heads, width, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        """Sequences that fit."""
        return self.keys.shape[2]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[4]

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self.keys.shape[1] * self.keys.shape[4]

    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of `num_tokens`; copies what is held when the capacity has to grow."""
        if num_tokens <= self.capacity:
            return
        axis, step = (4, CAPACITY_STEP) if self._is_one_block else (1, self.block_tokens)
        size = -(-num_tokens // step) * (step if self._is_one_block else 1)
        self.keys = _grown(self.keys, axis, size)
        self.values = _grown(self.values, axis, size)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of one slot over another."""
        blocks, columns = slice(-(-num_tokens // self.block_tokens)), slice(min(num_tokens, self.block_tokens))
        self.keys[:, blocks, target, :, columns] = self.keys[:, blocks, source, :, columns]
        self.values[:, blocks, target, :, columns] = self.values[:, blocks, source, :, columns]

    def clear(self, slot: int) -> None:
        """Zero a slot: needed after a sequence that held numbers that are not finite."""
        self.keys[:, :, slot] = 0.0
        self.values[:, :, slot] = 0.0


def _grown(old: Tensor, axis: int, size: int) -> Tensor:
    shape = list(old.shape)
    shape[axis] = size
    new = torch.zeros(shape, dtype=old.dtype, device=old.device)
    new.narrow(axis, 0, old.shape[axis]).copy_(old)
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
        positions = (is_token_NP.cumsum(dim=1) - 1)[self._rows, self._pass_columns]
        self._blocks = positions // cache.block_tokens
        self._columns = positions % cache.block_tokens

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store [N, H, P, D] and return it."""
        # Indexing with tensors around a slice gives [tokens, H, D].
        for cached, new in ((self._cache.keys, keys), (self._cache.values, values)):
            cached[layer_idx][self._blocks, self._slots, :, self._columns] = new[self._rows, :, self._pass_columns]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the pass starts at the first position."""
        return 0


class DecodeView:
    """The cache as one decode step of the first slots sees it."""

    is_compileable = False

    def __init__(self, cache: SlotCache, positions: Tensor, num_columns: int) -> None:
        """Store the new token of slot s at `positions[s]`; attend over the first `num_columns` positions."""
        self._cache = cache
        self._num_live = len(positions)
        self._num_columns = num_columns
        num_heads, width = cache.keys.shape[3], cache.block_tokens
        slots = torch.arange(self._num_live, device=positions.device)
        heads = torch.arange(num_heads, device=positions.device)
        rows = (positions // width * cache.num_slots + slots)[:, None] * num_heads + heads
        self._rows = (rows * width + (positions % width)[:, None]).flatten()

    def store(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """Store [live, H, D] each."""
        for cached, new in ((self._cache.keys[layer], keys), (self._cache.values[layer], values)):
            head_dim = cached.shape[-1]
            cached.view(-1, head_dim).index_copy_(0, self._rows, new.reshape(-1, head_dim))

    def blocks(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each block in use, [live x H, C, D] each, without a copy."""
        count = -(-self._num_columns // self._cache.block_tokens)
        keys, values = (
            cached[layer, :count, : self._num_live].flatten(1, 2) for cached in (self._cache.keys, self._cache.values)
        )
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store [live, H, 1, D] in a cache of one block and return everything stored, [live, H, num_columns, D]."""
        self.store(keys, values, layer_idx)
        live, columns = slice(self._num_live), slice(self._num_columns)
        return self._cache.keys[layer_idx, 0, live, :, columns], self._cache.values[layer_idx, 0, live, :, columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns before this step of the longest sequence."""
        return self._num_columns - 1
