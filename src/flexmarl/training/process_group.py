"""The service of one policy's training process: commands of the orchestrator onto a training backend.

Invariants:
    Every command is answered by exactly one fact, in order; what cannot be answered raises and ends the process.
    A micro-batch is added to the gradient cache once, however often its command arrives.
    An update divides by what this process counted *and* the orchestrator counted, or does not happen.
    After an update the cache is empty: the samples of one step may come again for its next update.
    No sample is newer than the version being trained.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flexmarl.config import AlgorithmConfig, OptimizerConfig, ScriptedTrainingConfig, TorchTrainingConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.core.messages import (
    AccumulateGradient,
    Activate,
    Activated,
    ApplyUpdate,
    CacheSealed,
    GradientAccumulated,
    PublishState,
    Score,
    Scored,
    SealCache,
    StatePublished,
    UpdateApplied,
)
from flexmarl.core.protocols import Clock, ServiceStep, TrainingBackend, WorkerContext
from flexmarl.core.records import Denominators, TurnRow
from flexmarl.training.metrics import combine_metrics, sample_metrics


class DigestingBackend(TrainingBackend, Protocol):
    """A training backend that can tell which weights it holds."""

    def weights_digest(self) -> str:
        """Return the digest that `publish` would return now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Processed:
    """A micro-batch in the gradient cache."""

    keys: tuple[SampleKey, ...]
    fact: GradientAccumulated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A fact, once the modelled time of its command has passed."""

    fact: object
    cost_s: float = 0.0


class ProcessGroupService:
    """Trains one policy, one command per step."""

    def __init__(self, policy: PolicyName, backend: DigestingBackend, clock: Clock) -> None:
        """Serve `policy` with a backend that holds nothing yet; the first command must be Activate."""
        self._policy = policy
        self._backend = backend
        self._clock = clock
        self._commands: deque[object] = deque()
        self._is_active = False
        self._denominators = Denominators()
        self._processed: dict[str, _Processed] = {}
        self._keys: set[SampleKey] = set()

    def handle(self, message: object) -> None:
        """Queue a command."""
        self._commands.append(message)

    def step(self) -> ServiceStep | None:
        """Execute the oldest command and answer it.

        Raises:
            InvariantError: the command does not fit the state, or its denominators differ from what was accumulated.
            BackendError: the backend failed. The gradient cache must not be used after either.
        """
        if not self._commands:
            return None
        answer = self._execute(self._commands.popleft())
        return ServiceStep(messages=(answer.fact,), cost_s=answer.cost_s)

    def close(self) -> None:
        """Forget the queued commands; the backend's memory goes with this object."""
        self._commands.clear()

    def _execute(self, command: object) -> _Answer:
        if not isinstance(command, Activate) and not self._is_active:
            raise InvariantError(f"process group {self._policy} got {type(command).__name__} before Activate")
        match command:
            case Activate():
                return self._activate(command)
            case AccumulateGradient():
                return self._accumulate(command)
            case Score():
                return self._score(command)
            case SealCache():
                counted = self._backend.seal(command.object_key)
                self._expect(counted, "the sealed cache")
                return _Answer(
                    fact=CacheSealed(policy=self._policy, object_key=command.object_key, denominators=counted)
                )
            case ApplyUpdate():
                return self._update(command)
            case PublishState():
                digest = self._backend.publish(state=command.state_key, weights=command.weights_key)
                return _Answer(fact=StatePublished(policy=self._policy, weights_digest=digest))
            case _:
                raise InvariantError(f"process group {self._policy} does not know {type(command).__name__}")

    def _activate(self, command: Activate) -> _Answer:
        if command.policy != self._policy:
            raise InvariantError(f"process group {self._policy} was asked to activate {command.policy}")
        start_s = self._clock.now_s()
        self._forget_cache()
        if command.state is None:
            self._backend.load_model()
        else:
            self._backend.load_state(command.state)
        if command.seal is not None:
            self._denominators = self._backend.load_seal(command.seal)
        self._is_active = True
        fact = Activated(
            policy=self._policy,
            weights_digest=self._backend.weights_digest(),
            num_parameters=self._backend.num_parameters,
            state_bytes=self._backend.state_bytes,
            duration_s=self._clock.now_s() - start_s,
        )
        return _Answer(fact=fact)

    def _accumulate(self, command: AccumulateGradient) -> _Answer:
        keys = tuple(sample.turn.key for sample in command.samples)
        if known := self._processed.get(command.micro_batch_id):
            if known.keys != keys:
                raise InvariantError(f"micro-batch {command.micro_batch_id} came again with other samples")
            return _Answer(fact=known.fact)
        self._check_samples(command, keys)
        own_metrics = sample_metrics(command.samples, command.policy_version)
        start_s = self._clock.now_s()
        result = self._backend.accumulate(command.samples)
        self._denominators = self._denominators.plus(result.denominators)
        fact = GradientAccumulated(
            policy=self._policy,
            micro_batch_id=command.micro_batch_id,
            denominators=result.denominators,
            metrics=combine_metrics(result.metrics, own_metrics),
            duration_s=self._clock.now_s() - start_s + result.cost_s,
        )
        self._processed[command.micro_batch_id] = _Processed(keys=keys, fact=fact)
        self._keys.update(keys)
        return _Answer(fact=fact, cost_s=result.cost_s)

    def _check_samples(self, command: AccumulateGradient, keys: tuple[SampleKey, ...]) -> None:
        self._check_policy([sample.turn for sample in command.samples])
        repeated = self._keys.intersection(keys)
        if repeated or not keys or len(set(keys)) < len(keys):
            what = f"repeats {min(repeated)}, which is in the cache" if repeated else f"has the keys {keys[:4]}"
            raise InvariantError(f"micro-batch {command.micro_batch_id} of {self._policy} {what}")

    def _check_policy(self, turns: Sequence[TurnRow]) -> None:
        for turn in turns:
            if turn.policy != self._policy:
                raise InvariantError(f"{turn.key} belongs to {turn.policy}, not to {self._policy}")

    def _score(self, command: Score) -> _Answer:
        self._check_policy(command.turns)
        start_s = self._clock.now_s()
        result = self._backend.score(command.column, command.turns)
        fact = Scored(
            policy=self._policy,
            score_id=command.score_id,
            column=command.column,
            values=result.values,
            duration_s=self._clock.now_s() - start_s + result.cost_s,
        )
        return _Answer(fact=fact, cost_s=result.cost_s)

    def _update(self, command: ApplyUpdate) -> _Answer:
        if (command.state_key is None) != (command.weights_key is None):
            raise InvariantError(f"an update publishes both or none, got {command.state_key} and {command.weights_key}")
        self._expect(command.denominators, f"the update to version {command.policy_version}")
        start_s = self._clock.now_s()
        result = self._backend.update(command.denominators)
        self._forget_cache()
        digest = ""
        if command.state_key is not None and command.weights_key is not None:
            digest = self._backend.publish(state=command.state_key, weights=command.weights_key)
        fact = UpdateApplied(
            policy=self._policy,
            policy_version=command.policy_version,
            weights_digest=digest,
            metrics=result.metrics,
            duration_s=self._clock.now_s() - start_s + result.cost_s,
        )
        return _Answer(fact=fact, cost_s=result.cost_s)

    def _expect(self, denominators: Denominators, where: str) -> None:
        if denominators != self._denominators:
            raise InvariantError(
                f"process group {self._policy} accumulated {self._denominators}, but {where} has {denominators}"
            )

    def _forget_cache(self) -> None:
        self._denominators = Denominators()
        self._processed.clear()
        self._keys.clear()


def build_process_group(context: WorkerContext, options: Mapping[str, Any]) -> ProcessGroupService:
    """Build the service of one policy from plain data.

    Args:
        context: What the runtime gives a worker.
        options: `policy`, `model_folder`, `reference_folder` ("" when nothing needs a reference model), `seed`, and
            `backend`, `algorithm`, `optimizer` as plain configuration.
    """
    policy = PolicyName(options["policy"])
    kind = options["backend"].get("kind", "torch")
    build = _build_scripted if kind == "scripted" else _build_torch
    return ProcessGroupService(policy, build(context, options), context.clock)


def _build_scripted(context: WorkerContext, options: Mapping[str, Any]) -> DigestingBackend:
    from flexmarl.training.backends.scripted import ScriptedBackend

    return ScriptedBackend(
        policy=PolicyName(options["policy"]),
        seed=int(options["seed"]),
        objects=context.objects,
        config=ScriptedTrainingConfig.model_validate(options["backend"]),
        algorithm=AlgorithmConfig.model_validate(options["algorithm"]),
    )


def _build_torch(context: WorkerContext, options: Mapping[str, Any]) -> DigestingBackend:
    # Imported here: simulated runs must not load torch.
    from flexmarl.training.backends.torch import TorchBackend

    return TorchBackend(
        model_folder=Path(options["model_folder"]),
        objects=context.objects,
        config=TorchTrainingConfig.model_validate(options["backend"]),
        algorithm=AlgorithmConfig.model_validate(options["algorithm"]),
        optimizer=OptimizerConfig.model_validate(options["optimizer"]),
        reference_folder=Path(options["reference_folder"]) if options["reference_folder"] else None,
    )
