"""The chunked loss beside the plain computation, and the terms of a token beside their plain formulas."""

import math

import pytest
import torch
from torch import Tensor

from flexmarl.algorithms import importance_weight, is_clipped, k3, token_slope
from flexmarl.algorithms.losses import (
    TokenLoss,
    TokenTerms,
    policy_gradient_loss,
    projected_logprobs,
    projected_loss,
    token_metrics,
)
from flexmarl.config import AlgorithmConfig

pytestmark = pytest.mark.unit

N, H, V = 11, 6, 13


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(N, H, generator=generator, dtype=dtype).requires_grad_()
    weight_VH = torch.randn(V, H, generator=generator, dtype=dtype).requires_grad_()
    targets_N = torch.randint(V, (N,), generator=generator)
    temperatures_N = 0.5 + torch.rand(N, generator=generator, dtype=dtype)
    return hidden_NH, weight_VH, targets_N, temperatures_N


def plain(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logits_NV = hidden_NH @ weight_VH.T / temperatures_N[:, None]
    return torch.log_softmax(logits_NV, dim=-1)[torch.arange(N), targets_N]


def grpo_loss() -> TokenLoss:
    generator = torch.Generator().manual_seed(2)
    advantages_N = torch.randn(N, generator=generator, dtype=torch.float64)
    return policy_gradient_loss(on_policy(advantages_N, torch.linspace(0.1, 2.0, N)), AlgorithmConfig())


def on_policy(advantages_N: Tensor, weights_N: Tensor) -> TokenTerms:
    return TokenTerms(
        advantages_N=advantages_N, weights_N=weights_N.double(), rollout_logprobs_N=torch.zeros_like(advantages_N)
    )


def curved_loss(logprobs_C: Tensor, chunk: slice) -> Tensor:
    return torch.arange(N, dtype=logprobs_C.dtype)[chunk] * logprobs_C.square()


@pytest.mark.parametrize("chunk_tokens", [1, 4, N, None])
@pytest.mark.parametrize("token_loss", [grpo_loss(), curved_loss])
def test_equals_the_plain_computation(chunk_tokens: int | None, token_loss: TokenLoss) -> None:
    arguments = inputs()
    logprobs_N = plain(*arguments)
    expected = token_loss(logprobs_N, slice(0, N)).sum()
    expected_grads = torch.autograd.grad(3.0 * expected, arguments[:2])

    projected = projected_loss(*arguments, token_loss, chunk_tokens=chunk_tokens)
    grads = torch.autograd.grad(3.0 * projected.loss, arguments[:2])

    torch.testing.assert_close(projected.logprobs_N, logprobs_N.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(projected.loss.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_advantage_times_weight_times_that_of_the_logprob() -> None:
    arguments = inputs()
    advantages_N = torch.linspace(-1.0, 1.0, N, dtype=torch.float64)
    weights_N = torch.full((N,), 0.25, dtype=torch.float64)
    token_loss = policy_gradient_loss(on_policy(advantages_N, weights_N), AlgorithmConfig())
    loss = projected_loss(*arguments, token_loss).loss
    expected = -(0.25 * advantages_N * plain(*arguments)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, arguments[:2]), torch.autograd.grad(expected, arguments[:2]), rtol=1e-12, atol=1e-12
    )


def test_only_the_asked_gradients_are_formed() -> None:
    hidden_NH, weight_VH, targets_N, temperatures_N = inputs()
    loss = projected_loss(hidden_NH, weight_VH.detach(), targets_N, temperatures_N, grpo_loss()).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight_VH.grad is None
    expected = grpo_loss()(plain(hidden_NH, weight_VH, targets_N, temperatures_N), slice(0, N)).sum()
    torch.testing.assert_close(hidden_NH.grad, torch.autograd.grad(expected, hidden_NH)[0], rtol=1e-12, atol=1e-12)


def test_a_second_backward_is_refused() -> None:
    loss = projected_loss(*inputs(), grpo_loss()).loss
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(AttributeError):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("chunk_tokens", [3, None])
def test_scored_logprobs_are_the_bits_of_training(chunk_tokens: int | None) -> None:
    arguments = inputs(torch.float32)
    trained = projected_loss(*arguments, grpo_loss(), chunk_tokens=chunk_tokens).logprobs_N
    scored = projected_logprobs(*arguments, chunk_tokens=chunk_tokens)
    assert torch.equal(scored, trained)
    assert not scored.requires_grad


KINDS = {
    "on_policy": AlgorithmConfig(),
    "kl": AlgorithmConfig(kl_coef=0.3),
    "kl_in_reward": AlgorithmConfig(kl_coef=0.3, kl_in="reward"),
    "truncated_is": AlgorithmConfig(correction="truncated_is", correction_cap=1.5),
    "ppo": AlgorithmConfig(num_epochs=2, clip_low=0.1, clip_high=0.3),
    "everything": AlgorithmConfig(num_minibatches=2, correction="decoupled_ppo", correction_cap=1.2, kl_coef=0.1),
}


def terms_of(config: AlgorithmConfig, *, num: int) -> tuple[TokenTerms, Tensor]:
    """Random columns, and current log-probs, that make every branch of the loss happen."""
    generator = torch.Generator().manual_seed(3)
    pi_N, mu_N, old_N, reference_N = -3 * torch.rand(4, num, generator=generator, dtype=torch.float64)
    terms = TokenTerms(
        advantages_N=torch.randn(num, generator=generator, dtype=torch.float64),
        weights_N=torch.rand(num, generator=generator, dtype=torch.float64),
        rollout_logprobs_N=mu_N,
        old_logprobs_N=old_N if config.num_epochs * config.num_minibatches > 1 else None,
        reference_logprobs_N=reference_N if config.kl_coef > 0 else None,
    )
    return terms, pi_N


@pytest.mark.parametrize("name", list(KINDS))
def test_slopes_are_those_of_the_plain_formulas(name: str) -> None:
    config = KINDS[name]
    terms, pi_N = terms_of(config, num=400)
    leaf_N = pi_N.clone().requires_grad_()
    policy_gradient_loss(terms, config)(leaf_N, slice(None)).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf_N.grad is not None
    for n in range(400):
        expected = token_slope(
            advantage=terms.advantages_N[n].item(),
            pi=pi_N[n].item(),
            mu=terms.rollout_logprobs_N[n].item(),
            old=None if terms.old_logprobs_N is None else terms.old_logprobs_N[n].item(),
            reference=None if terms.reference_logprobs_N is None else terms.reference_logprobs_N[n].item(),
            config=config,
        )
        assert -leaf_N.grad[n].item() == pytest.approx(terms.weights_N[n].item() * expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", list(KINDS))
def test_metrics_are_those_of_the_plain_formulas(name: str) -> None:
    config = KINDS[name]
    terms, pi_N = terms_of(config, num=200)
    found = token_metrics(terms, pi_N, config)
    is_corrected = config.correction is not None
    has_old = terms.old_logprobs_N is not None
    assert ("importance_weight" in found, "clipped" in found) == (is_corrected, has_old)
    assert ("reference_kl" in found) == (config.kl_coef > 0)
    for n in range(200):
        pi, mu = pi_N[n].item(), terms.rollout_logprobs_N[n].item()
        old = pi if terms.old_logprobs_N is None else terms.old_logprobs_N[n].item()
        expected = {"logprob": pi, "logprob_gap": abs(old - mu), "mismatch_kl": k3(old - mu)}
        if is_corrected:
            expected["importance_weight"] = importance_weight(old, mu, config)
            expected["importance_truncated"] = float(old - mu > math.log(config.correction_cap))
        if has_old:
            expected["approx_kl"] = k3(pi - old)
            expected["clipped"] = float(is_clipped(terms.advantages_N[n].item(), math.exp(pi - old), config))
        if terms.reference_logprobs_N is not None:
            expected["reference_kl"] = k3(terms.reference_logprobs_N[n].item() - pi)
        assert {stem: values_N[n].item() for stem, values_N in found.items()} == pytest.approx(expected, abs=1e-12)
