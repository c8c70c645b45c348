"""The inputs of one forward pass over a slot cache: the prompts of newcomers, or one token of every running sequence.

Axes: N rows of the pass, T tokens of a row, L columns attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmarl.rollout.backends.kv_cache import DecodeView, PrefillView, SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """What a model is given."""

    tokens_NT: Tensor
    positions_NT: Tensor
    mask_N1TL: Tensor
    """0 where a token sees a column and -inf elsewhere, in the dtype of the cache."""
    cache: PrefillView | DecodeView


def prefill_pass(cache: SlotCache, prompts: Sequence[Sequence[int]], first_slot: int) -> tuple[ForwardPass, Tensor]:
    """Return the pass that stores prompts in the slots from `first_slot`, and the row of each prompt.

    Prompts are padded at the left, so that all end in the last column. The trajectories of one query begin with the
    same prompt: equal prompts share a row.
    """
    device = cache.keys.device
    rows: dict[tuple[int, ...], int] = {}
    row_of_prompt = torch.tensor([rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts], device=device)
    longest = max(map(len, rows))
    padding_N1 = torch.tensor([[longest - len(prompt)] for prompt in rows], device=device)
    columns_T = torch.arange(longest, device=device)
    is_token_NT = columns_T >= padding_N1
    is_seen_NTT = (columns_T <= columns_T[:, None]) & is_token_NT[:, None]
    # Padding sees itself: a row of softmax without any column would be NaN and spread.
    is_seen_NTT |= columns_T == columns_T[:, None]
    inputs = ForwardPass(
        tokens_NT=torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in rows], device=device),
        positions_NT=(columns_T - padding_N1).clamp_(min=0),
        mask_N1TL=_additive_mask(is_seen_NTT[:, None], cache.keys.dtype),
        cache=PrefillView(cache, is_token_NT, row_of_prompt, first_slot),
    )
    return inputs, row_of_prompt


def decode_pass(cache: SlotCache, tokens: Tensor, positions: Tensor, num_columns: int) -> ForwardPass:
    """Return the pass that appends one token to each of the first slots.

    `positions` are those of the tokens; the largest is `num_columns - 1`.
    """
    is_seen_NL = torch.arange(num_columns, device=positions.device) <= positions[:, None]
    return ForwardPass(
        tokens_NT=tokens[:, None],
        positions_NT=positions[:, None],
        mask_N1TL=_additive_mask(is_seen_NL[:, None, None], cache.keys.dtype),
        cache=DecodeView(cache, positions, num_columns),
    )


def _additive_mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, -torch.inf)
