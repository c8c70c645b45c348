"""Forward passes over a slot cache: what an engine needs of a model.

Axes: N different prompts, P the longest, S live slots, L columns attended to, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexmarl.core.errors import ConfigError
from flexmarl.rollout.backends.kv_cache import DecodeView, PrefillView, SlotCache


class Forward(Protocol):
    """A causal language model over a SlotCache."""

    def prefill(self, prompts: Sequence[Sequence[int]], first_slot: int) -> Tensor:
        """Store prompts in the slots from `first_slot` and return the logits after each, [len(prompts), V]."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """Append one token to each of the first slots and return the logits after it, [S, V].

        `positions` are those of the tokens; the largest is `num_columns - 1`.
        """
        ...

    def refresh(self) -> None:
        """The model's parameters have changed."""
        ...


class HuggingFaceForward:
    """Any Hugging Face causal model with full attention, through its own `forward`."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        """Use `model`, whose parameters may change between calls.

        Raises:
            ConfigError: a layer of the model does not attend to everything before it.
        """
        check_full_attention(model.config)
        self._model = model
        self._cache = cache

    def prefill(self, prompts: Sequence[Sequence[int]], first_slot: int) -> Tensor:
        """See Forward. Prompts are padded at the left, so that all end in the last column of the pass."""
        batch = padded_prompts(prompts, self._cache.keys.device)
        columns_P = torch.arange(batch.tokens_NP.shape[1], device=batch.tokens_NP.device)
        is_seen_NPP = (columns_P <= columns_P[:, None]) & batch.is_token_NP[:, None]
        # Padding sees itself: a row of softmax without any column would be NaN and spread.
        is_seen_NPP |= columns_P == columns_P[:, None]
        output = self._model(
            input_ids=batch.tokens_NP,
            attention_mask=additive_mask(is_seen_NPP[:, None], self._cache.keys.dtype),
            position_ids=(batch.is_token_NP.cumsum(dim=1) - 1).clamp_(min=0),
            past_key_values=PrefillView(self._cache, batch.is_token_NP, batch.row_of_prompt, first_slot),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits[batch.row_of_prompt]

    def decode(self, tokens: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """See Forward."""
        is_seen_SL = torch.arange(num_columns, device=positions.device) <= positions[:, None]
        output = self._model(
            input_ids=tokens[:, None],
            # A mask of four axes is taken as it is, which skips the building of one.
            attention_mask=additive_mask(is_seen_SL[:, None, None], self._cache.keys.dtype),
            position_ids=positions[:, None],
            past_key_values=DecodeView(self._cache, positions, num_columns),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def refresh(self) -> None:
        """Nothing is derived from the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedPrompts:
    """Prompts as one matrix, equal ones once."""

    tokens_NP: Tensor
    is_token_NP: Tensor
    """False on the padding, which is at the left."""
    row_of_prompt: Tensor


def padded_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> PaddedPrompts:
    """Return the different prompts, padded at the left with token 0.

    The trajectories of one query begin with the same prompt, so equal prompts are common.
    """
    rows: dict[tuple[int, ...], int] = {}
    row_of_prompt = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts]
    longest = max(map(len, rows))
    lengths = torch.tensor([[len(prompt)] for prompt in rows])
    return PaddedPrompts(
        tokens_NP=torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in rows], device=device),
        is_token_NP=(torch.arange(longest) >= longest - lengths).to(device),
        row_of_prompt=torch.tensor(row_of_prompt, device=device),
    )


def additive_mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `is_seen` and -inf elsewhere."""
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, -torch.inf)


def check_full_attention(config: Any) -> None:
    """Raise ConfigError when a layer attends to a window, or is not attention at all."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention"} or (window is not None and not kinds):
        raise ConfigError(
            f"model type {config.model_type} has layers {sorted(kinds) or ['sliding_attention']} "
            f"(sliding_window={window}); the embedded engine serves models with full attention only: use another model"
        )
