"""The training engine: gradient work of every policy, on slots that policies share.

It leases ready samples, sends them to the policy's process group, acknowledges and seals, and at commit has each policy
updated once. Invariants (tests name them):

* a sample is leased to one incarnation of one process group at a time, and counted once per step;
* parameters do not change from the first lease of a step to its update;
* when a process group dies, what it had not sealed is ready again, and only that;
* a policy without samples keeps its weights.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, assert_never

from flexmarl.config import TrainingConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.events import AllocationDecided, MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import PolicyName, SampleKey, WorkerId
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
from flexmarl.core.protocols import EventSink, ExperienceStore, Inbox, Lease, Runtime, WorkerSpec
from flexmarl.core.records import Denominators, Sample, Seal
from flexmarl.scheduling import ReadySample, SlotAction, allocate_largest_backlog, cut_by_tokens
from flexmarl.training.trainer import PolicyState, PolicyUpdate, Trainer, TrainerState

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrainingEngine:
    """Owns the process groups of all trained policies. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        config: TrainingConfig,
        specs: Mapping[PolicyName, Callable[[WorkerId], WorkerSpec]],
        *,
        runtime: Runtime,
        inbox: Inbox,
        events: EventSink,
        store: ExperienceStore,
    ) -> None:
        """Take the maker of worker specs of each policy; start nothing yet."""
        self._config = config
        self._make_spec = specs
        self._runtime = runtime
        self._inbox = inbox
        self._events = events
        self._store = store
        self._trainers = {policy: Trainer(policy=policy) for policy in sorted(specs)}
        self._by_worker: dict[WorkerId, Trainer] = {}
        self._num_slots = config.num_slots or len(self._trainers)
        self._num_seals = 0
        """Over the life of the engine: numbers of seals are never reused."""
        self._step = 0
        self._may_train = False
        self._new_version: int | None = None
        """The version that the commit in progress makes."""
        self._on_opened: Callable[[], None] | None = None
        self._on_updated: Callable[[], None] | None = None
        self._is_closing = False

    # --- commands of the orchestrator ---------------------------------------------------------------------------------

    def open(self, states: Mapping[PolicyName, PolicyState], on_done: Callable[[], None]) -> None:
        """Take each policy's state and put it and its weights on the object plane, then call `on_done`."""
        self._on_opened = on_done
        for policy, state in states.items():
            trainer = self._trainers[policy]
            trainer.state_key = state.state_key
            trainer.weights_version = state.weights_version
            trainer.waiting_since_s = self._runtime.clock.now_s()
        self._allocate()

    def begin_step(self, step: int, *, may_train: bool) -> None:
        """Start counting a step. With `may_train=False` samples wait for `allow_training`."""
        self._step = step
        self._may_train = may_train
        self._new_version = None
        for trainer in self._trainers.values():
            trainer.begin_step()

    def add_ready(self, policy: PolicyName, samples: Sequence[ReadySample]) -> None:
        """Samples whose group has closed."""
        trainer = self._trainers[policy]
        if not trainer.ready:
            trainer.waiting_since_s = self._runtime.clock.now_s()
        trainer.ready.update((sample.key, sample) for sample in samples)
        self._advance(trainer)

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        self._may_train = True
        for trainer in self._trainers.values():
            self._advance(trainer)

    def update(self, policy_version: int, on_done: Callable[[], None]) -> None:
        """Train what is left, update every policy that has a gradient, publish, then call `on_done`.

        All samples of the step have been added before.
        """
        self._new_version = policy_version
        self._on_updated = on_done
        for trainer in self._trainers.values():
            self._advance(trainer)

    def close(self) -> None:
        """Start nothing any more; deaths are expected from now on."""
        self._is_closing = True

    # --- views --------------------------------------------------------------------------------------------------------

    def updates(self) -> dict[PolicyName, PolicyUpdate]:
        """Return what the finished `open` or `update` gave, by policy."""
        return {policy: self._result(trainer) for policy, trainer in self._trainers.items()}

    def pids(self) -> dict[str, int]:
        """Return the process ids of live process groups by policy."""
        return {
            trainer.policy: trainer.handle.pid
            for trainer in self._trainers.values()
            if trainer.handle is not None and trainer.handle.pid is not None
        }

    @property
    def num_waiting_samples(self) -> int:
        """Ready samples that no process group works on."""
        return sum(len(trainer.ready) for trainer in self._trainers.values())

    def _result(self, trainer: Trainer) -> PolicyUpdate:
        if trainer.update is not None:
            return trainer.update
        return PolicyUpdate(
            policy=trainer.policy,
            weights_version=trainer.weights_version,
            state_key=trainer.key("state", trainer.weights_version),
            weights_key=trainer.key("weights", trainer.weights_version),
            digest=trainer.digest,
            denominators=trainer.denominators,
            micro_batches=(),
            metrics={},
        )

    # --- facts --------------------------------------------------------------------------------------------------------

    def _receive(self, worker_id: WorkerId, fact: object) -> None:
        self._inbox.post(worker_id, fact, lambda: self._handle(worker_id, fact))

    def _handle(self, worker_id: WorkerId, fact: object) -> None:
        trainer = self._by_worker.get(worker_id)
        if trainer is None:
            return
        if isinstance(fact, WorkerExited):
            self._exited(worker_id, trainer, fact)
            return
        self._end_command(trainer)
        match fact:
            case WorkerReady():
                self._activate(trainer)
                return
            case Activated():
                trainer.state = TrainerState.RUNNING
                trainer.digest = fact.weights_digest
            case StatePublished():
                trainer.must_publish = False
                trainer.digest = fact.weights_digest
                trainer.state_key = trainer.key("state", trainer.weights_version)
            case GradientAccumulated():
                self._accumulated(trainer, fact)
                return
            case CacheSealed():
                self._sealed(trainer, fact)
                return
            case UpdateApplied():
                self._updated(trainer, fact)
            case _:
                raise InvariantError(f"{worker_id} sent an unexpected {type(fact).__name__}")
        trainer.num_deaths = 0
        self._advance(trainer)

    def _accumulated(self, trainer: Trainer, fact: GradientAccumulated) -> None:
        lease = trainer.lease
        if lease is None or lease.micro_batch_id != fact.micro_batch_id:
            raise InvariantError(f"{trainer.worker_id} reports {fact.micro_batch_id}, leased is {lease}")
        trainer.num_deaths = 0
        trainer.busy_with = "store.acknowledge"

        def acknowledged(_: None) -> None:
            trainer.busy_with = None
            trainer.lease = None
            trainer.unsealed.append(fact.micro_batch_id)
            trainer.denominators = trainer.denominators.plus(fact.denominators)
            for name, value in fact.metrics.items():
                combine = max if name.endswith("_max") else float.__add__
                trainer.metrics[name] = combine(trainer.metrics.get(name, 0.0), float(value))
            self._advance(trainer)

        work = self._store.acknowledge(lease)
        self._inbox.start(f"store.acknowledge {fact.micro_batch_id}", work, self._guard(trainer, acknowledged))

    def _sealed(self, trainer: Trainer, fact: CacheSealed) -> None:
        if fact.denominators != trainer.denominators:
            raise InvariantError(f"{trainer.worker_id} sealed {fact.denominators}, expected {trainer.denominators}")
        seal = Seal(
            policy=trainer.policy,
            step=self._step,
            object_key=fact.object_key,
            predecessor=trainer.seal.object_key if trainer.seal else None,
            micro_batches=trainer.micro_batches(),
            denominators=fact.denominators,
        )
        trainer.busy_with = "store.seal"

        def stored(_: None) -> None:
            trainer.busy_with = None
            if trainer.seal is not None:
                self._runtime.objects.delete(trainer.seal.object_key)
            trainer.seal = seal
            trainer.unsealed.clear()
            self._advance(trainer)

        work = self._store.seal(trainer.holder, seal)
        self._inbox.start(f"store.seal {fact.object_key}", work, self._guard(trainer, stored))

    def _updated(self, trainer: Trainer, fact: UpdateApplied) -> None:
        if fact.policy_version != self._new_version:
            raise InvariantError(f"{trainer.worker_id} made version {fact.policy_version}, not {self._new_version}")
        trainer.weights_version = fact.policy_version
        trainer.state_key = trainer.key("state", fact.policy_version)
        trainer.digest = fact.weights_digest
        trainer.update = PolicyUpdate(
            policy=trainer.policy,
            weights_version=fact.policy_version,
            state_key=trainer.state_key,
            weights_key=trainer.key("weights", fact.policy_version),
            digest=fact.weights_digest,
            denominators=trainer.denominators,
            micro_batches=trainer.micro_batches(),
            metrics={**trainer.metrics, **fact.metrics},
        )
        if trainer.seal is not None:
            self._runtime.objects.delete(trainer.seal.object_key)
        trainer.seal = None
        trainer.unsealed.clear()

    def _exited(self, worker_id: WorkerId, trainer: Trainer, fact: WorkerExited) -> None:
        del self._by_worker[worker_id]
        self._end_command(trainer)
        old_holder = trainer.holder
        trainer.handle = None
        trainer.slot = None
        trainer.incarnation += 1
        trainer.waiting_since_s = self._runtime.clock.now_s()
        was_suspended = trainer.state is TrainerState.SUSPENDING and fact.is_expected
        trainer.state = TrainerState.DORMANT
        if self._is_closing:
            return
        if was_suspended:
            self._allocate()
            return
        trainer.num_deaths += 1
        if trainer.num_deaths >= self._config.max_attempts:
            self._inbox.fail(_too_many_deaths(trainer, fact.reason, self._config.max_attempts))
            return
        logger.warning("%s ended (%s); starting it again from its last seal", worker_id, fact.reason)
        self._events.emit(
            WorkerRestarted(worker=f"trainer-{trainer.policy}", incarnation=trainer.incarnation, reason=fact.reason)
        )
        trainer.lease = None
        if trainer.update is not None:
            self._allocate()
            return
        if self._new_version is not None:
            # It may have died between publishing and reporting: the next incarnation publishes these keys again.
            self._runtime.objects.delete(trainer.key("state", self._new_version))
            self._runtime.objects.delete(trainer.key("weights", self._new_version))
        trainer.busy_with = "store.release"
        step = self._step

        async def release() -> tuple[list[SampleKey], Seal | None]:
            keys = await self._store.release(old_holder)
            return keys, await self._store.current_seal(trainer.policy, step)

        def released(result: tuple[list[SampleKey], Seal | None]) -> None:
            keys, trainer.seal = result
            trainer.busy_with = None
            trainer.unsealed.clear()
            trainer.denominators = trainer.seal.denominators if trainer.seal else Denominators()
            trainer.ready.update((key, trainer.leased[key]) for key in keys)
            self._advance(trainer)

        self._inbox.start(f"store.release {old_holder}", release(), released)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _advance(self, trainer: Trainer) -> None:
        """Give a process group its next command, if it can take one, then look at the slots and the waiting caller."""
        if trainer.state is TrainerState.RUNNING and trainer.busy_with is None and not self._is_closing:
            self._next_command(trainer)
        self._allocate()
        self._check_done()

    def _next_command(self, trainer: Trainer) -> None:
        if trainer.must_publish:
            version = trainer.weights_version
            self._command(
                trainer,
                PublishState(state_key=trainer.key("state", version), weights_key=trainer.key("weights", version)),
            )
        elif len(trainer.unsealed) >= self._config.seal_every:
            self._seal(trainer)
        elif trainer.ready and self._may_train:
            self._lease(trainer)
        elif self._must_update(trainer):
            assert self._new_version is not None
            self._command(
                trainer,
                ApplyUpdate(
                    policy_version=self._new_version,
                    denominators=trainer.denominators,
                    state_key=trainer.key("state", self._new_version),
                    weights_key=trainer.key("weights", self._new_version),
                ),
            )

    def _must_update(self, trainer: Trainer) -> bool:
        return (
            self._new_version is not None
            and trainer.update is None
            and not trainer.ready
            and trainer.denominators.num_samples > 0
        )

    def _lease(self, trainer: Trainer) -> None:
        batch = cut_by_tokens(list(trainer.ready.values()), max_tokens=self._config.micro_batch_tokens)[0]
        micro_batch_id = f"{trainer.policy}/s{self._step}/m{trainer.num_leases}"
        trainer.num_leases += 1
        for sample in batch:
            trainer.leased[sample.key] = trainer.ready.pop(sample.key)
        keys = tuple(sorted(sample.key for sample in batch))
        trainer.busy_with = "store.lease"

        def leased(result: tuple[Lease, list[Sample]]) -> None:
            trainer.busy_with = None
            trainer.lease, samples = result
            self._command(trainer, AccumulateGradient(micro_batch_id=micro_batch_id, samples=tuple(samples)))

        self._events.emit(
            MicroBatchLeased(
                policy=trainer.policy,
                micro_batch_id=micro_batch_id,
                keys=keys,
                num_tokens=sum(sample.num_tokens for sample in batch),
            )
        )
        work = self._store.lease(trainer.policy, trainer.holder, micro_batch_id, keys)
        self._inbox.start(f"store.lease {micro_batch_id}", work, self._guard(trainer, leased))

    def _seal(self, trainer: Trainer) -> None:
        self._num_seals += 1
        self._command(trainer, SealCache(object_key=trainer.key("seal", self._num_seals)))

    def _allocate(self) -> None:
        if self._is_closing:
            return
        demands = [
            trainer.demand(
                now_s=self._runtime.clock.now_s(),
                may_train=self._may_train,
                must_update=self._new_version is not None,
            )
            for trainer in self._trainers.values()
            if trainer.slot is not None or trainer.busy_with is None
        ]
        for decision in allocate_largest_backlog(demands, num_slots=self._num_slots):
            trainer = self._trainers[decision.policy]
            if decision.action is SlotAction.SUSPEND and trainer.unsealed:
                self._seal(trainer)
                continue
            self._events.emit(
                AllocationDecided(
                    policy=decision.policy, slot=decision.slot, action=decision.action, reason=decision.reason
                )
            )
            match decision.action:
                case SlotAction.ACTIVATE:
                    trainer.slot = decision.slot
                    trainer.state = TrainerState.ACTIVATING
                    self._by_worker[trainer.worker_id] = trainer
                    trainer.handle = self._runtime.start(self._make_spec[trainer.policy](trainer.worker_id), self._receive)
                case SlotAction.SUSPEND:
                    trainer.state = TrainerState.SUSPENDING
                    assert trainer.handle is not None
                    trainer.handle.stop()
                case _:
                    assert_never(decision.action)

    def _activate(self, trainer: Trainer) -> None:
        self._command(
            trainer,
            Activate(
                policy=trainer.policy,
                policy_version=trainer.weights_version,
                state=trainer.state_key,
                seal=trainer.seal.object_key if trainer.seal else None,
            ),
        )

    def _check_done(self) -> None:
        if self._on_opened is not None and not any(trainer.must_publish for trainer in self._trainers.values()):
            on_opened, self._on_opened = self._on_opened, None
            on_opened()
        if self._on_updated is not None and all(self._is_finished(trainer) for trainer in self._trainers.values()):
            on_updated, self._on_updated = self._on_updated, None
            on_updated()

    def _is_finished(self, trainer: Trainer) -> bool:
        if trainer.update is not None:
            return True
        return not trainer.ready and trainer.busy_with is None and trainer.denominators.num_samples == 0

    # --- one command at a time ----------------------------------------------------------------------------------------

    def _command(self, trainer: Trainer, command: object) -> None:
        if trainer.handle is None or trainer.busy_with is not None:
            raise InvariantError(f"{trainer.worker_id} is busy with {trainer.busy_with}, cannot take {command!r:.80}")
        name = type(command).__name__
        trainer.busy_with = name
        handle = trainer.handle
        trainer.timer = self._inbox.set_timer(
            f"{name} {trainer.worker_id}", self._config.micro_batch_timeout_s, handle.kill
        )
        handle.send(command)

    def _end_command(self, trainer: Trainer) -> None:
        trainer.busy_with = None
        if trainer.timer is not None:
            trainer.timer.cancel()
            trainer.timer = None

    def _guard(self, trainer: Trainer, then: Callable[[T], None]) -> Callable[[T], None]:
        """Drop the end of a store operation when the incarnation it was for has died meanwhile."""
        incarnation = trainer.incarnation

        def run(result: T) -> None:
            if trainer.incarnation == incarnation:
                then(result)

        return run


def _too_many_deaths(trainer: Trainer, reason: str, max_attempts: int) -> BackendError:
    doing = f"micro-batch {trainer.lease.micro_batch_id}" if trainer.lease else "no micro-batch"
    rows = f"; its rows: {', '.join(str(key) for key in trainer.lease.keys[:5])}, ..." if trainer.lease else ""
    return BackendError(
        f"the process group of policy {trainer.policy} ended {max_attempts} times in a row "
        f"(training.max_attempts={max_attempts}) with {doing}; the last time: {reason}{rows}"
    )
