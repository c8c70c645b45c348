"""Turns through a model: which run together, as which tensors, and the log-probs of their response tokens.

Axes: B turns of one forward, T positions (padded to the longest), N response tokens of all B turns, H hidden size,
U distinct prompts, L tokens of a shared prompt without its last.

Padding is on the right and attention is causal, so no real position sees it and no mask is needed. The last response
token is not an input: nothing follows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexmarl.algorithms.losses import projected_logprobs
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import SampleKey
from flexmarl.core.records import TokenValues, TurnRow
from flexmarl.training.backends.torch.length_batches import cut_by_length
from flexmarl.training.backends.torch.shared_prompts import hidden_after_prompts, sharing_classes

FORWARD_OVERHEAD_TOKENS = 128
"""A forward and backward costs about as much, beside its tokens, as so many tokens of a small model."""
MAX_FORWARD_TOKENS = 2048
"""Padded tokens of one forward: bounds the memory of its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Turns that go through the model together."""

    turns: list[TurnRow]
    shares_prompts: bool
    """Their prompts have one length, and each distinct one runs once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTensors:
    """Turns as tensors. With shared prompts the T positions begin at the last token of the prompt."""

    input_ids_BT: Tensor
    prompts_UL: Tensor | None
    """Distinct prompts without their last token; None when every row of `input_ids_BT` holds its prompt."""
    prompt_of_B: Tensor | None
    positions_N: Tensor
    """Into [B x T]: the position before each response token."""
    targets_N: Tensor
    temperatures_N: Tensor

    @property
    def num_positions(self) -> int:
        """Positions that go through the model, padding included."""
        return self.input_ids_BT.numel() + (0 if self.prompts_UL is None else self.prompts_UL.numel())


def input_length(turn: TurnRow) -> int:
    """Return the number of positions that a turn takes in a forward."""
    return len(turn.prompt_tokens) + len(turn.response_tokens) - 1


def plan_forwards(turns: Sequence[TurnRow], *, can_share: bool) -> list[ForwardBatch]:
    """Return the turns in batches of similar length. The batches do not depend on the order of `turns`."""
    ordered = sorted(turns, key=lambda turn: turn.key)
    shared, left = sharing_classes(ordered) if can_share else ([], ordered)
    batches = [
        ForwardBatch(turns=batch, shares_prompts=True)
        for members in shared
        for batch in _cut(members, [len(turn.response_tokens) for turn in members])
    ]
    whole = _cut(left, [input_length(turn) for turn in left])
    return batches + [ForwardBatch(turns=batch, shares_prompts=False) for batch in whole]


def lone_forwards(turns: Sequence[TurnRow]) -> list[ForwardBatch]:
    """Return each turn as a batch of its own, in their order: no number then depends on any other turn."""
    return [ForwardBatch(turns=[turn], shares_prompts=False) for turn in turns]


def _cut(turns: Sequence[TurnRow], lengths: Sequence[int]) -> list[list[TurnRow]]:
    cut = cut_by_length(lengths, overhead_tokens=FORWARD_OVERHEAD_TOKENS, max_tokens=MAX_FORWARD_TOKENS)
    return [[turns[index] for index in batch] for batch in cut]


def to_tensors(forward: ForwardBatch, dtype: torch.dtype) -> TurnTensors:
    """Return the turns of a forward as tensors, numbers in `dtype`."""
    num_shared = len(forward.turns[0].prompt_tokens) - 1 if forward.shares_prompts else 0
    width = max(input_length(turn) for turn in forward.turns) - num_shared
    prompts: dict[tuple[int, ...], int] = {}
    rows: list[list[int]] = []
    positions: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    for row, turn in enumerate(forward.turns):
        _check(turn)
        own_prompt = turn.prompt_tokens[num_shared:]
        prompts.setdefault(turn.prompt_tokens[:num_shared], len(prompts))
        padding = width - len(own_prompt) - len(turn.response_tokens) + 1
        rows.append([*own_prompt, *turn.response_tokens[:-1], *[0] * padding])
        first = row * width + len(own_prompt) - 1
        positions.extend(range(first, first + len(turn.response_tokens)))
        targets.extend(turn.response_tokens)
        temperatures.extend([turn.temperature] * len(turn.response_tokens))
    places = [prompts[turn.prompt_tokens[:num_shared]] for turn in forward.turns]
    return TurnTensors(
        input_ids_BT=torch.tensor(rows),
        prompts_UL=torch.tensor(list(prompts)) if forward.shares_prompts else None,
        prompt_of_B=torch.tensor(places) if forward.shares_prompts else None,
        positions_N=torch.tensor(positions),
        targets_N=torch.tensor(targets),
        temperatures_N=torch.tensor(temperatures, dtype=dtype),
    )


def hidden_before_responses(model: Any, tensors: TurnTensors) -> Tensor:
    """Return the last hidden state at the position before each response token, [N, H]."""
    if tensors.prompts_UL is None or tensors.prompt_of_B is None:
        hidden_BTH = model.base_model(input_ids=tensors.input_ids_BT, use_cache=False).last_hidden_state
    else:
        hidden_BTH = hidden_after_prompts(model, tensors.prompts_UL, tensors.prompt_of_B, tensors.input_ids_BT)
    hidden_NH: Tensor = hidden_BTH.flatten(0, 1).index_select(0, tensors.positions_N)
    return hidden_NH


def check_finite(logprobs_N: Tensor, forward: ForwardBatch) -> None:
    """Check log-probs of a forward.

    Raises:
        BackendError: one is not finite.
    """
    total = logprobs_N.sum(dtype=torch.float64).item()
    if not math.isfinite(total):
        keys = [str(turn.key) for turn in forward.turns]
        raise BackendError(f"log-probs are not finite ({total}); the weights may have diverged. Samples: {keys}")


def score_turns(model: Any, forwards: Sequence[ForwardBatch]) -> dict[SampleKey, TokenValues]:
    """Return the log-probs of the response tokens of every turn under `model`, as training computes them.

    Raises:
        BackendError: a log-prob is not finite.
    """
    head = model.get_output_embeddings().weight
    values: dict[SampleKey, TokenValues] = {}
    for forward in forwards:
        tensors = to_tensors(forward, head.dtype)
        with torch.no_grad():
            hidden_NH = hidden_before_responses(model, tensors)
        logprobs_N = projected_logprobs(hidden_NH, head, tensors.targets_N, tensors.temperatures_N)
        check_finite(logprobs_N, forward)
        numbers = logprobs_N.tolist()
        ends = list(accumulate(len(turn.response_tokens) for turn in forward.turns))
        for turn, start, end in zip(forward.turns, [0, *ends], ends, strict=False):
            values[turn.key] = TokenValues(key=turn.key, values=tuple(numbers[start:end]))
    return values


def check_projection(model: Any) -> None:
    """Check that the logits of the model are those that training forms: last hidden state times the output layer.

    Raises:
        BackendError: the architecture does more (a bias, a cap, a scale), so its log-probs would be wrong.
    """
    head = model.get_output_embeddings()
    ids = torch.arange(4).remainder(len(head.weight))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        formed = model.base_model(input_ids=ids, use_cache=False).last_hidden_state @ head.weight.T
    gap = (logits - formed).abs().max().item()
    if not gap <= 1e-4 * (1.0 + logits.abs().max().item()):
        raise BackendError(
            f"{type(model).__name__} changes its logits after the output layer (by up to {gap:g}); "
            "the torch backend trains models whose logits are hidden state times output weight"
        )


def _check(turn: TurnRow) -> None:
    if not turn.prompt_tokens or not turn.response_tokens:
        raise InvariantError(f"{turn.key}: a sample needs prompt and response tokens")
    if turn.temperature <= 0:
        raise InvariantError(f"{turn.key}: temperature {turn.temperature} does not train; greedy turns are not samples")
    if len(turn.logprobs) != len(turn.response_tokens):
        raise InvariantError(f"{turn.key}: {len(turn.logprobs)} log-probs for {len(turn.response_tokens)} tokens")
