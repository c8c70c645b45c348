"""Forward and backward of samples: adds unnormalised gradient sums to the `.grad` of a model.

Axes: N response tokens of all samples of one forward, A agents, M metrics of a token.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmarl.algorithms import check_columns, token_weight
from flexmarl.algorithms.losses import TokenTerms, policy_gradient_loss, projected_loss, token_metrics
from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import SampleKey
from flexmarl.core.records import Sample, TokenColumn
from flexmarl.training.backends.torch.forwards import (
    ForwardBatch,
    check_finite,
    hidden_before_responses,
    to_tensors,
)
from flexmarl.training.metrics import COMPUTED_TOKENS_SUM, LOGPROB_GAP_MAX, agent_metric


def backward(
    model: Any, forward: ForwardBatch, samples: Mapping[SampleKey, Sample], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Add the gradient sum of the samples of one forward to the `.grad` of the model; return metrics.

    Raises:
        BackendError: a log-prob is not finite; nothing was added.
    """
    head = model.get_output_embeddings().weight
    tensors = to_tensors(forward, head.dtype)
    members = [samples[turn.key] for turn in forward.turns]
    terms = _terms(members, algorithm, head.dtype)
    projected = projected_loss(
        hidden_before_responses(model, tensors),
        head,
        tensors.targets_N,
        tensors.temperatures_N,
        policy_gradient_loss(terms, algorithm),
    )
    check_finite(projected.logprobs_N, forward)
    projected.loss.backward()  # type: ignore[no-untyped-call]
    metrics = _metrics_by_agent(members, token_metrics(terms, projected.logprobs_N, algorithm))
    metrics[COMPUTED_TOKENS_SUM] = float(tensors.num_positions)
    return metrics


def _terms(samples: Sequence[Sample], algorithm: AlgorithmConfig, dtype: torch.dtype) -> TokenTerms:
    per_sample: list[tuple[float, float]] = []
    for sample in samples:
        if not math.isfinite(sample.advantage):
            raise InvariantError(f"{sample.turn.key}: advantage {sample.advantage}")
        check_columns(sample, algorithm)
        count = len(sample.turn.response_tokens)
        per_sample.extend([(sample.advantage, token_weight(count, algorithm))] * count)
    advantages_N, weights_N = torch.tensor(per_sample, dtype=dtype).T.contiguous()
    rollout = [logprob for sample in samples for logprob in sample.turn.logprobs]
    return TokenTerms(
        advantages_N=advantages_N,
        weights_N=weights_N,
        rollout_logprobs_N=torch.tensor(rollout, dtype=dtype),
        old_logprobs_N=_column(samples, TokenColumn.OLD_LOGPROBS, dtype),
        reference_logprobs_N=_column(samples, TokenColumn.REFERENCE_LOGPROBS, dtype),
    )


def _column(samples: Sequence[Sample], column: TokenColumn, dtype: torch.dtype) -> Tensor | None:
    having = [sample for sample in samples if column in sample.token_columns]
    if not having:
        return None
    if len(having) < len(samples):
        lacking = next(sample for sample in samples if column not in sample.token_columns)
        raise InvariantError(f"{lacking.turn.key} has no {column}, but {having[0].turn.key} has")
    return torch.tensor([value for sample in samples for value in sample.token_columns[column]], dtype=dtype)


def _metrics_by_agent(samples: Sequence[Sample], tokens: Mapping[str, Tensor]) -> dict[str, float]:
    """Return sums over the tokens of each agent, and the largest log-prob gap."""
    agents = sorted({sample.turn.key.agent for sample in samples})
    counts = torch.tensor([len(sample.turn.response_tokens) for sample in samples])
    agent_of_N = torch.tensor([agents.index(sample.turn.key.agent) for sample in samples]).repeat_interleave(counts)
    values_NM = torch.stack(list(tokens.values()), dim=1).double()
    sums_AM = torch.zeros(len(agents), len(tokens), dtype=torch.float64).index_add_(0, agent_of_N, values_NM)
    metrics: dict[str, float] = {}
    for place, agent in enumerate(agents):
        for stem, value in zip(tokens, sums_AM[place].tolist(), strict=True):
            metrics[agent_metric(agent, f"{stem}_sum")] = value
        metrics[agent_metric(agent, LOGPROB_GAP_MAX)] = tokens["logprob_gap"][agent_of_N == place].max().item()
    return metrics
