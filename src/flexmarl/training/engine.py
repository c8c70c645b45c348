"""The training engine: the process groups of every policy, on slots that they share.

`trainer.py` drives one policy; this module gives out the slots and tells the orchestrator when all are done.
Invariants (tests name them):

* a slot serves one policy at a time;
* a policy without samples keeps its weights.
"""

from collections.abc import Callable, Mapping
from typing import assert_never

from flexmarl.config import TrainingConfig
from flexmarl.core.events import AllocationDecided
from flexmarl.core.ids import PolicyName, WorkerId
from flexmarl.core.protocols import EventSink, ExperienceStore, Inbox, Runtime, WorkerSpec
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
        runtime: Runtime,
        inbox: Inbox,
        events: EventSink,
        store: ExperienceStore,
    ) -> None:
        """Take the maker of worker specs of each policy; start nothing yet."""
        seams = TrainingSeams(config=config, runtime=runtime, inbox=inbox, events=events, store=store)
        self._events = events
        self._trainers = {policy: Trainer(policy, specs[policy], seams, self._changed) for policy in sorted(specs)}
        self._num_slots = min(config.num_slots or len(self._trainers), len(self._trainers))
        self._on_opened: Callable[[], None] | None = None
        self._on_updated: Callable[[], None] | None = None
        self._is_closing = False

    def open(self, states: Mapping[PolicyName, PolicyState], on_done: Callable[[], None]) -> None:
        """Take each policy's state and put it and its weights on the object plane, then call `on_done`."""
        self._on_opened = on_done
        for policy, state in states.items():
            self._trainers[policy].open(state)
        self._allocate()

    def begin_step(self, step: int, *, may_train: bool) -> None:
        """Start counting a step. With `may_train=False` samples wait for `allow_training`."""
        for trainer in self._trainers.values():
            trainer.begin_step(step, may_train=may_train)

    def add_ready(self, policy: PolicyName, samples: list[ReadySample]) -> None:
        """Samples whose group has closed."""
        self._trainers[policy].add_ready(samples)

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        for trainer in self._trainers.values():
            trainer.allow_training()

    def update(self, policy_version: int, on_done: Callable[[], None]) -> None:
        """Train what is left, update every policy that has a gradient, publish, then call `on_done`.

        All samples of the step have been added before.
        """
        self._on_updated = on_done
        for trainer in self._trainers.values():
            trainer.update(policy_version)

    def close(self) -> None:
        """Start nothing any more; deaths are expected from now on."""
        self._is_closing = True
        for trainer in self._trainers.values():
            trainer.close()

    def updates(self) -> dict[PolicyName, PolicyUpdate]:
        """Return the newest state of each policy; complete when `open` or `update` has called back."""
        return {policy: trainer.result() for policy, trainer in self._trainers.items()}

    def _changed(self) -> None:
        """A trainer took a turn: look at the slots and at the waiting caller."""
        self._allocate()
        if self._on_opened is not None and not any(trainer.must_publish for trainer in self._trainers.values()):
            on_opened, self._on_opened = self._on_opened, None
            on_opened()
        if self._on_updated is not None and all(trainer.is_step_done for trainer in self._trainers.values()):
            on_updated, self._on_updated = self._on_updated, None
            on_updated()

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
