"""Forward and backward of samples: adds unnormalised gradient sums to the `.grad` of a model.

Axes: B samples of one forward, T positions (padded to the longest), N response tokens of all B samples, H hidden size.

Padding is on the right and attention is causal, so no real position sees it and no mask is needed. The last response
token is not an input: nothing follows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmarl.algorithms import token_weight
from flexmarl.algorithms.losses import policy_gradient_loss, projected_loss
from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.records import Sample
from flexmarl.training.backends.torch.length_batches import cut_by_length
from flexmarl.training.backends.torch.shared_prompts import hidden_after_prompts, sharing_classes
from flexmarl.training.metrics import (
    COMPUTED_TOKENS_SUM,
    LOGPROB_GAP_MAX,
    LOGPROB_GAP_SUM,
    LOGPROB_SUM,
    REWARD_SUM,
)

FORWARD_OVERHEAD_TOKENS = 128
"""A forward and backward costs about as much, beside its tokens, as so many tokens of a small model."""
MAX_FORWARD_TOKENS = 2048
"""Padded tokens of one forward: bounds the memory of its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Samples as tensors. With shared prompts the T positions begin at the last token of the prompt."""

    input_ids_BT: Tensor
    prompts_UL: Tensor | None
    """Distinct prompts without their last token; None when every row of `input_ids_BT` holds its prompt."""
    prompt_of_B: Tensor | None
    positions_N: Tensor
    """Into [B x T]: the position before each response token."""
    targets_N: Tensor
    rollout_logprobs_N: Tensor
    temperatures_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


def input_length(sample: Sample) -> int:
    """Return the number of positions that a sample takes in a forward."""
    return len(sample.turn.prompt_tokens) + len(sample.turn.response_tokens) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Samples that go through the model together."""

    samples: list[Sample]
    shares_prompts: bool
    """Their prompts have one length, and each distinct one runs once."""


def plan_forwards(samples: Sequence[Sample], *, can_share: bool) -> list[ForwardBatch]:
    """Return the samples in batches of similar length. The batches do not depend on the order of `samples`."""
    ordered = sorted(samples, key=lambda sample: sample.turn.key)
    shared, left = sharing_classes(ordered) if can_share else ([], ordered)
    batches = [
        ForwardBatch(samples=batch, shares_prompts=True)
        for members in shared
        for batch in _cut(members, [len(sample.turn.response_tokens) for sample in members])
    ]
    whole = _cut(left, [input_length(sample) for sample in left])
    return batches + [ForwardBatch(samples=batch, shares_prompts=False) for batch in whole]


def _cut(samples: Sequence[Sample], lengths: Sequence[int]) -> list[list[Sample]]:
    cut = cut_by_length(lengths, overhead_tokens=FORWARD_OVERHEAD_TOKENS, max_tokens=MAX_FORWARD_TOKENS)
    return [[samples[index] for index in batch] for batch in cut]


def backward(model: Any, forward: ForwardBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Add the gradient sum of samples, run as one forward, to the `.grad` of the model; return metrics.

    Raises:
        BackendError: a log-prob is not finite; nothing was added.
    """
    dtype = model.get_output_embeddings().weight.dtype
    samples = forward.samples
    batch = _to_batch(forward, algorithm, dtype)
    if batch.prompts_UL is None or batch.prompt_of_B is None:
        hidden_BTH = model.base_model(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
    else:
        hidden_BTH = hidden_after_prompts(model, batch.prompts_UL, batch.prompt_of_B, batch.input_ids_BT)
    projected = projected_loss(
        hidden_BTH.flatten(0, 1).index_select(0, batch.positions_N),
        model.get_output_embeddings().weight,
        batch.targets_N,
        batch.temperatures_N,
        policy_gradient_loss(batch.advantages_N, batch.weights_N),
    )
    gaps_N = (projected.logprobs_N - batch.rollout_logprobs_N).abs()
    logprob_sum = projected.logprobs_N.sum(dtype=torch.float64).item()
    if not math.isfinite(logprob_sum):
        keys = [str(sample.turn.key) for sample in samples]
        raise BackendError(f"log-probs are not finite ({logprob_sum}); the weights may have diverged. Samples: {keys}")
    projected.loss.backward()  # type: ignore[no-untyped-call]
    return {
        LOGPROB_SUM: logprob_sum,
        LOGPROB_GAP_SUM: gaps_N.sum(dtype=torch.float64).item(),
        LOGPROB_GAP_MAX: gaps_N.max().item(),
        REWARD_SUM: math.fsum(sample.reward for sample in samples),
        COMPUTED_TOKENS_SUM: float(
            batch.input_ids_BT.numel() + (0 if batch.prompts_UL is None else batch.prompts_UL.numel())
        ),
    }


def check_projection(model: Any) -> None:
    """Check that the logits of the model are those that `backward` forms: last hidden state times the output layer.

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


def _to_batch(forward: ForwardBatch, algorithm: AlgorithmConfig, dtype: torch.dtype) -> _Batch:
    num_shared = len(forward.samples[0].turn.prompt_tokens) - 1 if forward.shares_prompts else 0
    width = max(input_length(sample) for sample in forward.samples) - num_shared
    prompts: dict[tuple[int, ...], int] = {}
    rows: list[list[int]] = []
    positions: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    columns: list[tuple[float, float, float]] = []
    for row, sample in enumerate(forward.samples):
        turn = sample.turn
        _check(sample)
        own_prompt = turn.prompt_tokens[num_shared:]
        prompts.setdefault(turn.prompt_tokens[:num_shared], len(prompts))
        padding = width - len(own_prompt) - len(turn.response_tokens) + 1
        rows.append([*own_prompt, *turn.response_tokens[:-1], *[0] * padding])
        first = row * width + len(own_prompt) - 1
        count = len(turn.response_tokens)
        positions.extend(range(first, first + count))
        targets.extend(turn.response_tokens)
        logprobs.extend(turn.logprobs)
        columns.extend([(turn.temperature, sample.advantage, token_weight(count, algorithm))] * count)
    temperatures_N, advantages_N, weights_N = torch.tensor(columns, dtype=dtype).T.contiguous()
    places = [prompts[sample.turn.prompt_tokens[:num_shared]] for sample in forward.samples]
    return _Batch(
        input_ids_BT=torch.tensor(rows),
        prompts_UL=torch.tensor(list(prompts)) if forward.shares_prompts else None,
        prompt_of_B=torch.tensor(places) if forward.shares_prompts else None,
        positions_N=torch.tensor(positions),
        targets_N=torch.tensor(targets),
        rollout_logprobs_N=torch.tensor(logprobs, dtype=dtype),
        temperatures_N=temperatures_N,
        advantages_N=advantages_N,
        weights_N=weights_N,
    )


def _check(sample: Sample) -> None:
    turn = sample.turn
    if not turn.prompt_tokens or not turn.response_tokens:
        raise InvariantError(f"{turn.key}: a sample needs prompt and response tokens")
    if turn.temperature <= 0:
        raise InvariantError(f"{turn.key}: temperature {turn.temperature} does not train; greedy turns are not samples")
    if len(turn.logprobs) != len(turn.response_tokens):
        raise InvariantError(f"{turn.key}: {len(turn.logprobs)} log-probs for {len(turn.response_tokens)} tokens")
    if not math.isfinite(sample.advantage):
        raise InvariantError(f"{turn.key}: advantage {sample.advantage}")
