"""Inputs of a forward pass and the cache behind them, by hand."""

import pytest
import torch

from flexmarl.rollout.backends.kv_cache import CAPACITY_STEP, DecodeView, SlotCache
from flexmarl.rollout.backends.passes import decode_pass, prefill_pass

pytestmark = pytest.mark.unit

MASKED = -torch.inf


def new_cache() -> SlotCache:
    cache = SlotCache(
        num_layers=1, num_slots=4, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.reserve(3)
    return cache


def column_of(cache: SlotCache, slot: int, count: int) -> list[float]:
    assert torch.equal(cache.values, -cache.keys)
    # [layer, block, slot, head, column, head size]
    values: list[float] = cache.keys[0, :, slot, 0, :, 0].flatten()[:count].tolist()
    return values


def test_prefill_pads_at_the_left_and_stores_equal_prompts_once_per_slot() -> None:
    cache = new_cache()
    inputs, rows = prefill_pass(cache, [[5], [7, 8], [5]], 1)
    assert rows.tolist() == [0, 1, 0]
    assert inputs.tokens_NT.tolist() == [[0, 5], [7, 8]]
    assert inputs.positions_NT.tolist() == [[0, 0], [0, 1]]
    # Padding sees itself alone; no token sees padding, or what comes later.
    assert inputs.mask_N1TL[:, 0].tolist() == [[[0.0, MASKED], [MASKED, 0.0]], [[0.0, MASKED], [0.0, 0.0]]]
    new = torch.tensor([[90.0, 50.0], [70.0, 80.0]]).view(2, 1, 2, 1)
    assert inputs.cache.update(new, -new, 0)[0] is new
    assert [column_of(cache, slot, 2) for slot in range(4)] == [[0, 0], [50, 0], [70, 80], [50, 0]]


def test_decode_appends_at_each_position_and_sees_what_is_before() -> None:
    cache = new_cache()
    inputs = decode_pass(cache, torch.tensor([5, 6]), torch.tensor([2, 0]), 3)
    assert inputs.tokens_NT.tolist() == [[5], [6]]
    assert inputs.positions_NT.tolist() == [[2], [0]]
    assert inputs.mask_N1TL[:, 0, 0].tolist() == [[0.0, 0.0, 0.0], [0.0, MASKED, MASKED]]
    new = torch.tensor([50.0, 60.0]).view(2, 1, 1, 1)
    keys, values = inputs.cache.update(new, -new, 0)
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 50], [60, 0, 0]]
    assert values[:, 0, :, 0].tolist() == [[0, 0, -50], [-60, 0, 0]]
    assert inputs.cache.get_seq_length() == 2


def test_the_cache_keeps_its_content_when_it_grows_moves_and_clears() -> None:
    cache = new_cache()
    assert cache.capacity == CAPACITY_STEP
    inputs, _ = prefill_pass(cache, [[1, 2, 3], [4, 5, 6]], 0)
    new = torch.arange(1.0, 7.0).view(2, 1, 3, 1)
    inputs.cache.update(new, -new, 0)
    cache.reserve(CAPACITY_STEP)
    assert cache.capacity == CAPACITY_STEP
    cache.reserve(CAPACITY_STEP + 1)
    assert cache.capacity == 2 * CAPACITY_STEP
    cache.move(1, 0, 2)
    cache.clear(1)
    assert [column_of(cache, slot, 3) for slot in range(2)] == [[4, 5, 3], [0, 0, 0]]


def test_blocks_hold_a_sequence_one_after_the_other() -> None:
    cache = SlotCache(
        num_layers=1,
        num_slots=3,
        num_heads=2,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_tokens=2,
    )
    cache.reserve(3)
    assert (cache.capacity, cache.block_tokens) == (4, 2)
    inputs, _ = prefill_pass(cache, [[1, 2, 3], [4]], 0)
    prompts = torch.tensor([[[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]], [[0.0, 0.0, 4.0], [0.0, 0.0, 14.0]]])[..., None]
    inputs.cache.update(prompts, -prompts, 0)
    cache.reserve(5)
    assert cache.capacity == 6
    view = decode_pass(cache, torch.tensor([0, 0]), torch.tensor([3, 1]), 4).cache
    assert isinstance(view, DecodeView)
    new = torch.tensor([[5.0, 15.0], [6.0, 16.0]])[..., None]
    view.store(new, -new, 0)
    blocks = view.blocks(0)
    # Rows: (slot 0, head 0), (slot 0, head 1), (slot 1, head 0), (slot 1, head 1).
    assert [keys[..., 0].tolist() for keys, _ in blocks] == [
        [[1, 2], [11, 12], [4, 6], [14, 16]],
        [[3, 5], [13, 15], [0, 0], [0, 0]],
    ]
    assert all(torch.equal(values, -keys) for keys, values in blocks)
    cache.move(0, 1, 4)
    cache.clear(0)
    assert [column_of(cache, slot, 6) for slot in range(2)] == [[0] * 6, [1, 2, 3, 5, 0, 0]]
