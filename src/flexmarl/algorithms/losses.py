"""The policy-gradient loss of response tokens, projected to the vocabulary in chunks.

Axes: N response tokens of any samples, C of them in one chunk, H hidden size, V vocabulary.

Logits of all tokens, [N, V] in float32, are by far the largest tensor of a training step on a small model: 0.75 GiB for
4 096 tokens and 49 152 words, and the plain computation holds three of them. Here a chunk's logits live only while the
chunk is worked on. A loss of single tokens lets their gradient be formed in the same pass, so nothing is recomputed
in backward and the work is that of the plain computation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

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


def policy_gradient_loss(advantages_N: Tensor, weights_N: Tensor) -> TokenLoss:
    """Return the on-policy GRPO loss of a token: `-weight * advantage * ratio`.

    The current log-probs, detached, serve as the old ones, so the ratio is 1 and its gradient is that of the log-prob.
    Source: DeepSeekMath (Shao et al. 2024), appendix A.1.6, without the KL term.
    """

    def token_loss(logprobs_C: Tensor, chunk: slice) -> Tensor:
        ratio_C = torch.exp(logprobs_C - logprobs_C.detach())
        return -(weights_N[chunk] * advantages_N[chunk]) * ratio_C

    return token_loss


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
    if chunk_tokens is None:
        chunk_tokens = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // len(weight_VH))
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _ProjectedLoss.apply)
    loss, logprobs_N = apply(hidden_NH, weight_VH, targets_N, temperatures_N, token_loss, chunk_tokens)
    return ProjectedLoss(loss=loss, logprobs_N=logprobs_N)


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
            logits_CV = (hidden_NH[chunk] @ weight_VH.T).div_(temperatures_N[chunk, None])
            log_norm_C = torch.logsumexp(logits_CV, dim=-1)
            targets_C1 = targets_N[chunk, None]
            logprobs_N[chunk] = logits_CV.gather(-1, targets_C1).squeeze(-1) - log_norm_C
            loss_C, slope_C = _differentiate(token_loss, logprobs_N[chunk], chunk)
            loss += loss_C.sum()
            if hidden_grad_NH is None and weight_grad_VH is None:
                continue
            # d logprob / d logits = (one_hot(target) - softmax) / temperature, written over the logits.
            slope_C1 = (slope_C / temperatures_N[chunk])[:, None]
            grad_CV = logits_CV.sub_(log_norm_C[:, None]).exp_().mul_(-slope_C1)
            grad_CV.scatter_add_(-1, targets_C1, slope_C1)
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
