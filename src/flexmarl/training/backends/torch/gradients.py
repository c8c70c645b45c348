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
    """Samples as tensors."""

    input_ids_BT: Tensor
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


def split_by_length(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples in batches of similar length. The batches do not depend on the order of `samples`."""
    ordered = sorted(samples, key=lambda sample: sample.turn.key)
    cut = cut_by_length(
        [input_length(sample) for sample in ordered],
        overhead_tokens=FORWARD_OVERHEAD_TOKENS,
        max_tokens=MAX_FORWARD_TOKENS,
    )
    return [[ordered[index] for index in batch] for batch in cut]


def backward(model: Any, samples: Sequence[Sample], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Add the gradient sum of `samples`, run as one forward, to the `.grad` of the model; return metrics.

    Raises:
        BackendError: a log-prob is not finite; nothing was added.
    """
    dtype = model.get_output_embeddings().weight.dtype
    batch = _to_batch(samples, algorithm, dtype)
    hidden_BTH = model.base_model(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
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
        COMPUTED_TOKENS_SUM: float(batch.input_ids_BT.numel()),
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


def _to_batch(samples: Sequence[Sample], algorithm: AlgorithmConfig, dtype: torch.dtype) -> _Batch:
    width = max(input_length(sample) for sample in samples)
    rows: list[list[int]] = []
    positions: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    columns: list[tuple[float, float, float]] = []
    for row, sample in enumerate(samples):
        turn = sample.turn
        _check(sample)
        length = input_length(sample)
        rows.append([*turn.prompt_tokens, *turn.response_tokens[:-1], *[0] * (width - length)])
        first = row * width + len(turn.prompt_tokens) - 1
        count = len(turn.response_tokens)
        positions.extend(range(first, first + count))
        targets.extend(turn.response_tokens)
        logprobs.extend(turn.logprobs)
        columns.extend([(turn.temperature, sample.advantage, token_weight(count, algorithm))] * count)
    temperatures_N, advantages_N, weights_N = torch.tensor(columns, dtype=dtype).T.contiguous()
    return _Batch(
        input_ids_BT=torch.tensor(rows),
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
