"""What the training engine keeps of a policy between steps, and what all of its parts work with."""

from dataclasses import dataclass
from enum import Enum

from flexmarl.config import TrainingConfig
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.protocols import EventSink, ExperienceStore, Inbox, Runtime
from flexmarl.core.records import Denominators, PolicyCommit


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
    """Over the step's trained samples, each counted once."""
    micro_batches: tuple[str, ...]
    """In the order in which their gradients were added."""
    update_sizes: tuple[int, ...] = ()
    """Number of micro-batches of each optimizer update, in order."""
    num_passes: int = 1
    """How often each sample was used."""
    metrics: dict[str, float]
    """Combined over micro-batches and updates; `metrics.step_metrics` forms what is reported."""

    def as_commit(self) -> PolicyCommit:
        """Return the policy's part of the commit record."""
        return PolicyCommit(
            weights_version=self.weights_version,
            weights_digest=self.digest,
            denominators=self.denominators,
            micro_batches=self.micro_batches,
            update_sizes=self.update_sizes,
            num_passes=self.num_passes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSeams:
    """What trainers work with."""

    config: TrainingConfig
    runtime: Runtime
    inbox: Inbox
    events: EventSink
    store: ExperienceStore
    run_seed: int
    max_staleness: int
    """Versions that a trained token may be older than the weights that it trains."""


@dataclass(slots=True, kw_only=True)
class PolicyStanding:
    """The newest weights of a policy."""

    policy: PolicyName
    weights_version: int = 0
    state_key: ObjectKey | None = None
    """Where an incarnation begins; None takes the policy's model folder."""
    digest: str = ""
    must_publish: bool = True
    """Its state is not yet on the object plane: the run has just begun."""
    num_seals: int = 0
    """Over the life of the trainer: numbers of seals are never reused."""

    def key(self, kind: str, version: int) -> ObjectKey:
        """Name an object of the policy."""
        return ObjectKey(kind, self.policy, version)

    def next_seal_key(self) -> ObjectKey:
        """Name a seal that has not been used before."""
        self.num_seals += 1
        return self.key("seal", self.num_seals)

    def published(self, weights_version: int, digest: str) -> None:
        """State and weights of a version are on the object plane under their keys."""
        self.weights_version = weights_version
        self.state_key = self.key("state", weights_version)
        self.digest = digest
        self.must_publish = False

    def as_update(
        self,
        *,
        denominators: Denominators | None = None,
        micro_batches: tuple[str, ...] = (),
        update_sizes: tuple[int, ...] = (),
        num_passes: int = 1,
        metrics: dict[str, float] | None = None,
    ) -> PolicyUpdate:
        """Return the newest weights with what made them; by default nothing did."""
        return PolicyUpdate(
            policy=self.policy,
            weights_version=self.weights_version,
            state_key=self.key("state", self.weights_version),
            weights_key=self.key("weights", self.weights_version),
            digest=self.digest,
            denominators=denominators or Denominators(),
            micro_batches=micro_batches,
            update_sizes=update_sizes,
            num_passes=num_passes,
            metrics=metrics or {},
        )
