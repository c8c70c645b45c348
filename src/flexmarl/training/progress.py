"""Where the gradient of one policy's streamed step stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexmarl.core.ids import ObjectKey, PolicyName, SampleKey
from flexmarl.core.records import Denominators, Seal
from flexmarl.scheduling import ReadySample, cut_by_tokens
from flexmarl.training.metrics import combine_metrics


@dataclass(slots=True, kw_only=True)
class GradientProgress:
    """Samples that wait, and what the gradient cache holds."""

    step: int
    ready: dict[SampleKey, ReadySample] = field(default_factory=dict)
    ever_leased: dict[SampleKey, ReadySample] = field(default_factory=dict)
    """A death gives some of them back."""
    num_groups: int = 0
    """Closed groups with samples."""
    num_group_tokens: int = 0
    """Of all their samples."""
    num_leases: int = 0
    """For micro-batch ids that are never used twice."""
    seal: Seal | None = None
    unsealed: list[str] = field(default_factory=list)
    denominators: Denominators = field(default_factory=Denominators)
    metrics: dict[str, float] = field(default_factory=dict)
    sealed_metrics: dict[ObjectKey, dict[str, float]] = field(default_factory=dict)
    """The metrics of what each seal holds."""

    @property
    def has_gradient(self) -> bool:
        """At least one sample is in the gradient cache."""
        return self.denominators.num_samples > 0

    @property
    def num_ready_tokens(self) -> int:
        """Tokens of the samples that wait."""
        return sum(sample.num_tokens for sample in self.ready.values())

    @property
    def mean_group_tokens(self) -> float:
        """Tokens per closed group; 0 before the first."""
        return self.num_group_tokens / max(self.num_groups, 1)

    def add_ready(self, samples: Sequence[ReadySample]) -> None:
        """Take the samples of a closed group."""
        self.ready.update((sample.key, sample) for sample in samples)
        self.num_groups += bool(samples)
        self.num_group_tokens += sum(sample.num_tokens for sample in samples)

    def micro_batches(self) -> tuple[str, ...]:
        """Return the ids of every micro-batch in the gradient cache, in order."""
        return (*(self.seal.micro_batches if self.seal else ()), *self.unsealed)

    def take_batch(self, *, max_tokens: int) -> tuple[str, tuple[ReadySample, ...]]:
        """Cut the next micro-batch off the ready samples; return its id within the policy, and its samples."""
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
        self.sealed_metrics[object_key] = dict(self.metrics)
        return Seal(
            policy=policy,
            step=self.step,
            object_key=object_key,
            predecessor=self.seal.object_key if self.seal else None,
            micro_batches=self.micro_batches(),
            denominators=self.denominators,
        )

    def restart(self, released: Sequence[SampleKey]) -> None:
        """Go back to what `seal` holds; `released` samples are ready again."""
        seal = self.seal
        self.unsealed.clear()
        self.denominators = seal.denominators if seal else Denominators()
        self.metrics = dict(self.sealed_metrics[seal.object_key]) if seal else {}
        self.ready.update((key, self.ever_leased[key]) for key in released)
