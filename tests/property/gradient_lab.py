"""A step's gradient by any schedule: process groups that share a few backends as slots are shared.

A schedule gives each policy's samples to its process group in some order and some cut, and interrupts: a suspension
seals the cache and ends the incarnation, a death ends it without a seal and its unsealed samples train again. When
another policy needs the backend, the holder is suspended.
"""

import functools
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from random import Random

import torch
from gradient_worlds import POLICIES, Samples, random_cut
from torch import Tensor

from flexmarl.algorithms import token_columns
from flexmarl.config import AlgorithmConfig, OptimizerConfig, ScriptedTrainingConfig, TorchTrainingConfig
from flexmarl.core.ids import ObjectKey, PolicyName, SampleKey
from flexmarl.core.messages import (
    AccumulateGradient,
    Activate,
    Activated,
    ApplyUpdate,
    CacheSealed,
    GradientAccumulated,
    Score,
    Scored,
    SealCache,
    UpdateApplied,
)
from flexmarl.core.records import Denominators, Sample
from flexmarl.testing.training import MemoryObjectPlane, StillClock, write_tiny_model
from flexmarl.training.backends.scripted import ScriptedBackend
from flexmarl.training.backends.torch import TorchBackend
from flexmarl.training.process_group import DigestingBackend, ProcessGroupService

FLOAT_BOUND = {"float32": 1e-6, "float64": 1e-12}
"""G1: error of the gradient, as a share of the sum of the norms of the samples' gradients."""
NUM_SLOTS = 2
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Live until the process ends."""


@functools.cache
def tiny_folder(seed: int, spread: float = 0.05) -> Path:
    # GPT-2: the only kind whose layers all compute in float64 when asked to; Llama's norms go through float32. Weights
    # as wide as a trained model's: much wider ones amplify the rounding of one forward up to the float32 bound.
    FOLDERS.append(tempfile.TemporaryDirectory())
    return write_tiny_model(Path(FOLDERS[-1].name), kind="gpt2", spread=spread, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is computed, and in which arithmetic."""

    kind: str
    """`scripted`, `canonical` (float32), `float32` or `float64`."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    backend_class: type[TorchBackend] = TorchBackend
    """For tests that plant a fault."""

    @property
    def is_exact(self) -> bool:
        """Every schedule gives the same bits."""
        return self.kind in ("scripted", "canonical")


class Interrupt(StrEnum):
    NONE = "none"
    SEAL = "seal"
    SUSPEND = "suspend"
    DEATH = "death"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Micro-batches in the order of the training engine, and what happens after each."""

    micro_batches: Sequence[tuple[PolicyName, Sequence[Sample], Interrupt]]
    num_slots: int = NUM_SLOTS

    @classmethod
    def serial(cls, samples: Samples) -> "Schedule":
        """All samples of a policy in one micro-batch."""
        return cls(micro_batches=[(policy, own, Interrupt.NONE) for policy, own in samples.items()])

    @classmethod
    def random(cls, samples: Samples, rng: Random) -> "Schedule":
        """Any order, cut and interrupts."""
        cut = [(policy, part) for policy, own in samples.items() for part in random_cut(own, rng)]
        rng.shuffle(cut)
        return cls(
            micro_batches=[
                (policy, part, rng.choice([Interrupt.NONE, Interrupt.NONE, *Interrupt])) for policy, part in cut
            ],
            num_slots=rng.randint(1, NUM_SLOTS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a step made of one policy."""

    cache: bytes
    """Of the whole step, sealed."""
    gradient: Tensor
    """The unnormalised sum in it, flat, in float64; empty when scripted."""
    denominators: Denominators
    state: ObjectKey
    state_digest: str
    parameters: Tensor
    """After the update, flat, in float64; empty when scripted."""
    metrics: Mapping[str, float]


@functools.cache
def lab_of(setting: Setting) -> "Lab":
    return Lab(setting)


class Lab:
    """Backends of one setting, each a slot that any policy can take, and the policies' first states."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.objects = MemoryObjectPlane()
        self._numbers = count(1)
        self._backends: dict[tuple[int, PolicyName | None], DigestingBackend] = {}
        self.first_states = {}
        for number, policy in enumerate(POLICIES):
            backend = self._build(policy, number)
            backend.load_model()
            self.first_states[policy] = self.key("state", policy)
            backend.publish(state=self.first_states[policy], weights=self.key("weights", policy))

    def key(self, kind: str, policy: PolicyName) -> ObjectKey:
        return ObjectKey(kind, policy, next(self._numbers))

    def backend(self, slot: int, policy: PolicyName) -> DigestingBackend:
        """The backend of a slot; a scripted one belongs to a policy as well."""
        place = (slot, policy if self.setting.kind == "scripted" else None)
        if place not in self._backends:
            self._backends[place] = self._build(policy, 0)
        return self._backends[place]

    def _build(self, policy: PolicyName, model_seed: int) -> DigestingBackend:
        setting = self.setting
        if setting.kind == "scripted":
            return ScriptedBackend(
                policy=policy,
                seed=0,
                objects=self.objects,
                config=ScriptedTrainingConfig(num_parameters=4),
                algorithm=setting.algorithm,
            )
        is_canonical = setting.kind == "canonical"
        return setting.backend_class(
            model_folder=tiny_folder(model_seed),
            objects=self.objects,
            config=TorchTrainingConfig(accumulation="canonical" if is_canonical else "float"),
            algorithm=setting.algorithm,
            optimizer=setting.optimizer,
            # Far from the policies: where pi and ref are close, the KL term is all cancellation, and with an advantage
            # of zero the rounding of float32 log-probs is as large as what remains.
            reference_folder=tiny_folder(9, spread=0.2),
            dtype="float32" if is_canonical else setting.kind,
        )

    def scored(self, step: int, states: Mapping[PolicyName, ObjectKey], samples: Samples) -> dict[SampleKey, Sample]:
        """The samples with the columns they need, scored in one go."""
        run = _StepRun(self, step, states, NUM_SLOTS)
        return {sample.turn.key: sample for policy, own in samples.items() for sample in run.score(policy, own)}

    def train(self, step: int, states: Mapping[PolicyName, ObjectKey], schedule: Schedule) -> dict[PolicyName, Trained]:
        """One step with one update per policy."""
        run = _StepRun(self, step, states, schedule.num_slots)
        return run.execute(schedule.micro_batches)

    def train_updates(
        self, step: int, state: ObjectKey, parts: Sequence[Sequence[Sequence[Sample]]], deaths: Sequence[int] = ()
    ) -> Trained:
        """One step of a policy with an update for each part, given in micro-batches.

        After so many micro-batches as each of `deaths` says, the incarnation dies and the step starts again.
        """
        policy = parts[0][0][0].turn.policy
        distinct = {sample.turn.key: sample for part in parts for samples in part for sample in samples}
        for death in deaths:
            run = _StepRun(self, step, {policy: state}, 1)
            self._run_updates(run, parts, run.score(policy, list(distinct.values())), death)
        run = _StepRun(self, step, {policy: state}, 1)
        trained = self._run_updates(run, parts, run.score(policy, list(distinct.values())))
        assert trained is not None
        return trained

    def _run_updates(
        self, run: "_StepRun", parts: Sequence[Sequence[Sequence[Sample]]], scored: Sequence[Sample], death: int = -1
    ) -> Trained | None:
        """Return the last update, or None when the incarnation died before the micro-batch of number `death`."""
        by_key = {sample.turn.key: sample for sample in scored}
        policy = scored[0].turn.policy
        trained = None
        for number, part in enumerate(parts):
            for samples in part:
                if run.num_accumulated == death:
                    return None
                run.accumulate(policy, [by_key[sample.turn.key] for sample in samples])
            trained = run.update(policy, is_last=number == len(parts) - 1)
        return trained

    def yardstick(self, step: int, state: ObjectKey, samples: Sequence[Sample]) -> tuple[float, Tensor]:
        """The sum of the norms of the samples' gradients, each computed alone, and their sum."""
        policy = samples[0].turn.policy
        alone = []
        for sample in samples:
            run = _StepRun(self, step, {policy: state}, 1)
            run.accumulate(policy, run.score(policy, [sample]))
            alone.append(run.cache(policy)[1])
        return sum(gradient.norm().item() for gradient in alone), torch.stack(alone).sum(dim=0)


class _StepRun:
    """Process groups of one step: incarnations come and go, states and seals stay."""

    def __init__(self, lab: Lab, step: int, states: Mapping[PolicyName, ObjectKey], num_slots: int) -> None:
        self._lab = lab
        self._step = step
        self._states = states
        self._free = list(range(num_slots))
        self._active: dict[PolicyName, tuple[ProcessGroupService, int]] = {}
        self._seals: dict[PolicyName, ObjectKey] = {}
        self._sealed: dict[PolicyName, Denominators] = {}
        self._unsealed: dict[PolicyName, list[tuple[Sequence[Sample], Denominators]]] = {}
        self.num_accumulated = 0

    def execute(
        self, micro_batches: Sequence[tuple[PolicyName, Sequence[Sample], Interrupt]]
    ) -> dict[PolicyName, Trained]:
        queue = deque(micro_batches)
        while queue:
            policy, samples, interrupt = queue.popleft()
            self.accumulate(policy, self.score(policy, samples))
            if interrupt is Interrupt.SEAL:
                self._seal(policy)
            elif interrupt is Interrupt.SUSPEND:
                self._suspend(policy)
            elif interrupt is Interrupt.DEATH:
                queue.extend((policy, lost, Interrupt.NONE) for lost, _ in self._unsealed.pop(policy))
                self._free.append(self._active.pop(policy)[1])
        return {policy: self.update(policy) for policy in sorted({policy for policy, _, _ in micro_batches})}

    def score(self, policy: PolicyName, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the columns they lack."""
        found = list(samples)
        for column in token_columns(self._lab.setting.algorithm):
            if column in samples[0].token_columns:
                continue
            turns = tuple(sample.turn for sample in samples)
            scored = self._ask(policy, Score(score_id="s", column=column, turns=turns))
            assert isinstance(scored, Scored)
            found = [
                replace(sample, token_columns={**sample.token_columns, column: each.values})
                for sample, each in zip(found, scored.values, strict=True)
            ]
        return found

    def accumulate(self, policy: PolicyName, samples: Sequence[Sample]) -> None:
        self.num_accumulated += 1
        command = AccumulateGradient(
            micro_batch_id=f"m{self.num_accumulated}", policy_version=self._step, samples=tuple(samples)
        )
        done = self._ask(policy, command)
        assert isinstance(done, GradientAccumulated)
        self._unsealed.setdefault(policy, []).append((samples, done.denominators))

    def cache(self, policy: PolicyName) -> tuple[bytes, Tensor]:
        """The content of the gradient cache, and the gradient in it."""
        self._seal(policy)
        key = self._seals[policy]
        return bytes(self._lab.objects.packed(key).buffer), self._flat(key, "gradient/")

    def update(self, policy: PolicyName, *, is_last: bool = True) -> Trained:
        denominators = self._denominators(policy)
        cache, gradient = self.cache(policy) if is_last else (b"", torch.empty(0))
        keys = [self._lab.key(kind, policy) if is_last else None for kind in ("state", "weights")]
        command = ApplyUpdate(
            policy_version=self._step + 1, denominators=denominators, state_key=keys[0], weights_key=keys[1]
        )
        applied = self._ask(policy, command)
        assert isinstance(applied, UpdateApplied)
        for content in (self._seals, self._sealed, self._unsealed):
            content.pop(policy, None)
        state = keys[0] or self._states[policy]
        return Trained(
            cache=cache,
            gradient=gradient,
            denominators=denominators,
            state=state,
            state_digest=self._lab.objects.packed(state).digest(),
            parameters=self._flat(state, "parameters/"),
            metrics=applied.metrics,
        )

    def _flat(self, key: ObjectKey, prefix: str) -> Tensor:
        tensors = [tensor for name, tensor in self._lab.objects.get(key).items() if name.startswith(prefix)]
        return torch.cat([tensor.double().flatten() for tensor in tensors]) if tensors else torch.empty(0)

    def _denominators(self, policy: PolicyName) -> Denominators:
        total = self._sealed.get(policy, Denominators())
        for _, counted in self._unsealed.get(policy, ()):
            total = total.plus(counted)
        return total

    def _seal(self, policy: PolicyName) -> None:
        key = self._lab.key("seal", policy)
        sealed = self._ask(policy, SealCache(object_key=key))
        assert isinstance(sealed, CacheSealed)
        assert sealed.denominators == self._denominators(policy)
        self._seals[policy], self._sealed[policy] = key, sealed.denominators
        self._unsealed.pop(policy, None)

    def _suspend(self, policy: PolicyName) -> None:
        self._seal(policy)
        self._free.append(self._active.pop(policy)[1])

    def _ask(self, policy: PolicyName, command: object) -> object:
        if policy not in self._active:
            self._activate(policy)
        return _answer(self._active[policy][0], command)

    def _activate(self, policy: PolicyName) -> None:
        if not self._free:
            self._suspend(next(iter(self._active)))
        slot = self._free.pop(0)
        service = ProcessGroupService(policy, self._lab.backend(slot, policy), StillClock())
        activate = Activate(
            policy=policy, policy_version=self._step, state=self._states[policy], seal=self._seals.get(policy)
        )
        assert isinstance(_answer(service, activate), Activated)
        self._active[policy] = (service, slot)


def _answer(service: ProcessGroupService, command: object) -> object:
    service.handle(command)
    step = service.step()
    assert step is not None
    (fact,) = step.messages
    return fact


def check_same(setting: Setting, serial: Trained, other: Trained, yardstick: float) -> None:
    """G1: exact arithmetic gives the same bits; floats differ by their rounding."""
    assert other.denominators == serial.denominators
    if setting.is_exact:
        assert other.cache == serial.cache
        assert other.state_digest == serial.state_digest
        return
    error = (other.gradient - serial.gradient).norm().item()
    bound = FLOAT_BOUND[setting.kind] * yardstick
    assert error <= bound, f"error {error:g}, bound {bound:g}"
