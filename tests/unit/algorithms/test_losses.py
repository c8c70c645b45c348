"""The chunked loss beside the plain computation."""

import pytest
import torch
from torch import Tensor

from flexmarl.algorithms.losses import TokenLoss, policy_gradient_loss, projected_loss

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
    return policy_gradient_loss(advantages_N, torch.linspace(0.1, 2.0, N, dtype=torch.float64))


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
    loss = projected_loss(*arguments, policy_gradient_loss(advantages_N, weights_N)).loss
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
