"""Scored columns beside the plain model, and the loss that uses them beside autograd over its formula."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_builders import COUNTED, SAMPLES, Build, make_backend

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.records import Sample, TokenColumn
from flexmarl.models import load_causal_lm
from flexmarl.testing.runs import write_scripted_model
from flexmarl.testing.training import write_tiny_model
from flexmarl.training.backends.torch import TorchBackend
from flexmarl.training.metrics import GRAD_NORM_SUM

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(folder: Path) -> Build:
    return lambda **settings: make_backend(folder, **settings)


def plain_logprobs(folder: Path, sample: Sample) -> list[float]:
    turn = sample.turn
    with torch.no_grad():
        tokens = torch.tensor([[*turn.prompt_tokens, *turn.response_tokens]])
        logprobs = torch.log_softmax(load_causal_lm(folder)(input_ids=tokens).logits[0] / turn.temperature, dim=-1)
    first = len(turn.prompt_tokens) - 1
    return [logprobs[first + n, token].item() for n, token in enumerate(turn.response_tokens)]


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("column", list(TokenColumn))
def test_scores_are_the_logprobs_of_the_plain_model(
    folder: Path, tmp_path: Path, canonical: bool, column: TokenColumn
) -> None:
    other = write_tiny_model(tmp_path, seed=7)
    backend = make_backend(folder, canonical=canonical, reference_folder=other)
    found = backend.score(column, [sample.turn for sample in SAMPLES]).values
    assert [each.key for each in found] == [sample.turn.key for sample in SAMPLES]
    for sample, each in zip(SAMPLES, found, strict=True):
        expected = plain_logprobs(other if column is TokenColumn.REFERENCE_LOGPROBS else folder, sample)
        assert each.values == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("canonical", [False, True])
def test_scoring_changes_nothing_that_is_held(folder: Path, canonical: bool) -> None:
    scoring, silent = (make_backend(folder, canonical=canonical, reference_folder=folder) for _ in range(2))
    for backend in (scoring, silent):
        backend.accumulate(SAMPLES[:2])
        if backend is scoring:
            for column in TokenColumn:
                backend.score(column, [sample.turn for sample in SAMPLES])
        backend.accumulate(SAMPLES[2:])
        backend.update(COUNTED)
    assert scoring.weights_digest() == silent.weights_digest()


def with_old_logprobs(backend: TorchBackend, samples: Sequence[Sample]) -> list[Sample]:
    values = backend.score(TokenColumn.OLD_LOGPROBS, [sample.turn for sample in samples]).values
    return [
        Sample(
            turn=sample.turn,
            advantage=sample.advantage,
            reward=sample.reward,
            token_columns={TokenColumn.OLD_LOGPROBS: each.values},
        )
        for sample, each in zip(samples, values, strict=True)
    ]


def test_old_logprobs_scored_now_are_the_bits_of_the_training_forward(build: Build) -> None:
    """The ratio of the first of several updates is 1 exactly, so its gradient has the bits of a single update's."""
    settings = AlgorithmConfig(num_epochs=2, correction="decoupled_ppo")
    one, several = build(canonical=True), build(canonical=True, algorithm=settings)
    samples = with_old_logprobs(several, SAMPLES)
    several_metrics = several.accumulate(samples).metrics
    assert several_metrics["agent.solver.clipped_sum"] == 0.0
    unweighted = build(canonical=True, algorithm=AlgorithmConfig(num_epochs=2))
    for backend, own in ((one, SAMPLES), (unweighted, samples)):
        backend.accumulate(own)
        backend.update(COUNTED)
    assert one.weights_digest() == unweighted.weights_digest()


def test_the_reference_is_frozen_and_survives_updates(folder: Path) -> None:
    backend = make_backend(folder, reference_folder=folder)
    turns = [sample.turn for sample in SAMPLES]
    before = backend.score(TokenColumn.REFERENCE_LOGPROBS, turns)
    assert backend.score(TokenColumn.OLD_LOGPROBS, turns) == before
    backend.accumulate(SAMPLES)
    backend.update(COUNTED)
    assert backend.score(TokenColumn.REFERENCE_LOGPROBS, turns) == before
    assert backend.score(TokenColumn.OLD_LOGPROBS, turns) != before


def test_gradient_with_every_term_equals_one_loss_over_all_samples(folder: Path, tmp_path: Path) -> None:
    """Truncated weights, PPO's clipping and the KL term beside autograd over the plain formula."""
    algorithm = AlgorithmConfig(
        num_epochs=2, correction="decoupled_ppo", correction_cap=1.1, kl_coef=0.2, clip_low=0.05, clip_high=0.05
    )
    columns: dict[TokenColumn, Callable[[list[float]], list[float]]] = {
        TokenColumn.OLD_LOGPROBS: lambda logprobs: [own + 0.1 * (-1) ** n for n, own in enumerate(logprobs)],
        TokenColumn.REFERENCE_LOGPROBS: lambda logprobs: [own - 0.3 + 0.2 * n for n, own in enumerate(logprobs)],
    }
    samples = []
    for sample in SAMPLES:
        own = plain_logprobs(folder, sample)
        values = {column: tuple(shift(own)) for column, shift in columns.items()}
        turn = replace(sample.turn, logprobs=tuple(value + 0.15 * (-1) ** (n // 2) for n, value in enumerate(own)))
        samples.append(replace(sample, turn=turn, token_columns=values))
    backend = make_backend(folder, algorithm=algorithm)
    for part in (samples[:1], samples[1:]):
        backend.accumulate(part)
    norm = backend.update(COUNTED).metrics[GRAD_NORM_SUM]

    model = load_causal_lm(folder)
    loss = torch.zeros(())
    for sample in samples:
        turn = sample.turn
        tokens = torch.tensor([[*turn.prompt_tokens, *turn.response_tokens]])
        logits = model(input_ids=tokens, use_cache=False).logits[0] / turn.temperature
        rows = torch.arange(len(turn.response_tokens)) + len(turn.prompt_tokens) - 1
        pi = torch.log_softmax(logits, dim=-1)[rows, torch.tensor(turn.response_tokens)]
        old, reference = (torch.tensor(sample.token_columns[column]) for column in TokenColumn)
        weight = torch.exp(old - torch.tensor(turn.logprobs)).clamp(max=1.1)
        ratio = torch.exp(pi - old)
        objective = torch.minimum(ratio * sample.advantage, ratio.clamp(0.95, 1.05) * sample.advantage)
        kl = torch.exp(reference - pi) - (reference - pi) - 1
        loss = loss - (weight * objective - 0.2 * kl).sum()
    (loss / 13).backward()  # type: ignore[no-untyped-call]
    expected = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None])
    assert norm == pytest.approx(expected.sum().sqrt().item(), rel=1e-5)


def test_refuses_scores_it_cannot_give(build: Build, tmp_path: Path) -> None:
    turns = [SAMPLES[0].turn]
    with pytest.raises(BackendError, match="has no reference model"):
        build().score(TokenColumn.REFERENCE_LOGPROBS, turns)
    small = write_scripted_model(tmp_path / "small")
    with pytest.raises(BackendError, match=r"algorithm.reference_model .* has \d+ tokens, the policy 23"):
        build(reference_folder=small).score(TokenColumn.REFERENCE_LOGPROBS, turns)


def test_a_column_must_be_there_for_all_or_none(build: Build) -> None:
    mixed = [*with_old_logprobs(build(), SAMPLES[:1]), SAMPLES[1]]
    with pytest.raises(InvariantError, match="t1/solver/b0/n0 has no old_logprobs, but s0/q0/t0"):
        build().accumulate(mixed)
