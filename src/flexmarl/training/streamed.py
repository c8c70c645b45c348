"""The gradient work of a step with one update: micro-batches are trained as groups close, and sealed now and then.

Invariants (tests name them):

* a sample is leased to one incarnation at a time, and counted once per step;
* when an incarnation dies, what it had not sealed is ready again, and only that;
* a seal object that no record names is deleted.
"""

from typing import assert_never

from flexmarl.core.errors import InvariantError
from flexmarl.core.events import MicroBatchLeased
from flexmarl.core.ids import HolderId, ObjectKey, SampleKey
from flexmarl.core.messages import (
    AccumulateGradient,
    ApplyUpdate,
    CacheSealed,
    GradientAccumulated,
    SealCache,
    UpdateApplied,
)
from flexmarl.core.protocols import Lease
from flexmarl.core.records import Sample, Seal
from flexmarl.scheduling import ReadySample, taper_tokens
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.metrics import combine_metrics
from flexmarl.training.progress import GradientProgress
from flexmarl.training.staleness import check_staleness
from flexmarl.training.state import PolicyStanding, PolicyUpdate, TrainingSeams
from flexmarl.training.work import DeathCounts, GradientFact, InterruptedWork, describe_lease


class StreamedStep:
    """Implements `StepWork`."""

    def __init__(
        self, process: Incarnation, standing: PolicyStanding, seams: TrainingSeams, *, step: int, may_train: bool
    ) -> None:
        """Begin without samples. With `may_train=False` they wait for `allow_training`."""
        self._process = process
        self._standing = standing
        self._seams = seams
        self._gradient = GradientProgress(step=step)
        self._deaths = DeathCounts()
        self._may_train = may_train
        self._num_open_groups = 0
        self._new_version: int | None = None
        """The version that the commit in progress makes."""
        self._update: PolicyUpdate | None = None
        """Of the commit in progress, once it is done."""
        self._lease: Lease | None = None
        self._is_leasing = False
        """A lease is asked for, held or being acknowledged."""
        self._new_seal: ObjectKey | None = None
        """Being written, or written and not recorded."""
        self._is_recovering = False

    # --- commands -----------------------------------------------------------------------------------------------------

    def add_ready(self, samples: list[ReadySample]) -> None:
        """Take the samples of a closed group."""
        self._gradient.add_ready(samples)

    def set_open_groups(self, num_open: int) -> None:
        """So many groups of the step may still close: micro-batches taper with them."""
        self._num_open_groups = num_open

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        self._may_train = True

    def finish(self, policy_version: int) -> None:
        """Train what is left, then update to `policy_version`."""
        self._new_version = policy_version

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens of the samples that wait and may be trained."""
        return self._gradient.num_ready_tokens if self._may_train else 0

    @property
    def is_needed(self) -> bool:
        """It must update."""
        return (
            self._new_version is not None
            and self._update is None
            and not self._gradient.ready
            and self._gradient.has_gradient
        )

    @property
    def is_done(self) -> bool:
        """It is updated, or there was nothing to update with."""
        if self._update is not None:
            return True
        is_busy = self._is_leasing or self._is_recovering or self._new_seal is not None
        return not is_busy and not self._gradient.ready and not self._gradient.has_gradient

    @property
    def is_between_updates(self) -> bool:
        """Never: parameters do not change from the first lease of a step to its one update."""
        return False

    @property
    def seal_key(self) -> ObjectKey | None:
        """The newest recorded seal."""
        return self._gradient.seal.object_key if self._gradient.seal else None

    def result(self) -> PolicyUpdate:
        """Return the newest state; unchanged when the step had no sample for this policy."""
        return self._update or self._standing.as_update(denominators=self._gradient.denominators)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Seal when it is time, else train, else update."""
        if self._is_recovering:
            return
        if len(self._gradient.unsealed) >= self._seams.config.seal_every:
            self._seal()
        elif self._gradient.ready and self._may_train:
            self._lease_next()
        elif self.is_needed:
            self._apply_update()

    def leave(self) -> bool:
        """Seal first what is not sealed."""
        if self._gradient.unsealed:
            self._seal()
            return False
        return True

    def _lease_next(self) -> None:
        max_tokens = taper_tokens(
            max_tokens=self._seams.config.micro_batch_tokens,
            num_open_groups=self._num_open_groups,
            mean_group_tokens=self._gradient.mean_group_tokens,
        )
        name, batch = self._gradient.take_batch(max_tokens=max_tokens)
        policy = self._standing.policy
        micro_batch_id = f"{policy}/{name}"
        keys = tuple(sorted(sample.key for sample in batch))
        num_tokens = sum(sample.num_tokens for sample in batch)
        self._seams.events.emit(
            MicroBatchLeased(policy=policy, micro_batch_id=micro_batch_id, keys=keys, num_tokens=num_tokens)
        )

        def leased(result: tuple[Lease, list[Sample]]) -> None:
            self._lease, samples = result
            step = self._gradient.step
            check_staleness(samples, step=step, max_staleness=self._seams.max_staleness)
            self._process.command(
                AccumulateGradient(micro_batch_id=micro_batch_id, policy_version=step, samples=tuple(samples))
            )

        self._is_leasing = True
        work = self._seams.store.lease(policy, self._process.holder, micro_batch_id, keys)
        self._process.store_work(f"lease {micro_batch_id}", work, leased)

    def _seal(self) -> None:
        self._new_seal = self._standing.next_seal_key()
        self._process.command(SealCache(object_key=self._new_seal))

    def _apply_update(self) -> None:
        assert self._new_version is not None
        self._process.command(
            ApplyUpdate(
                policy_version=self._new_version,
                denominators=self._gradient.denominators,
                state_key=self._standing.key("state", self._new_version),
                weights_key=self._standing.key("weights", self._new_version),
            )
        )

    # --- facts --------------------------------------------------------------------------------------------------------

    def take(self, fact: GradientFact) -> None:
        """Handle the answer to a command."""
        match fact:
            case GradientAccumulated():
                self._acknowledge(fact)
            case CacheSealed():
                self._record_seal(fact)
            case UpdateApplied():
                self._updated(fact)
            case _:
                assert_never(fact)

    def _acknowledge(self, fact: GradientAccumulated) -> None:
        lease = self._lease
        if lease is None or lease.micro_batch_id != fact.micro_batch_id:
            raise InvariantError(f"{self._process.worker_id} reports {fact.micro_batch_id}, leased is {lease}")

        def acknowledged(_: None) -> None:
            self._lease = None
            self._is_leasing = False
            self._gradient.add(fact.micro_batch_id, fact.denominators, fact.metrics)

        work = self._seams.store.acknowledge(lease)
        self._process.store_work(f"acknowledge {fact.micro_batch_id}", work, acknowledged)

    def _record_seal(self, fact: CacheSealed) -> None:
        gradient = self._gradient
        if fact.denominators != gradient.denominators:
            raise InvariantError(
                f"{self._process.worker_id} sealed {fact.denominators}, expected {gradient.denominators}"
            )
        self._deaths.finished([SealCache.__name__])
        seal = gradient.sealed(fact.object_key, self._standing.policy)

        def stored(_: None) -> None:
            self._new_seal = None
            self._set_seal(seal)
            gradient.unsealed.clear()

        work = self._seams.store.seal(self._process.holder, seal)
        self._process.store_work(f"seal {fact.object_key}", work, stored)

    def _updated(self, fact: UpdateApplied) -> None:
        if fact.policy_version != self._new_version:
            raise InvariantError(
                f"{self._process.worker_id} made version {fact.policy_version}, not {self._new_version}"
            )
        gradient = self._gradient
        micro_batches = gradient.micro_batches()
        self._standing.published(fact.policy_version, fact.weights_digest)
        self._update = self._standing.as_update(
            denominators=gradient.denominators,
            micro_batches=micro_batches,
            update_sizes=(len(micro_batches),),
            metrics=combine_metrics(gradient.metrics, fact.metrics),
        )
        self._set_seal(None)
        gradient.unsealed.clear()

    def _set_seal(self, seal: Seal | None) -> None:
        """Make a seal the current one; the object of the one before is not needed any more."""
        old, self._gradient.seal = self._gradient.seal, seal
        if old is not None and (seal is None or seal.object_key != old.object_key):
            self._seams.runtime.objects.delete(old.object_key)

    # --- deaths -------------------------------------------------------------------------------------------------------

    def died(self, busy_with: str | None) -> InterruptedWork:
        """Count a death with the rows of the lease, or else with the seal or the update."""
        lease = self._lease
        items: tuple[SampleKey | str, ...] = ()
        if lease is not None:
            items = lease.keys
        elif busy_with in (SealCache.__name__, ApplyUpdate.__name__):
            items = (busy_with,)
        return InterruptedWork(num_deaths=self._deaths.count(items), doing=describe_lease(lease, busy_with))

    def recover(self, dead_holder: HolderId) -> None:
        """Make ready again what the dead incarnation had not sealed.

        An update that is done is kept: its state is on the object plane, and its rows stay acknowledged.
        """
        if self._update is not None or not self._gradient.ever_leased:
            return
        if self._new_version is not None:
            # It may have died between publishing and reporting: the next incarnation publishes these keys again.
            for kind in ("state", "weights"):
                self._seams.runtime.objects.delete(self._standing.key(kind, self._new_version))
        self._lease = None
        self._is_recovering = True

        async def release() -> tuple[list[SampleKey], Seal | None]:
            await self._seams.store.release(dead_holder)
            # Not only what that returned: the lease of a batch may have been refused, since the holder was fenced.
            ready = await self._seams.store.ready(self._standing.policy, self._gradient.step)
            keys = [key for key, _ in ready if key in self._gradient.ever_leased]
            return keys, await self._seams.store.current_seal(self._standing.policy, self._gradient.step)

        self._process.store_work(f"release {dead_holder}", release(), self._released)

    def _released(self, result: tuple[list[SampleKey], Seal | None]) -> None:
        keys, seal = result
        self._is_leasing = self._is_recovering = False
        unrecorded, self._new_seal = self._new_seal, None
        if unrecorded is not None and (seal is None or seal.object_key != unrecorded):
            self._seams.runtime.objects.delete(unrecorded)
        self._set_seal(seal)
        self._gradient.restart(keys)
