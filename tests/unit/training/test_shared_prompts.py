"""A prompt that several samples share runs once, and the gradient is that of running it in every row."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.config import AlgorithmConfig
from flexmarl.core.records import Sample
from flexmarl.models import load_causal_lm
from flexmarl.testing.training import make_sample, write_tiny_model
from flexmarl.training.backends.torch.forwards import ForwardBatch, plan_forwards
from flexmarl.training.backends.torch.gradients import backward
from flexmarl.training.backends.torch.shared_prompts import can_share_prompts
from flexmarl.training.metrics import COMPUTED_TOKENS_SUM

pytestmark = pytest.mark.unit

PROMPTS = ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
RESPONSES = ([6], [7, 8], [1, 1, 1, 1])


def samples() -> list[Sample]:
    return [
        make_sample(
            number,
            prompt=PROMPTS[number % 2],
            response=RESPONSES[number % 3],
            advantage=0.3 * number - 0.7,
            temperature=1.0 + 0.1 * number,
        )
        for number in range(6)
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_shared_prompts_give_the_gradient_of_whole_rows(tmp_path: Path, kind: str) -> None:
    model = load_causal_lm(write_tiny_model(tmp_path, kind=kind))
    gradients: dict[bool, dict[str, torch.Tensor]] = {}
    metrics = {}
    for shares in (False, True):
        model.zero_grad()
        by_key = {sample.turn.key: sample for sample in samples()}
        forward = ForwardBatch(turns=[sample.turn for sample in samples()], shares_prompts=shares)
        metrics[shares] = backward(model, forward, by_key, AlgorithmConfig())
        gradients[shares] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert gradients[True].keys() == gradients[False].keys()
    scale = max(gradient.abs().max().item() for gradient in gradients[False].values())
    for name, gradient in gradients[False].items():
        assert (gradients[True][name] - gradient).abs().max() <= 1e-6 * scale, name
    assert metrics[True]["agent.solver.logprob_sum"] == pytest.approx(
        metrics[False]["agent.solver.logprob_sum"], rel=1e-6
    )
    # Six rows of 4 + 4 positions; shared: two prompts of 4 and six rows of 4.
    assert (metrics[False][COMPUTED_TOKENS_SUM], metrics[True][COMPUTED_TOKENS_SUM]) == (48, 32)


def test_prompts_are_shared_where_that_pays() -> None:
    long = [make_sample(n, prompt=[1] * 100, response=[2, 3]).turn for n in range(4)]
    few = [make_sample(n + 4, prompt=[1, 2, 3], response=[4]).turn for n in range(4)]

    plan = plan_forwards([*long, *few], can_share=True)

    # Three of four prompts of 99 tokens are saved; of the others 3 x 2 tokens would be.
    assert [(len(each.turns), each.shares_prompts) for each in plan] == [(4, True), (4, False)]
    assert all(not each.shares_prompts for each in plan_forwards([*long, *few], can_share=False))


def test_a_model_that_looks_past_its_cache_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = load_causal_lm(write_tiny_model(tmp_path))
    assert can_share_prompts(model)
    run = model.base_model.forward

    def forgetful(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    monkeypatch.setattr(model.base_model, "forward", forgetful)

    assert not can_share_prompts(model)
