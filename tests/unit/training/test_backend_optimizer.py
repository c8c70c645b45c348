"""AdamW over the flat buffer beside torch's, tensor by tensor."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmarl.config import OptimizerConfig
from flexmarl.core.errors import BackendError
from flexmarl.training.backends.torch.optimizer import FlatAdamW, global_norm, learning_rate

pytestmark = pytest.mark.unit

SHAPES = [(7, 5), (3,), (16, 4), (1,), (33,)]


def flat_of(tensors: list[Tensor]) -> Tensor:
    """The tensors at multiples of 64 bytes, as a policy's parameters lie."""
    parts = [torch.cat([each.flatten(), torch.zeros(-each.numel() % 16)]) for each in tensors]
    return torch.cat(parts)


def make(config: OptimizerConfig, parameters: Tensor) -> FlatAdamW:
    moments = [torch.zeros_like(parameters) for _ in range(2)]
    return FlatAdamW(
        config, parameters_E=parameters, exp_avg_E=moments[0], exp_avg_sq_E=moments[1], step=torch.zeros(())
    )


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gives_the_bits_of_torch_adamw(max_grad_norm: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=max_grad_norm, warmup_steps=4)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    flat = flat_of([tensor.detach() for tensor in tensors])
    own = make(config, flat)
    reference = torch.optim.AdamW(tensors, lr=0.01, weight_decay=0.1, fused=True)
    for number in range(8):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        scale = 1.0 if max_grad_norm is None else max_grad_norm / (norm + 1e-6)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient * torch.tensor(scale)
        reference.param_groups[0]["lr"] = 0.01 * min(1.0, (number + 1) / 4)
        reference.step()
        found_norm, rate = own.update(flat_of(gradients))
        assert found_norm == pytest.approx(norm, rel=1e-6)
        assert rate == pytest.approx(0.01 * min(1.0, (number + 1) / 4))
    tolerance = 0.0 if max_grad_norm is None else 1e-6
    torch.testing.assert_close(flat, flat_of([tensor.detach() for tensor in tensors]), rtol=tolerance, atol=tolerance)


def test_warm_up_by_hand() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(config, num_updates=count) for count in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerConfig(learning_rate=1.0), num_updates=0) == 1.0


SCHEDULES = {
    "linear": ([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2], 0.2),
    "cosine": ([0.5, 1.0, 1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2), 0.0, 0.0], 0.0),
}


def schedule_of(kind: str, min_lr_frac: float, **settings: float) -> OptimizerConfig:
    return OptimizerConfig.model_validate(
        {
            "learning_rate": 1.0,
            "warmup_steps": 2,
            "schedule": kind,
            "decay_steps": 6,
            "min_lr_frac": min_lr_frac,
            **settings,
        }
    )


@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_schedules_by_hand(kind: str) -> None:
    expected, min_lr_frac = SCHEDULES[kind]
    config = schedule_of(kind, min_lr_frac)
    assert [learning_rate(config, num_updates=count) for count in range(8)] == pytest.approx(expected, abs=1e-15)
    without_warmup = schedule_of(kind, 0.0, warmup_steps=0)
    # Half way down after half of the updates, and down after all of them.
    rates = [learning_rate(without_warmup, num_updates=count) for count in (0, 3, 6, 100)]
    assert rates == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("kind", ["constant", *SCHEDULES])
def test_schedules_equal_those_of_torch(kind: str) -> None:
    schedulers = torch.optim.lr_scheduler
    config = schedule_of(kind, 0.1, learning_rate=0.3, warmup_steps=3, decay_steps=10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.3)
    makers: dict[str, Any] = {
        "constant": lambda: schedulers.LambdaLR(optimizer, lambda count: 1.0),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, 0.1, total_iters=7),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 7, eta_min=0.03),
    }
    decay = makers[kind]()
    expected = []
    for count in range(11):
        warming = 0.3 * (count + 1) / 3
        expected.append(warming if count < 3 else optimizer.param_groups[0]["lr"])
        optimizer.step()
        if count >= 3:
            decay.step()
    found = [learning_rate(config, num_updates=count) for count in range(11)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_rate_follows_the_updates_that_the_state_counts() -> None:
    """G6: a state that moves takes its place in the schedule along; a fresh optimizer over it does not start again."""
    config = schedule_of("linear", 0.0)
    moments = [torch.zeros(4), torch.zeros(4)]
    step = torch.zeros(())
    rates = []
    parameters = torch.ones(4)
    for _ in range(4):
        own = FlatAdamW(config, parameters_E=parameters, exp_avg_E=moments[0], exp_avg_sq_E=moments[1], step=step)
        rates.append(own.update(torch.ones(4))[1])
    assert rates == [0.5, 1.0, 1.0, 0.75]


def test_norm_of_many_small_numbers_is_exact() -> None:
    # One float32 sum over a million elements is off by 1e-4 and more.
    assert global_norm(torch.full((1_000_003,), 1e-3)) == pytest.approx(math.sqrt(1_000_003) * 1e-3, rel=1e-6)
    assert global_norm(torch.tensor([3.0, 4.0])) == 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_refuses_a_gradient_that_is_not_finite(bad: float) -> None:
    parameters = torch.ones(5)
    with pytest.raises(BackendError, match="gradient norm"):
        make(OptimizerConfig(), parameters).update(torch.tensor([0.0, bad, 0.0, 0.0, 0.0]))
    assert parameters.tolist() == [1.0] * 5


@pytest.mark.parametrize("settings", [{"learning_rate": 1e300}, {"learning_rate": 1e30, "weight_decay": 1e30}])
def test_g10_an_update_that_makes_weights_infinite_is_refused(settings: dict[str, float]) -> None:
    own = make(OptimizerConfig.model_validate(settings), torch.ones(16))

    with pytest.raises(BackendError, match=r"weights that are not finite .* lower optimizer.learning_rate"):
        own.update(torch.ones(16))
