"""G1: the gradient of a step does not depend on how its samples are split, ordered, suspended and resumed.

The error of a sum of floats is bounded by the sum of the norms of its parts, so that sum is the yardstick.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexmarl.config import AlgorithmConfig, OptimizerConfig, TorchTrainingConfig
from flexmarl.core.ids import ObjectKey
from flexmarl.core.records import Sample
from flexmarl.testing.training import TINY_VOCABULARY, MemoryObjectPlane, make_sample, write_tiny_model
from flexmarl.training.backends.torch import TorchBackend

pytestmark = pytest.mark.property

FLOAT_BOUND = {"float32": 1e-6, "float64": 1e-12}
STATE, WEIGHTS = ObjectKey("state", "actor", 0), ObjectKey("weights", "actor", 0)
tokens = st.integers(0, TINY_VOCABULARY - 1)


@functools.cache
def model_folder() -> Path:
    # GPT-2: the only kind whose layers all compute in float64 when asked to; Llama's norms go through float32. Weights
    # as wide as a trained model's: much wider ones amplify the rounding of one forward up to the float32 bound.
    folder = tempfile.TemporaryDirectory()
    KEPT.append(folder)
    return write_tiny_model(Path(folder.name), kind="gpt2", spread=0.05)


KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders live until the process ends."""


class Group:
    """A backend that can be suspended: its state and cache move to a new backend through the object plane."""

    def __init__(self, *, accumulation: str, dtype: str, normaliser: str) -> None:
        self._settings = (accumulation, dtype, normaliser)
        self._objects = MemoryObjectPlane()
        self._num_seals = 0
        self.backend = self._build()
        self.backend.load_model()
        self.backend.publish(state=STATE, weights=WEIGHTS)

    def suspend(self) -> None:
        key = self.seal()
        successor = self._spare
        self._spare = self.backend
        successor.load_state(STATE)
        successor.load_seal(key)
        self.backend = successor

    def seal(self) -> ObjectKey:
        self._num_seals += 1
        key = ObjectKey("seal", "actor", self._num_seals)
        self.backend.seal(key)
        return key

    def cache(self) -> dict[str, Tensor]:
        key = self.seal()
        return {name: tensor.clone() for name, tensor in self._objects.get(key).items()}

    def restart(self) -> None:
        self.backend.load_state(STATE)

    @functools.cached_property
    def _spare(self) -> TorchBackend:
        return self._build()

    def _build(self) -> TorchBackend:
        accumulation, dtype, normaliser = self._settings
        return TorchBackend(
            model_folder=model_folder(),
            objects=self._objects,
            config=TorchTrainingConfig.model_validate({"accumulation": accumulation}),
            algorithm=AlgorithmConfig.model_validate(
                {"normaliser": normaliser, "constant_tokens": 7 if normaliser == "constant" else None}
            ),
            optimizer=OptimizerConfig(),
            dtype=dtype,
        )


@functools.cache
def group_of(accumulation: str, dtype: str, normaliser: str) -> Group:
    return Group(accumulation=accumulation, dtype=dtype, normaliser=normaliser)


@st.composite
def sample_sets(draw: st.DrawFn) -> list[Sample]:
    return [
        make_sample(
            number,
            prompt=draw(st.lists(tokens, min_size=1, max_size=8)),
            response=draw(st.lists(tokens, min_size=1, max_size=8)),
            advantage=draw(st.floats(-3, 3)),
            temperature=draw(st.sampled_from([0.5, 1.0, 1.3])),
        )
        for number in range(draw(st.integers(2, 6)))
    ]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Sample], list[list[Sample]], list[bool]]:
    """Samples; a cut of a permutation of them into micro-batches; where the process group is suspended."""
    samples = draw(sample_sets())
    order = draw(st.permutations(samples))
    ends = sorted(draw(st.sets(st.integers(1, len(samples) - 1))))
    cut = [order[start:end] for start, end in zip([0, *ends], [*ends, len(order)], strict=True)]
    return samples, cut, draw(st.lists(st.booleans(), min_size=len(cut), max_size=len(cut)))


def run(group: Group, micro_batches: Sequence[Sequence[Sample]], suspensions: Sequence[bool]) -> dict[str, Tensor]:
    group.restart()
    for samples, is_suspended in zip(micro_batches, suspensions, strict=True):
        group.backend.accumulate(samples)
        if is_suspended:
            group.suspend()
    return group.cache()


def flat_gradient(cache: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for name, tensor in cache.items() if name.startswith("gradient/")])


@pytest.mark.parametrize("normaliser", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(schedule=schedules())
@settings(max_examples=15, deadline=None)
def test_any_schedule_gives_the_gradient_of_the_serial_one(
    dtype: str, normaliser: str, schedule: tuple[list[Sample], list[list[Sample]], list[bool]]
) -> None:
    samples, micro_batches, suspensions = schedule
    group = group_of("float", dtype, normaliser)
    alone = [flat_gradient(run(group, [[sample]], [False])) for sample in samples]
    yardstick = sum(gradient.norm().item() for gradient in alone)
    serial = run(group, [samples], [False])
    streamed = run(group, micro_batches, suspensions)
    for gradient in (flat_gradient(streamed), torch.stack(alone).sum(dim=0)):
        error = (gradient - flat_gradient(serial)).norm().item()
        assert error <= FLOAT_BOUND[dtype] * yardstick
    assert (streamed["num_samples"], streamed["num_tokens"]) == (serial["num_samples"], serial["num_tokens"])


@pytest.mark.parametrize("normaliser", ["token_mean", "sample_mean"])
@given(schedule=schedules())
@settings(max_examples=15, deadline=None)
def test_any_schedule_gives_the_same_bits_when_canonical(
    normaliser: str, schedule: tuple[list[Sample], list[list[Sample]], list[bool]]
) -> None:
    samples, micro_batches, suspensions = schedule
    group = group_of("canonical", "float32", normaliser)
    serial = run(group, [samples], [False])
    streamed = run(group, micro_batches, suspensions)
    assert all(torch.equal(streamed[name], tensor) for name, tensor in serial.items())
