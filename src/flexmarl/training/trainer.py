"""One policy's process group as the engine drives it: one command at a time, leases, seals, update, recovery.

Invariants (tests name them):

* a sample is leased to one incarnation at a time, and counted once per step;
* when an incarnation dies, what it had not sealed is ready again, and only that;
* parameters do not change from the first lease of a step to its update.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.events import MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import HolderId, ObjectKey, PolicyName, SampleKey, WorkerId
from flexmarl.core.messages import (
    AccumulateGradient,
    Activate,
    Activated,
    ApplyUpdate,
    CacheSealed,
    GradientAccumulated,
    PublishState,
    SealCache,
    StatePublished,
    UpdateApplied,
    WorkerExited,
    WorkerReady,
)
from flexmarl.core.protocols import Lease, WorkerSpec
from flexmarl.core.records import Sample, Seal
from flexmarl.scheduling import PolicyDemand, ReadySample
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.state import GradientProgress, PolicyState, PolicyUpdate, TrainerState, TrainingSeams

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Trainer:
    """One policy's process group. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        policy: PolicyName,
        make_spec: Callable[[WorkerId], WorkerSpec],
        seams: TrainingSeams,
        on_change: Callable[[], None],
    ) -> None:
        """Start nothing yet; `on_change` is called whenever slots or a waiting caller may be affected."""
        self.policy = policy
        self.state = TrainerState.DORMANT
        self.slot: int | None = None
        self._process = Incarnation(policy, seams)
        self.must_publish = True
        """Its state is not yet on the object plane: the run has just begun."""
        self._make_spec = make_spec
        self._seams = seams
        self._on_change = on_change
        self._num_deaths = 0
        """Since its last finished command; to load its state is no progress."""
        self._waiting_since_s = 0.0
        self._state_key: ObjectKey | None = None
        self._weights_version = 0
        self._digest = ""
        self._gradient = GradientProgress()
        self._update: PolicyUpdate | None = None
        """Of the commit in progress, once it is done."""
        self._new_version: int | None = None
        """The version that the commit in progress makes."""
        self._may_train = False
        self._lease: Lease | None = None
        self._num_seals = 0
        """Over the life of the trainer: numbers of seals are never reused."""
        self._is_closing = False

    # --- commands of the engine ---------------------------------------------------------------------------------------

    def open(self, state: PolicyState) -> None:
        """Take the state to begin with."""
        self._state_key = state.state_key
        self._weights_version = state.weights_version
        self._waiting_since_s = self._seams.runtime.clock.now_s()

    def begin_step(self, step: int, *, may_train: bool) -> None:
        """Forget the last step."""
        self._gradient = GradientProgress(step=step)
        self._update = None
        self._new_version = None
        self._may_train = may_train

    def add_ready(self, samples: list[ReadySample]) -> None:
        """Samples whose group has closed."""
        if not self._gradient.ready:
            self._waiting_since_s = self._seams.runtime.clock.now_s()
        self._gradient.ready.update((sample.key, sample) for sample in samples)
        self.advance()

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        self._may_train = True
        self.advance()

    def update(self, policy_version: int) -> None:
        """Train what is left, then update to `policy_version`."""
        self._new_version = policy_version
        self.advance()

    def activate(self, slot: int) -> None:
        """Start the process group on a slot."""
        self.slot = slot
        self.state = TrainerState.ACTIVATING
        self._process.start(self._make_spec, self._receive)

    def suspend(self) -> bool:
        """Give the slot up; False when the gradient cache must be sealed first, which has been started."""
        if self._gradient.unsealed:
            self._seal()
            return False
        self.state = TrainerState.SUSPENDING
        self._process.stop()
        return True

    def close(self) -> None:
        """Start nothing any more; deaths are expected from now on."""
        self._is_closing = True

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def is_step_done(self) -> bool:
        """The commit in progress has nothing more to do for this policy."""
        if self._update is not None:
            return True
        return not self._gradient.ready and self._process.busy_with is None and not self._gradient.has_gradient

    @property
    def can_be_allocated(self) -> bool:
        """An allocation rule may look at it: it is not waiting for the store to release a dead incarnation."""
        return self.slot is not None or self._process.busy_with is None

    def demand(self) -> PolicyDemand:
        """Return what an allocation rule sees of it."""
        return PolicyDemand(
            policy=self.policy,
            num_backlog_tokens=self._gradient.num_ready_tokens if self._may_train else 0,
            is_needed=self.must_publish or self._must_update,
            waiting_s=self._seams.runtime.clock.now_s() - self._waiting_since_s,
            slot=self.slot,
            is_idle=self.state is TrainerState.RUNNING and self._process.busy_with is None,
            is_leaving=self.state is TrainerState.SUSPENDING,
        )

    def result(self) -> PolicyUpdate:
        """Return the newest state; unchanged when the step had no sample for this policy."""
        if self._update is not None:
            return self._update
        return PolicyUpdate(
            policy=self.policy,
            weights_version=self._weights_version,
            state_key=self._key("state", self._weights_version),
            weights_key=self._key("weights", self._weights_version),
            digest=self._digest,
            denominators=self._gradient.denominators,
            micro_batches=(),
            metrics={},
        )

    def _key(self, kind: str, version: int) -> ObjectKey:
        return ObjectKey(kind, self.policy, version)

    @property
    def _must_update(self) -> bool:
        return (
            self._new_version is not None
            and self._update is None
            and not self._gradient.ready
            and self._gradient.has_gradient
        )

    # --- facts --------------------------------------------------------------------------------------------------------

    def _receive(self, worker_id: WorkerId, fact: object) -> None:
        self._seams.inbox.post(worker_id, fact, lambda: self._handle(worker_id, fact))

    def _handle(self, worker_id: WorkerId, fact: object) -> None:
        if worker_id != self._process.worker_id:
            return
        command = self._process.end_command()
        match fact:
            case WorkerExited():
                self._exited(fact, command)
                return
            case WorkerReady():
                seal = self._gradient.seal
                self._process.command(
                    Activate(
                        policy=self.policy,
                        policy_version=self._weights_version,
                        state=self._state_key,
                        seal=seal.object_key if seal else None,
                    )
                )
                return
            case Activated():
                self.state = TrainerState.RUNNING
                self._digest = fact.weights_digest
            case StatePublished():
                self.must_publish = False
                self._state_key = self._key("state", self._weights_version)
                self._digest = fact.weights_digest
            case GradientAccumulated():
                self._acknowledge(fact)
            case CacheSealed():
                self._record_seal(fact)
            case UpdateApplied():
                self._updated(fact)
            case _:
                raise InvariantError(f"{worker_id} sent an unexpected {type(fact).__name__}")
        if not isinstance(fact, Activated):
            self._num_deaths = 0
        self.advance()

    def _acknowledge(self, fact: GradientAccumulated) -> None:
        lease = self._lease
        if lease is None or lease.micro_batch_id != fact.micro_batch_id:
            raise InvariantError(f"{self._process.worker_id} reports {fact.micro_batch_id}, leased is {lease}")

        def acknowledged(_: None) -> None:
            self._lease = None
            self._gradient.add(fact.micro_batch_id, fact.denominators, fact.metrics)

        self._store_work(f"acknowledge {fact.micro_batch_id}", self._seams.store.acknowledge(lease), acknowledged)

    def _record_seal(self, fact: CacheSealed) -> None:
        gradient = self._gradient
        if fact.denominators != gradient.denominators:
            raise InvariantError(
                f"{self._process.worker_id} sealed {fact.denominators}, expected {gradient.denominators}"
            )
        seal = gradient.sealed(fact.object_key, self.policy)

        def stored(_: None) -> None:
            self._forget_seal()
            gradient.seal = seal
            gradient.unsealed.clear()

        self._store_work(f"seal {fact.object_key}", self._seams.store.seal(self._process.holder, seal), stored)

    def _updated(self, fact: UpdateApplied) -> None:
        if fact.policy_version != self._new_version:
            raise InvariantError(
                f"{self._process.worker_id} made version {fact.policy_version}, not {self._new_version}"
            )
        gradient = self._gradient
        self._weights_version = fact.policy_version
        self._state_key = self._key("state", fact.policy_version)
        self._digest = fact.weights_digest
        self._update = PolicyUpdate(
            policy=self.policy,
            weights_version=fact.policy_version,
            state_key=self._state_key,
            weights_key=self._key("weights", fact.policy_version),
            digest=fact.weights_digest,
            denominators=gradient.denominators,
            micro_batches=gradient.micro_batches(),
            metrics={**gradient.metrics, **fact.metrics},
        )
        self._forget_seal()
        gradient.unsealed.clear()

    def _exited(self, fact: WorkerExited, command: str | None) -> None:
        dead_holder = self._process.holder
        was_suspended = self.state is TrainerState.SUSPENDING and fact.is_expected
        self.slot = None
        self._process.ended()
        self._waiting_since_s = self._seams.runtime.clock.now_s()
        self.state = TrainerState.DORMANT
        if self._is_closing:
            return
        if not was_suspended:
            self._num_deaths += 1
            of_work = self._gradient.died_with(self._lease, command)
            if max(self._num_deaths, of_work) >= self._seams.config.max_attempts:
                self._seams.inbox.fail(self._too_many_deaths(fact.reason, command))
                return
            logger.warning("%s ended (%s); starting it again from its last seal", dead_holder, fact.reason)
            self._seams.events.emit(
                WorkerRestarted(worker=f"trainer-{self.policy}", incarnation=self._process.number, reason=fact.reason)
            )
            self._lease = None
            if self._update is None and self._gradient.ever_leased:
                # An update that is done is kept: its state is on the object plane, and its rows stay acknowledged.
                self._recover(dead_holder)
        self._on_change()

    def _recover(self, dead_holder: HolderId) -> None:
        """Make ready again what the dead incarnation had not sealed."""
        if self._new_version is not None:
            # It may have died between publishing and reporting: the next incarnation publishes these keys again.
            for kind in ("state", "weights"):
                self._seams.runtime.objects.delete(self._key(kind, self._new_version))
        gradient = self._gradient

        async def release() -> tuple[list[SampleKey], Seal | None]:
            keys = await self._seams.store.release(dead_holder)
            return keys, await self._seams.store.current_seal(self.policy, gradient.step)

        def released(result: tuple[list[SampleKey], Seal | None]) -> None:
            keys, seal = result
            gradient.restart(seal, keys)

        self._store_work(f"release {dead_holder}", release(), released)

    def _too_many_deaths(self, reason: str, command: str | None) -> BackendError:
        lease = self._lease
        doing = "no micro-batch" if command is None else f"{command} in flight"
        if lease is not None:
            rows = ", ".join(str(key) for key in lease.keys[:5])
            doing = f"micro-batch {lease.micro_batch_id} (rows {rows}{', ...' if len(lease.keys) > 5 else ''})"
        limit = self._seams.config.max_attempts
        return BackendError(
            f"the process group of policy {self.policy} ended {limit} times (training.max_attempts={limit}) "
            f"with {doing}; the last time: {reason}"
        )

    # --- decisions ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Give the process group its next command, if it can take one."""
        if self.state is TrainerState.RUNNING and self._process.busy_with is None and not self._is_closing:
            if self.must_publish:
                version = self._weights_version
                state_key, weights_key = self._key("state", version), self._key("weights", version)
                self._process.command(PublishState(state_key=state_key, weights_key=weights_key))
            elif len(self._gradient.unsealed) >= self._seams.config.seal_every:
                self._seal()
            elif self._gradient.ready and self._may_train:
                self._lease_next()
            elif self._must_update:
                self._apply_update()
        self._on_change()

    def _lease_next(self) -> None:
        name, batch = self._gradient.take_batch(max_tokens=self._seams.config.micro_batch_tokens)
        micro_batch_id = f"{self.policy}/{name}"
        keys = tuple(sorted(sample.key for sample in batch))
        self._seams.events.emit(
            MicroBatchLeased(
                policy=self.policy,
                micro_batch_id=micro_batch_id,
                keys=keys,
                num_tokens=sum(sample.num_tokens for sample in batch),
            )
        )

        def leased(result: tuple[Lease, list[Sample]]) -> None:
            self._lease, samples = result
            self._process.command(AccumulateGradient(micro_batch_id=micro_batch_id, samples=tuple(samples)))

        work = self._seams.store.lease(self.policy, self._process.holder, micro_batch_id, keys)
        self._store_work(f"lease {micro_batch_id}", work, leased)

    def _seal(self) -> None:
        self._num_seals += 1
        self._process.command(SealCache(object_key=self._key("seal", self._num_seals)))

    def _apply_update(self) -> None:
        assert self._new_version is not None
        self._process.command(
            ApplyUpdate(
                policy_version=self._new_version,
                denominators=self._gradient.denominators,
                state_key=self._key("state", self._new_version),
                weights_key=self._key("weights", self._new_version),
            )
        )

    def _forget_seal(self) -> None:
        if self._gradient.seal is not None:
            self._seams.runtime.objects.delete(self._gradient.seal.object_key)
            self._gradient.seal = None

    def _store_work(self, name: str, work: Coroutine[Any, Any, T], then: Callable[[T], None]) -> None:
        def done(result: T) -> None:
            then(result)
            self.advance()

        self._process.store_work(name, work, done)
