"""Trains one policy in one process: a transformers model whose parameters lie in the state arena.

Invariants:
    Parameters change in `load_*` and `update` only.
    After an error in `accumulate` the cache is undefined; after one in `update` so is the cache, not the state.
    The model is in eval mode: no dropout, so no random number is drawn and the swap set needs no generator state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexmarl.algorithms import count_denominators, denominator
from flexmarl.config import AlgorithmConfig, OptimizerConfig, TorchTrainingConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.protocols import GradientResult, ObjectPlane, ScoreResult, UpdateResult
from flexmarl.core.records import Denominators, Sample, TokenColumn, TurnRow
from flexmarl.models import FlatParameters, load_causal_lm
from flexmarl.training.backends.torch.arena import STEP, Arena, state_layout
from flexmarl.training.backends.torch.cache import GradientCache
from flexmarl.training.backends.torch.forwards import (
    ForwardBatch,
    check_projection,
    lone_forwards,
    plan_forwards,
    score_turns,
)
from flexmarl.training.backends.torch.gradients import backward
from flexmarl.training.backends.torch.optimizer import FlatAdamW
from flexmarl.training.backends.torch.shared_prompts import can_share_prompts
from flexmarl.training.metrics import GRAD_NORM_SUM, LEARNING_RATE_SUM, NUM_UPDATES_SUM, combine_metrics

OBJECT_TIMEOUT_S = 300.0
"""A publication that takes longer has failed."""


class _Runner:
    """A model and how turns go through it."""

    def __init__(self, model: Any, *, is_canonical: bool) -> None:
        check_projection(model)
        self.model = model
        self._is_canonical = is_canonical
        self._can_share_prompts = not is_canonical and can_share_prompts(model)

    def plan(self, turns: Sequence[TurnRow]) -> list[ForwardBatch]:
        """Return batches of similar length, or one turn at a time when canonical."""
        return lone_forwards(turns) if self._is_canonical else plan_forwards(turns, can_share=self._can_share_prompts)


class _Held:
    """A policy's model, state and gradient cache, once loaded."""

    def __init__(self, folder: Path, optimizer: OptimizerConfig, *, is_canonical: bool, dtype: str) -> None:
        self.model = load_causal_lm(folder, dtype=dtype)
        weights = FlatParameters(self.model).layout
        element = getattr(torch, dtype)
        self.state = Arena(state_layout(weights, element))
        self.flat = FlatParameters(self.model, buffer=self.state.buffer[: weights.num_bytes])
        _check_parameters(self.flat, element)
        self.runner = _Runner(self.model, is_canonical=is_canonical)
        size = weights.num_bytes
        self.optimizer = FlatAdamW(
            optimizer,
            parameters_E=self.state.section(0, size, element),
            exp_avg_E=self.state.section(size, size, element),
            exp_avg_sq_E=self.state.section(2 * size, size, element),
            step=self.state.tensor(STEP),
        )
        self.cache = GradientCache(weights, self.flat.tensors, is_canonical=is_canonical)


class TorchBackend:
    """A `TrainingBackend` over one transformers model."""

    def __init__(
        self,
        *,
        model_folder: Path,
        objects: ObjectPlane,
        config: TorchTrainingConfig,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        reference_folder: Path | None = None,
        dtype: str = "float32",
    ) -> None:
        """Hold nothing yet; `load_model` or `load_state` comes first.

        `reference_folder` is the frozen reference model, loaded when it first scores. `dtype` is that of parameters and
        state.
        """
        self._folder = model_folder
        self._reference_folder = reference_folder
        self._reference: _Runner | None = None
        self._objects = objects
        self._is_canonical = config.accumulation == "canonical"
        self._algorithm = algorithm
        self._optimizer_config = optimizer
        self._dtype = dtype
        self._loaded: _Held | None = None

    def load_model(self) -> None:
        """Take the model folder's weights, with a fresh optimizer and an empty cache."""
        self._loaded = None
        self._loaded = _Held(self._folder, self._optimizer_config, is_canonical=self._is_canonical, dtype=self._dtype)

    def load_state(self, state: ObjectKey) -> None:
        """Take a full state in one copy from the object plane, with an empty cache.

        Raises:
            BackendError: it is the state of another model.
        """
        if self._loaded is None:
            self.load_model()
        self._held.state.copy_from(self._objects.packed(state))
        self._held.cache.clear()

    def load_seal(self, seal: ObjectKey) -> Denominators:
        """Continue from a sealed cache."""
        self._held.cache.copy_from(self._objects.packed(seal))
        return self._held.cache.denominators

    def accumulate(self, samples: Sequence[Sample]) -> GradientResult:
        """Add the gradient sums of `samples`: batches of similar length, or one sample at a time when canonical."""
        held = self._held
        by_key = {sample.turn.key: sample for sample in samples}
        metrics: dict[str, float] = {}
        for forward in held.runner.plan([sample.turn for sample in samples]):
            metrics = combine_metrics(metrics, backward(held.model, forward, by_key, self._algorithm))
            held.cache.collect(count_denominators([by_key[turn.key] for turn in forward.turns]))
        return GradientResult(denominators=count_denominators(samples), metrics=metrics)

    def score(self, column: TokenColumn, turns: Sequence[TurnRow]) -> ScoreResult:
        """Compute log-probs in the batches, and by the kernels, of training.

        Raises:
            BackendError: there is no reference model, it has other tokens, or a log-prob is not finite.
        """
        runner = self._held.runner if column is TokenColumn.OLD_LOGPROBS else self._reference_runner()
        values = score_turns(runner.model, runner.plan(turns))
        return ScoreResult(values=tuple(values[turn.key] for turn in turns))

    def seal(self, key: ObjectKey) -> Denominators:
        """Write the cache to the object plane."""
        self._objects.set(key, self._held.cache.packed()).result(OBJECT_TIMEOUT_S)
        return self._held.cache.denominators

    def update(self, denominators: Denominators) -> UpdateResult:
        """Divide once, clip, apply AdamW, empty the cache."""
        held = self._held
        if denominators != held.cache.denominators:
            raise InvariantError(f"the cache counts {held.cache.denominators}, the update {denominators}")
        mean_E = held.cache.mean(denominator(denominators, self._algorithm))
        grad_norm, rate = held.optimizer.update(mean_E)
        held.cache.clear()
        return UpdateResult(metrics={GRAD_NORM_SUM: grad_norm, LEARNING_RATE_SUM: rate, NUM_UPDATES_SUM: 1.0})

    def publish(self, *, state: ObjectKey, weights: ObjectKey) -> str:
        """Put state and weights on the object plane, one copy each; return the digest of the weights."""
        pending_state = self._objects.set(state, self._held.state.packed())
        pending_weights = self._objects.set(weights, self._held.flat.packed())
        pending_state.result(OBJECT_TIMEOUT_S)
        return pending_weights.result(OBJECT_TIMEOUT_S).digest

    def weights_digest(self) -> str:
        """Return the digest of the weights held."""
        return self._held.flat.digest()

    @property
    def num_parameters(self) -> int:
        """Trained parameters, tied ones once."""
        return sum(tensor.numel() for tensor in self._held.flat.tensors.values())

    @property
    def state_bytes(self) -> int:
        """Size of parameters, moments and step, padding included."""
        return self._held.state.layout.num_bytes

    def _reference_runner(self) -> _Runner:
        if self._reference is None:
            if self._reference_folder is None:
                raise BackendError("reference log-probs were asked for, but the policy has no reference model")
            model: Any = load_causal_lm(self._reference_folder, dtype=self._dtype).requires_grad_(requires_grad=False)
            own, found = (len(each.get_output_embeddings().weight) for each in (self._held.model, model))
            if own != found:
                raise BackendError(
                    f"algorithm.reference_model {self._reference_folder} has {found} tokens, the policy {own}: "
                    "use a model with the policy's tokenizer"
                )
            self._reference = _Runner(model, is_canonical=self._is_canonical)
        return self._reference

    @property
    def _held(self) -> _Held:
        if self._loaded is None:
            raise InvariantError("the backend was used before load_model or load_state")
        return self._loaded


def _check_parameters(flat: FlatParameters, dtype: torch.dtype) -> None:
    for name, tensor in flat.tensors.items():
        if not isinstance(tensor, torch.nn.Parameter) or tensor.dtype != dtype:
            raise BackendError(
                f"{name} is a {type(tensor).__name__} of {tensor.dtype}; the torch backend trains models that consist "
                f"of parameters of {dtype} alone"
            )
        tensor.requires_grad_()
