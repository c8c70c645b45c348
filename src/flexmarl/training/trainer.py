"""What the training engine knows of one policy."""

from dataclasses import dataclass, field
from enum import Enum

from flexmarl.core.ids import HolderId, ObjectKey, PolicyName, SampleKey, WorkerId
from flexmarl.core.protocols import Lease, Timer, WorkerHandle
from flexmarl.core.records import Denominators, Seal
from flexmarl.scheduling import PolicyDemand, ReadySample


class TrainerState(Enum):
    """Life of a process group."""

    DORMANT = "dormant"
    ACTIVATING = "activating"
    RUNNING = "running"
    SUSPENDING = "suspending"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """A policy's state between steps, as objects on the object plane."""

    weights_version: int
    state_key: ObjectKey | None
    """None: take the policy's model folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """What a step did to a policy."""

    policy: PolicyName
    weights_version: int
    state_key: ObjectKey
    weights_key: ObjectKey
    digest: str
    denominators: Denominators
    micro_batches: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One policy's process group, its slot, and where its gradient stands. Changed by the engine only."""

    policy: PolicyName
    state: TrainerState = TrainerState.DORMANT
    slot: int | None = None
    handle: WorkerHandle | None = None
    incarnation: int = 0
    num_deaths: int = 0
    """Since its last finished command."""
    waiting_since_s: float = 0.0

    state_key: ObjectKey | None = None
    weights_version: int = 0
    digest: str = ""
    must_publish: bool = True
    """Its state is not yet on the object plane (the run has just begun)."""

    ready: dict[SampleKey, ReadySample] = field(default_factory=dict)
    leased: dict[SampleKey, ReadySample] = field(default_factory=dict)
    """Every sample of the step that was ever leased: a death gives some of them back."""
    lease: Lease | None = None
    num_leases: int = 0
    """Within the step, for micro-batch ids that are never reused."""
    seal: Seal | None = None
    unsealed: list[str] = field(default_factory=list)
    denominators: Denominators = field(default_factory=Denominators)
    metrics: dict[str, float] = field(default_factory=dict)
    update: PolicyUpdate | None = None
    """Of the step in commit, once it is done."""

    busy_with: str | None = None
    """The command or store operation in flight."""
    timer: Timer | None = None

    @property
    def worker_id(self) -> WorkerId:
        """Id of the process of this incarnation."""
        return WorkerId(f"trainer-{self.policy}.{self.incarnation}")

    @property
    def holder(self) -> HolderId:
        """Who holds the leases of this incarnation."""
        return HolderId(f"{self.policy}#{self.incarnation}")

    def key(self, kind: str, version: int) -> ObjectKey:
        """Name an object of this policy."""
        return ObjectKey(kind, self.policy, version)

    def micro_batches(self) -> tuple[str, ...]:
        """Return the ids of every micro-batch in the gradient cache."""
        return (*(self.seal.micro_batches if self.seal else ()), *self.unsealed)

    def demand(self, *, now_s: float, may_train: bool, must_update: bool) -> PolicyDemand:
        """Return what an allocation rule sees of it."""
        backlog = sum(sample.num_tokens for sample in self.ready.values()) if may_train else 0
        has_gradient = self.denominators.num_samples > 0
        return PolicyDemand(
            policy=self.policy,
            num_backlog_tokens=backlog,
            is_needed=self.must_publish or (must_update and self.update is None and has_gradient),
            waiting_s=now_s - self.waiting_since_s,
            slot=self.slot,
            is_idle=self.state is TrainerState.RUNNING and self.busy_with is None,
            is_leaving=self.state is TrainerState.SUSPENDING,
        )

    def begin_step(self) -> None:
        """Forget the last step."""
        self.ready.clear()
        self.leased.clear()
        self.num_leases = 0
        self.seal = None
        self.unsealed.clear()
        self.denominators = Denominators()
        self.metrics.clear()
        self.update = None
