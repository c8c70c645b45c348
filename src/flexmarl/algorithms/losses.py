"""The policy-gradient loss of response tokens, projected to the vocabulary in chunks.

Axes: N response tokens of any samples, C of them in one chunk, H hidden size, V vocabulary.

Logits of all tokens, [N, V] in float32, are by far the largest tensor of a training step on a small model: 0.75 GiB for
4 096 tokens and 49 152 words, and the plain computation holds three of them. Here a chunk's logits live only while the
chunk is worked on. A loss of single tokens lets their gradient be formed in the same pass, so nothing is recomputed
in backward and the work is that of the plain computation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flexmarl.algorithms.corrections import is_weighted
from flexmarl.config import AlgorithmConfig

MIN_CHUNK_TOKENS = 256
"""Fewer make the matrix products slower."""
CHUNK_LOGITS = 1 << 22
"""Logits of a chunk when the vocabulary is small: more fall out of the processor's cache."""

TokenLoss = Callable[[Tensor, slice], Tensor]
"""Log-probs [C] of the tokens in a slice of [0, N) -> their losses [C]; differentiable, each of its own token alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedLoss:
    """What `projected_loss` returns."""

    loss: Tensor
    """Sum over tokens, a scalar that can be differentiated once."""
    logprobs_N: Tensor
    """Of the target tokens at their temperatures, detached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """What the loss of each token is computed from, beside its log-prob."""

    advantages_N: Tensor
    weights_N: Tensor
    """Of the normaliser (`token_weight`)."""
    rollout_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None
    """Before the first of several updates; None takes the current ones, held constant."""
    reference_logprobs_N: Tensor | None = None


def policy_gradient_loss(terms: TokenTerms, config: AlgorithmConfig) -> TokenLoss:
    """Return the loss of a token, `weight * (-w * min(ratio * A, clip(ratio) * A) + kl_coef * k3)`.

    ratio = pi/old, clipped to [1 - clip_low, 1 + clip_high]; w = min(old/mu, correction_cap), held constant, or 1
    without a correction; k3 = ref/pi - log(ref/pi) - 1 when the KL divergence is in the loss. Without old log-probs the
    ratio is 1, and its gradient is that of the log-prob. Formulas and their sources: `corrections.py`.
    """
    coefficient = config.kl_coef if config.kl_in == "loss" else 0.0

    def token_loss(logprobs_C: Tensor, chunk: slice) -> Tensor:
        advantages_C = terms.advantages_N[chunk]
        if terms.old_logprobs_N is None:
            old_C = logprobs_C.detach()
            objective_C = torch.exp(logprobs_C - old_C) * advantages_C
        else:
            old_C = terms.old_logprobs_N[chunk]
            ratio_C = torch.exp(logprobs_C - old_C)
            bounded_C = ratio_C.clamp(1 - config.clip_low, 1 + config.clip_high)
            objective_C = torch.minimum(ratio_C * advantages_C, bounded_C * advantages_C)
        if is_weighted(config):
            objective_C = _importance_weights(old_C - terms.rollout_logprobs_N[chunk], config) * objective_C
        loss_C = -objective_C
        if coefficient > 0 and terms.reference_logprobs_N is not None:
            loss_C = loss_C + coefficient * _k3(terms.reference_logprobs_N[chunk] - logprobs_C)
        return terms.weights_N[chunk] * loss_C

    return token_loss


def token_metrics(terms: TokenTerms, logprobs_N: Tensor, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Return numbers of each token that are worth reporting, [N] each, by the stem of their name in `metrics.py`.

    `logprobs_N` are the current ones. What the configuration does not use is absent.
    """
    old_N = logprobs_N if terms.old_logprobs_N is None else terms.old_logprobs_N
    # Against the policy before the first of several updates: what they move is no mismatch of the engines.
    gaps_N = old_N - terms.rollout_logprobs_N
    found = {"logprob": logprobs_N, "logprob_gap": gaps_N.abs(), "mismatch_kl": _k3(gaps_N)}
    if is_weighted(config):
        log_weights_N = old_N - terms.rollout_logprobs_N
        found["importance_weight"] = _importance_weights(log_weights_N, config)
        found["importance_truncated"] = (log_weights_N > math.log(config.correction_cap)).to(logprobs_N.dtype)
    if terms.old_logprobs_N is not None:
        ratio_N = torch.exp(logprobs_N - old_N)
        is_high_N = (terms.advantages_N > 0) & (ratio_N > 1 + config.clip_high)
        is_low_N = (terms.advantages_N < 0) & (ratio_N < 1 - config.clip_low)
        found["clipped"] = (is_high_N | is_low_N).to(logprobs_N.dtype)
        found["approx_kl"] = _k3(logprobs_N - old_N)
    if terms.reference_logprobs_N is not None:
        found["reference_kl"] = _k3(terms.reference_logprobs_N - logprobs_N)
    return found


def _importance_weights(log_weights: Tensor, config: AlgorithmConfig) -> Tensor:
    return torch.exp(log_weights).clamp(max=config.correction_cap)


def _k3(log_ratios: Tensor) -> Tensor:
    return torch.expm1(log_ratios) - log_ratios


def projected_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Return the log-probs of the target tokens, the very numbers that `projected_loss` computes, without gradients."""
    chunk_tokens = chunk_tokens or _chunk_size(weight_VH)
    logprobs_N = hidden_NH.new_empty(len(targets_N))
    with torch.no_grad():
        for start in range(0, len(targets_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            projected = _project(hidden_NH[chunk], weight_VH, targets_N[chunk], temperatures_N[chunk])
            logprobs_N[chunk] = projected.logprobs_C
    return logprobs_N


def projected_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    token_loss: TokenLoss,
    *,
    chunk_tokens: int | None = None,
) -> ProjectedLoss:
    """Return the sum of `token_loss` over tokens, with gradients to `hidden_NH` and `weight_VH`.

    Args:
        hidden_NH: Last hidden state at the position before each target.
        weight_VH: Weight of the output layer, which has no bias.
        targets_N: Token ids.
        temperatures_N: Divides the logits of each token; greater than 0.
        token_loss: The loss of single tokens.
        chunk_tokens: Tokens projected together; None chooses by the size of the vocabulary.
    """
    chunk_tokens = chunk_tokens or _chunk_size(weight_VH)
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _ProjectedLoss.apply)
    loss, logprobs_N = apply(hidden_NH, weight_VH, targets_N, temperatures_N, token_loss, chunk_tokens)
    return ProjectedLoss(loss=loss, logprobs_N=logprobs_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projected:
    """A chunk of tokens at the output layer."""

    logits_CV: Tensor
    log_norm_C: Tensor
    logprobs_C: Tensor


def _project(hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, temperatures_C: Tensor) -> _Projected:
    logits_CV = (hidden_CH @ weight_VH.T).div_(temperatures_C[:, None])
    log_norm_C = torch.logsumexp(logits_CV, dim=-1)
    logprobs_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) - log_norm_C
    return _Projected(logits_CV=logits_CV, log_norm_C=log_norm_C, logprobs_C=logprobs_C)


def _chunk_size(weight_VH: Tensor) -> int:
    return max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // len(weight_VH))


class _ProjectedLoss(torch.autograd.Function):
    """Forms the gradients in forward, chunk by chunk, and scales them in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor,
        token_loss: TokenLoss,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH) if needs_weight else None
        logprobs_N = hidden_NH.new_empty(len(targets_N))
        loss = hidden_NH.new_zeros(())
        for start in range(0, len(targets_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            projected = _project(hidden_NH[chunk], weight_VH, targets_N[chunk], temperatures_N[chunk])
            logprobs_N[chunk] = projected.logprobs_C
            loss_C, slope_C = _differentiate(token_loss, logprobs_N[chunk], chunk)
            loss += loss_C.sum()
            if hidden_grad_NH is None and weight_grad_VH is None:
                continue
            # d logprob / d logits = (one_hot(target) - softmax) / temperature, written over the logits.
            slope_C1 = (slope_C / temperatures_N[chunk])[:, None]
            grad_CV = projected.logits_CV.sub_(projected.log_norm_C[:, None]).exp_().mul_(-slope_C1)
            grad_CV.scatter_add_(-1, targets_N[chunk, None], slope_C1)
            if hidden_grad_NH is not None:
                torch.mm(grad_CV, weight_VH, out=hidden_grad_NH[chunk])
            if weight_grad_VH is not None:
                weight_grad_VH.addmm_(grad_CV.T, hidden_NH[chunk])
        ctx.grads = (hidden_grad_NH, weight_grad_VH)
        ctx.mark_non_differentiable(logprobs_N)
        return loss, logprobs_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grads = [None if grad is None else grad.mul_(scale) for grad in ctx.grads]
        # They were scaled in place: a second backward would scale them twice, so it finds nothing.
        del ctx.grads
        return (*grads, None, None, None, None)


def _differentiate(token_loss: TokenLoss, logprobs_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk and their slopes with respect to its log-probs."""
    with torch.enable_grad():
        leaf_C = logprobs_C.detach().requires_grad_()
        loss_C = token_loss(leaf_C, chunk)
        (slope_C,) = torch.autograd.grad(loss_C.sum(), leaf_C)
    return loss_C.detach(), slope_C
