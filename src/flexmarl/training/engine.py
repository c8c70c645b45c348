"""The training engine: the process groups of every policy, on slots that they share.

`trainer.py` drives one policy; this module gives out the slots and tells the orchestrator when all are done.
Invariants (tests name them):

* a slot serves one policy at a time;
* a policy without samples keeps its weights;
* no sample older than the bound on staleness reaches a process group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from flexmarl.config import AlgorithmConfig, TrainingConfig
from flexmarl.core.events import AllocationDecided
from flexmarl.core.ids import PolicyName, WorkerId
from flexmarl.core.protocols import EventSink, ExperienceStore, Inbox, Runtime, WorkerSpec
from flexmarl.core.records import CommitRecord, TokenColumn, TokenValues, TurnRow
from flexmarl.scheduling import ReadySample, SlotAction, allocate_largest_backlog
from flexmarl.training.state import PolicyState, PolicyUpdate, TrainingSeams
from flexmarl.training.trainer import Trainer


class TrainingEngine:
    """Owns the trainers of all policies. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        config: TrainingConfig,
        specs: Mapping[PolicyName, Callable[[WorkerId], WorkerSpec]],
        *,
        algorithms: Mapping[PolicyName, AlgorithmConfig],
        run_seed: int,
        max_staleness: int,
        runtime: Runtime,
        inbox: Inbox,
        events: EventSink,
        store: ExperienceStore,
    ) -> None:
        """Take the maker of worker specs and the algorithm of each policy; start nothing yet.

        `max_staleness` bounds how many versions a trained token may lag behind: 0 in serial and strict mode, 1 in
        one_step_off.
        """
        seams = TrainingSeams(
            config=config,
            runtime=runtime,
            inbox=inbox,
            events=events,
            store=store,
            run_seed=run_seed,
            max_staleness=max_staleness,
        )
        self._events = events
        self._trainers = {
            policy: Trainer(policy, specs[policy], algorithms[policy], seams, self._changed) for policy in sorted(specs)
        }
        self._num_slots = min(config.num_slots or len(self._trainers), len(self._trainers))
        self._on_opened: Callable[[], None] | None = None
        self._on_step_done: Callable[[], None] | None = None
        self._is_closing = False

    def open(self, states: Mapping[PolicyName, PolicyState], on_done: Callable[[], None]) -> None:
        """Take each policy's state and put it and its weights on the object plane, then call `on_done`."""
        self._on_opened = on_done
        for policy, state in states.items():
            self._trainers[policy].open(state)
        self._allocate()

    def begin_step(self, step: int, *, may_train: bool) -> None:
        """Start counting a step. With `may_train=False` samples wait for `allow_training`.

        A policy with several updates per step lets its samples wait for `update` either way.
        """
        for trainer in self._trainers.values():
            trainer.begin_step(step, may_train=may_train)

    def set_open_groups(self, num_open: int) -> None:
        """So many groups of the step may still close; while there are any, micro-batches taper with their number."""
        for trainer in self._trainers.values():
            trainer.set_open_groups(num_open)

    def add_ready(self, policy: PolicyName, samples: list[ReadySample]) -> None:
        """Samples of a group that has closed."""
        self._trainers[policy].add_ready(samples)

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        for trainer in self._trainers.values():
            trainer.allow_training()

    def score(
        self,
        policy: PolicyName,
        column: TokenColumn,
        turns: Sequence[TurnRow],
        on_done: Callable[[tuple[TokenValues, ...]], None],
    ) -> None:
        """Compute a token column of turns with distinct keys and fill it in the store, then call `on_done`.

        Old log-probs are those under the weights held now, or, while several updates are being made, after the last.
        """
        self._trainers[policy].score(column, turns, on_done)

    def update(self, policy_version: int, on_done: Callable[[], None]) -> None:
        """Train what is left, update every policy that has a gradient, publish, then call `on_done`.

        All samples of the step have been added before.
        """
        for trainer in self._trainers.values():
            trainer.update(policy_version)
        self._on_step_done = on_done
        self._changed()

    def replay(self, record: CommitRecord, on_done: Callable[[], None]) -> None:
        """Run the training side of a committed step again from stored rows and publish, then call `on_done`.

        The weights held are those before the step. When a digest differs from the recorded one, the run ends with a
        StoreError. Policies without micro-batches in the record are left alone.
        """
        for trainer in self._trainers.values():
            trainer.replay(record)
        self._on_step_done = on_done
        self._changed()

    def close(self) -> None:
        """Start nothing any more; deaths are expected from now on."""
        self._is_closing = True
        for trainer in self._trainers.values():
            trainer.close()

    def updates(self) -> dict[PolicyName, PolicyUpdate]:
        """Return the newest state of each policy; complete when `open`, `update` or `replay` has called back."""
        return {policy: trainer.result() for policy, trainer in self._trainers.items()}

    def _changed(self) -> None:
        """A trainer took a turn: look at the slots and at the waiting caller."""
        self._allocate()
        if self._on_opened is not None and not any(trainer.must_publish for trainer in self._trainers.values()):
            on_opened, self._on_opened = self._on_opened, None
            on_opened()
        if self._on_step_done is not None and all(trainer.is_step_done for trainer in self._trainers.values()):
            on_step_done, self._on_step_done = self._on_step_done, None
            on_step_done()

    def _allocate(self) -> None:
        if self._is_closing:
            return
        demands = [trainer.demand() for trainer in self._trainers.values() if trainer.can_be_allocated]
        for decision in allocate_largest_backlog(demands, num_slots=self._num_slots):
            trainer = self._trainers[decision.policy]
            match decision.action:
                case SlotAction.ACTIVATE:
                    trainer.activate(decision.slot)
                case SlotAction.SUSPEND:
                    if not trainer.suspend():
                        continue
                case _:
                    assert_never(decision.action)
            self._events.emit(
                AllocationDecided(
                    policy=decision.policy, slot=decision.slot, action=decision.action, reason=decision.reason
                )
            )
