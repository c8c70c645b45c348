"""What the training engine keeps of a policy: its state between steps, its gradient within one, its newest update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from flexmarl.config import TrainingConfig
from flexmarl.core.ids import ObjectKey, PolicyName, SampleKey
from flexmarl.core.messages import ApplyUpdate, SealCache
from flexmarl.core.protocols import EventSink, ExperienceStore, Inbox, Lease, Runtime
from flexmarl.core.records import Denominators, Seal
from flexmarl.scheduling import ReadySample, cut_by_tokens
from flexmarl.training.metrics import combine_metrics


class TrainerState(Enum):
    """Life of a process group."""

    DORMANT = "dormant"
    ACTIVATING = "activating"
    RUNNING = "running"
    SUSPENDING = "suspending"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """A policy's state between steps, on the object plane."""

    weights_version: int
    state_key: ObjectKey | None
    """None: take the policy's model folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """A policy's newest state, and what the step that made it did."""

    policy: PolicyName
    weights_version: int
    state_key: ObjectKey
    weights_key: ObjectKey
    digest: str
    denominators: Denominators
    micro_batches: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSeams:
    """What trainers work with."""

    config: TrainingConfig
    runtime: Runtime
    inbox: Inbox
    events: EventSink
    store: ExperienceStore


@dataclass(slots=True, kw_only=True)
class GradientProgress:
    """Where the gradient of one policy's step stands."""

    step: int = 0
    ready: dict[SampleKey, ReadySample] = field(default_factory=dict)
    ever_leased: dict[SampleKey, ReadySample] = field(default_factory=dict)
    """A death gives some of them back."""
    num_leases: int = 0
    """For micro-batch ids that are never used twice."""
    seal: Seal | None = None
    unsealed: list[str] = field(default_factory=list)
    denominators: Denominators = field(default_factory=Denominators)
    metrics: dict[str, float] = field(default_factory=dict)
    sealed_metrics: dict[ObjectKey, dict[str, float]] = field(default_factory=dict)
    """The metrics of what each seal holds."""
    num_deaths: dict[SampleKey | str, int] = field(default_factory=dict)
    """How often a process group has died while it worked on a sample, or on a command that has none."""

    @property
    def has_gradient(self) -> bool:
        """At least one sample is in the gradient cache."""
        return self.denominators.num_samples > 0

    @property
    def num_ready_tokens(self) -> int:
        """Tokens of the samples that wait."""
        return sum(sample.num_tokens for sample in self.ready.values())

    def micro_batches(self) -> tuple[str, ...]:
        """Return the ids of every micro-batch in the gradient cache."""
        return (*(self.seal.micro_batches if self.seal else ()), *self.unsealed)

    def take_batch(self, *, max_tokens: int) -> tuple[str, tuple[ReadySample, ...]]:
        """Cut the next micro-batch off the ready samples; return its id within policy and step, and its samples."""
        batch = cut_by_tokens(list(self.ready.values()), max_tokens=max_tokens)[0]
        for sample in batch:
            self.ever_leased[sample.key] = self.ready.pop(sample.key)
        self.num_leases += 1
        return f"s{self.step}/m{self.num_leases - 1}", batch

    def add(self, micro_batch_id: str, denominators: Denominators, metrics: Mapping[str, float]) -> None:
        """Count an acknowledged micro-batch."""
        self.unsealed.append(micro_batch_id)
        self.denominators = self.denominators.plus(denominators)
        self.metrics = combine_metrics(self.metrics, metrics)

    def sealed(self, object_key: ObjectKey, policy: PolicyName) -> Seal:
        """Return the record of a seal that holds all that is in the cache now."""
        self.num_deaths.pop(SealCache.__name__, None)
        self.sealed_metrics[object_key] = dict(self.metrics)
        return Seal(
            policy=policy,
            step=self.step,
            object_key=object_key,
            predecessor=self.seal.object_key if self.seal else None,
            micro_batches=self.micro_batches(),
            denominators=self.denominators,
        )

    def died_with(self, lease: Lease | None, command: str | None) -> int:
        """Count a death while it worked on a lease, or on a command; return the deaths of what has the most.

        Others' progress in between does not count: what died with the update trains its unsealed samples again first.
        """
        work: Sequence[SampleKey | str] = ()
        if lease is not None:
            work = lease.keys
        elif command in (SealCache.__name__, ApplyUpdate.__name__):
            work = (command,)
        for item in work:
            self.num_deaths[item] = self.num_deaths.get(item, 0) + 1
        return max(self.num_deaths.values(), default=0)

    def restart(self, seal: Seal | None, released: Sequence[SampleKey]) -> None:
        """Go back to what a dead incarnation had sealed; `released` samples are ready again."""
        self.seal = seal
        self.unsealed.clear()
        self.denominators = seal.denominators if seal else Denominators()
        self.metrics = dict(self.sealed_metrics[seal.object_key]) if seal else {}
        self.ready.update((key, self.ever_leased[key]) for key in released)
