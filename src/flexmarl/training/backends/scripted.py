"""Training without a model: deterministic integer arithmetic, for tests and simulation. Loads no torch and no folder.

It behaves as a model would where schedules can go wrong: the gradient of a sample depends on its key, its tokens, its
scored columns, its advantage, what the loss makes of them *and the weights*; an update depends on a moment that only
the full state carries; sums of integers do not depend on order, so any lost, repeated or misplaced sample, and any
wrong column, shows in the digest of the weights.
"""

import hashlib
import math
import sys
from array import array
from collections.abc import Mapping, Sequence

from flexmarl.algorithms import (
    check_columns,
    count_denominators,
    denominator,
    is_weighted,
    token_slope,
    token_weight,
)
from flexmarl.config import AlgorithmConfig, ScriptedTrainingConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.protocols import GradientResult, ObjectPlane, ScoreResult, UpdateResult
from flexmarl.core.records import Denominators, Sample, TokenColumn, TokenValues, TurnRow
from flexmarl.core.rng import derive_seed
from flexmarl.training.metrics import COMPUTED_TOKENS_SUM, GRAD_NORM_SUM, NUM_UPDATES_SUM

ADVANTAGE_UNIT = 1 << 16
"""Advantages count in 65 536ths."""
FORWARD_FRAC = 1 / 3
"""Modelled time of a forward, as a share of a forward and backward."""
OBJECT_TIMEOUT_S = 300.0
"""A publication that takes longer has failed."""
_INT64 = 1 << 64


class ScriptedBackend:
    """A `TrainingBackend` whose parameters are integers."""

    def __init__(
        self,
        *,
        policy: PolicyName,
        seed: int,
        objects: ObjectPlane,
        config: ScriptedTrainingConfig,
        algorithm: AlgorithmConfig,
    ) -> None:
        """Hold nothing yet; the parameters of version 0 derive from `policy` and `seed`."""
        self._policy = policy
        self._seed = seed
        self._objects = objects
        self._config = config
        self._algorithm = algorithm
        self._parameters: list[int] = []
        self._moment: list[int] = []
        self._num_updates = 0
        self._gradient: list[int] = []
        self._denominators = Denominators()

    def load_model(self) -> None:
        """Take the parameters of version 0."""
        block = f"{derive_seed('scripted_model', self._policy, self._seed)}".encode()
        self._parameters = _hashed_units(block, self._config.num_parameters)
        self._moment = [0] * self._config.num_parameters
        self._num_updates = 0
        self._clear()

    def load_state(self, state: ObjectKey) -> None:
        """Take parameters, moment and update count from the object plane."""
        content = self._read(
            state, {"parameters": self.num_parameters, "moment": self.num_parameters, "num_updates": 1}
        )
        self._parameters, self._moment = content["parameters"], content["moment"]
        self._num_updates = content["num_updates"][0]
        self._clear()

    def load_seal(self, seal: ObjectKey) -> Denominators:
        """Continue from a sealed cache."""
        content = self._read(seal, {"gradient": self.num_parameters, "counts": 2})
        self._gradient = content["gradient"]
        num_samples, num_tokens = content["counts"]
        self._denominators = Denominators(num_samples=num_samples, num_tokens=num_tokens)
        return self._denominators

    def accumulate(self, samples: Sequence[Sample]) -> GradientResult:
        """Add the integer gradients of `samples` to the cache."""
        weights = _pack({"parameters": self._parameters}).digest()
        num_tokens = 0
        for sample in samples:
            gradient = self._gradient_of(sample, weights)
            self._gradient = [total + part for total, part in zip(self._gradient, gradient, strict=True)]
            num_tokens += len(sample.turn.prompt_tokens) + len(sample.turn.response_tokens)
        counted = count_denominators(samples)
        self._denominators = self._denominators.plus(counted)
        metrics = {COMPUTED_TOKENS_SUM: float(num_tokens)}
        return GradientResult(denominators=counted, metrics=metrics, cost_s=self._config.token_s * num_tokens)

    def score(self, column: TokenColumn, turns: Sequence[TurnRow]) -> ScoreResult:
        """Return log-probs in [-3, 0): old ones follow from the weights held, reference ones from the policy's name."""
        model = self.weights_digest() if column is TokenColumn.OLD_LOGPROBS else f"reference of {self._policy}"
        values = tuple(TokenValues(key=turn.key, values=_logprobs(turn, model)) for turn in turns)
        num_tokens = sum(len(turn.prompt_tokens) + len(turn.response_tokens) for turn in turns)
        return ScoreResult(values=values, cost_s=self._config.token_s * num_tokens * FORWARD_FRAC)

    def seal(self, key: ObjectKey) -> Denominators:
        """Write the cache to the object plane."""
        counts = [self._denominators.num_samples, self._denominators.num_tokens]
        self._write(key, {"gradient": self._gradient, "counts": counts})
        return self._denominators

    def update(self, denominators: Denominators) -> UpdateResult:
        """Divide once, mix into the moment, subtract it from the parameters, empty the cache."""
        if denominators != self._denominators:
            raise InvariantError(f"the cache counts {self._denominators}, the update {denominators}")
        divisor = denominator(denominators, self._algorithm)
        mean = [total // divisor for total in self._gradient]
        self._moment = [_wrap(9 * old // 10 + new) for old, new in zip(self._moment, mean, strict=True)]
        self._parameters = [_wrap(old - new) for old, new in zip(self._parameters, self._moment, strict=True)]
        self._num_updates += 1
        self._clear()
        norm = float(sum(value * value for value in mean)) ** 0.5 / ADVANTAGE_UNIT
        return UpdateResult(metrics={GRAD_NORM_SUM: norm, NUM_UPDATES_SUM: 1.0}, cost_s=self._config.update_s)

    def publish(self, *, state: ObjectKey, weights: ObjectKey) -> str:
        """Put state and weights on the object plane; return the digest of the weights."""
        content = {"parameters": self._parameters, "moment": self._moment, "num_updates": [self._num_updates]}
        self._write(state, content)
        return self._write(weights, {"parameters": self._parameters})

    def weights_digest(self) -> str:
        """Return the digest of the weights held."""
        return _pack({"parameters": self._parameters}).digest()

    @property
    def num_parameters(self) -> int:
        """Integers trained."""
        return self._config.num_parameters

    @property
    def state_bytes(self) -> int:
        """Size of parameters, moment and update count, padding included."""
        sizes = [self.num_parameters, self.num_parameters, 1]
        return plan_layout((str(place), "int64", (size,), 8 * size) for place, size in enumerate(sizes)).num_bytes

    def _gradient_of(self, sample: Sample, weights: str) -> list[int]:
        check_columns(sample, self._algorithm)
        turn = sample.turn
        weight = token_weight(len(turn.response_tokens), self._algorithm)
        scale = round(self._mean_slope(sample, weights) * weight * ADVANTAGE_UNIT)
        columns = [sample.token_columns.get(column) for column in TokenColumn]
        text = f"{weights} {turn.key} {turn.prompt_tokens} {turn.response_tokens} {columns}"
        return [unit * scale for unit in _hashed_units(text.encode(), self._config.num_parameters)]

    def _mean_slope(self, sample: Sample, weights: str) -> float:
        """Return the mean over the sample's tokens of what the loss makes of its advantage and columns."""
        if not sample.token_columns and not is_weighted(self._algorithm):
            return sample.advantage
        turn = sample.turn
        nothing = (None,) * len(turn.response_tokens)
        tokens = zip(
            _logprobs(turn, weights),
            turn.logprobs,
            sample.token_columns.get(TokenColumn.OLD_LOGPROBS, nothing),
            sample.token_columns.get(TokenColumn.REFERENCE_LOGPROBS, nothing),
            strict=True,
        )
        slopes = [
            token_slope(advantage=sample.advantage, pi=pi, mu=mu, old=old, reference=reference, config=self._algorithm)
            for pi, mu, old, reference in tokens
        ]
        return math.fsum(slopes) / len(slopes)

    def _clear(self) -> None:
        self._gradient = [0] * self._config.num_parameters
        self._denominators = Denominators()

    def _read(self, key: ObjectKey, sizes: Mapping[str, int]) -> dict[str, list[int]]:
        packed = self._objects.packed(key)
        found = {entry.name: entry.num_bytes // 8 for entry in packed.layout.entries}
        if found != sizes:
            raise BackendError(f"{key} holds {found}, this policy needs {dict(sizes)} (name: integers)")
        return {name: _to_ints(packed.bytes_of(name)) for name in sizes}

    def _write(self, key: ObjectKey, content: Mapping[str, Sequence[int]]) -> str:
        return self._objects.set(key, _pack(content)).result(OBJECT_TIMEOUT_S).digest


def _logprobs(turn: TurnRow, model: str) -> tuple[float, ...]:
    """Return what `model` thinks of the response tokens: numbers in [-3, 0) that follow from both."""
    text = f"{model} {turn.key} {turn.prompt_tokens} {turn.response_tokens}"
    units = _hashed_units(text.encode(), len(turn.response_tokens))
    return tuple(3.0 * (unit - (1 << 15)) / (1 << 16) for unit in units)


def _hashed_units(block: bytes, count: int) -> list[int]:
    """Return `count` integers in [-2**15, 2**15) that follow from `block`."""
    stream = hashlib.shake_128(block).digest(2 * count)
    return [int.from_bytes(stream[start : start + 2], "little", signed=True) for start in range(0, 2 * count, 2)]


def _wrap(value: int) -> int:
    return (value + _INT64 // 2) % _INT64 - _INT64 // 2


def _pack(content: Mapping[str, Sequence[int]]) -> PackedObject:
    layout = plan_layout((name, "int64", (len(values),), 8 * len(values)) for name, values in content.items())
    buffer = bytearray(layout.num_bytes)
    for entry in layout.entries:
        try:
            values = array("q", content[entry.name])
        except OverflowError as error:
            raise BackendError(f"{entry.name} left the range of 64-bit integers") from error
        if sys.byteorder == "big":
            values.byteswap()
        buffer[entry.offset_bytes : entry.offset_bytes + entry.num_bytes] = values.tobytes()
    return PackedObject(layout=layout, buffer=memoryview(buffer))


def _to_ints(content: memoryview) -> list[int]:
    values = array("q", bytes(content))
    if sys.byteorder == "big":
        values.byteswap()
    return list(values)
