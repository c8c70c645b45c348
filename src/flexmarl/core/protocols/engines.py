"""The seams of the two engines: what generates tokens, and what trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexmarl.core.ids import ObjectKey, RequestId
from flexmarl.core.messages import Generated, GenerationFailed
from flexmarl.core.records import (
    Completion,
    Denominators,
    GenerationRequest,
    Sample,
    TokenColumn,
    TokenValues,
    TurnRow,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStep:
    """What one step of an inference engine did."""

    answers: tuple[Generated | GenerationFailed, ...] = ()
    cost_s: float = 0.0


class InferenceBackend(Protocol):
    """An engine that generates tokens with the weights of one policy. It knows nothing of versions."""

    def load_weights(self, weights: ObjectKey) -> str:
        """Copy the weights from the object plane and return the digest of the parameters now held.

        Requests that are unfinished go on with the new weights from their next token on, with what they have generated
        so far. Raises BackendError when names or shapes do not fit.
        """
        ...

    def num_generated(self) -> "Mapping[RequestId, int]":
        """Return the number of tokens generated so far for every unfinished request."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ConfigError when it can never be served (prompt over the context)."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request, if it is there."""
        ...

    def step(self, describe: "CompletionStamp") -> BackendStep:
        """Advance every running sequence and let waiting ones in; return what finished."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet answered."""
        ...


class CompletionStamp(Protocol):
    """Adds to an engine's result what only the instance knows."""

    def __call__(
        self, request: GenerationRequest, tokens: Sequence[int], logprobs: Sequence[float], *, is_stopped: bool
    ) -> Completion:
        """Return the completion with versions and instance id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """What a micro-batch added to the gradient cache."""

    denominators: Denominators
    metrics: Mapping[str, float]
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """A token column of some turns, in their order."""

    values: tuple[TokenValues, ...]
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an optimizer update did."""

    metrics: Mapping[str, float]
    cost_s: float = 0.0


class TrainingBackend(Protocol):
    """The training state of one policy: parameters, optimizer, gradient cache. It knows nothing of leases."""

    def load_model(self) -> None:
        """Take the policy's model folder, with a fresh optimizer and an empty cache."""
        ...

    def load_state(self, state: ObjectKey) -> None:
        """Take a full state from the object plane, with an empty cache."""
        ...

    def load_seal(self, seal: ObjectKey) -> Denominators:
        """Continue from a sealed gradient cache and return what it counts."""
        ...

    def accumulate(self, samples: Sequence[Sample]) -> GradientResult:
        """Add the unnormalised gradient sums of `samples` to the cache; parameters do not change."""
        ...

    def score(self, column: TokenColumn, turns: Sequence[TurnRow]) -> ScoreResult:
        """Compute a token column, forward only: under the current weights, or under the reference model.

        Parameters, optimizer and gradient cache stay as they are.
        """
        ...

    def seal(self, key: ObjectKey) -> Denominators:
        """Write the cache to the object plane."""
        ...

    def update(self, denominators: Denominators) -> UpdateResult:
        """Divide once, clip, update, empty the cache."""
        ...

    def publish(self, *, state: ObjectKey, weights: ObjectKey) -> str:
        """Put state and weights on the object plane; return the digest of the weights."""
        ...

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        ...

    @property
    def state_bytes(self) -> int:
        """Size of the full state."""
        ...
