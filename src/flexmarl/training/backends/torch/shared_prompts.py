"""Runs a prompt once for all turns that have it: a query's trajectories share theirs.

All tokens of a prompt but the last go through the model once per distinct prompt; what they leave in the attention
cache is handed to each turn, and gradients flow back through it. Right for any model whose layers see earlier tokens
through that cache only; `can_share_prompts` tries it.

Axes: U distinct prompts, B turns, L tokens of a prompt without its last, T positions after them, H hidden size.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from flexmarl.core.records import TurnRow

logger = logging.getLogger(__name__)

MIN_SAVED_TOKENS = 256
"""Share when it saves at least as many tokens: about what the additional forward and the copies cost."""
TOLERANCE = 1e-4


def sharing_classes(turns: Sequence[TurnRow]) -> tuple[list[list[TurnRow]], list[TurnRow]]:
    """Return lists of turns with prompts of one length whose sharing pays, and the turns that are left."""
    by_length: dict[int, list[TurnRow]] = {}
    for turn in turns:
        by_length.setdefault(len(turn.prompt_tokens), []).append(turn)
    shared = []
    left = []
    for length, members in sorted(by_length.items()):
        num_distinct = len({turn.prompt_tokens for turn in members})
        if (len(members) - num_distinct) * (length - 1) >= MIN_SAVED_TOKENS:
            shared.append(members)
        else:
            left.extend(members)
    return shared, left


def hidden_after_prompts(model: Any, prompts_UL: Tensor, prompt_of_B: Tensor, input_ids_BT: Tensor) -> Tensor:
    """Return the last hidden state of `input_ids_BT` after the prompts, [B, T, H]."""
    cache = DynamicCache()
    model.base_model(input_ids=prompts_UL, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(prompt_of_B)
    hidden_BTH: Tensor = model.base_model(
        input_ids=input_ids_BT, past_key_values=cache, use_cache=True
    ).last_hidden_state
    return hidden_BTH


def can_share_prompts(model: Any) -> bool:
    """Return whether this model gives the same hidden states when a prompt runs once for several samples."""
    num_tokens = len(model.get_output_embeddings().weight)
    ids = torch.arange(8).remainder(num_tokens).view(2, 4)
    with torch.no_grad():
        try:
            whole = model.base_model(input_ids=torch.cat([ids[:1].expand(2, -1), ids], dim=1), use_cache=False)
            split = hidden_after_prompts(model, ids[:1], torch.zeros(2, dtype=torch.long), ids)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            logger.info("%s cannot share prompts: %s", type(model).__name__, error)
            return False
    expected = whole.last_hidden_state[:, 4:]
    return bool((split - expected).abs().max() <= TOLERANCE * (1.0 + expected.abs().max()))
