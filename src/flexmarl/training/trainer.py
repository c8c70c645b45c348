"""One policy's process group as the engine drives it: its life on a slot, one command at a time, and its deaths.

What it works on is said elsewhere: `scoring.py` (forward only, goes first) and the gradient work of a step (`work.py`).
Invariants (tests name them):

* what an incarnation that has died still reports changes nothing;
* a process group that dies again and again with the same work ends the run, and the error names the work.
"""

import logging
from collections.abc import Callable, Sequence

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.events import WorkerRestarted
from flexmarl.core.ids import PolicyName, WorkerId
from flexmarl.core.messages import (
    Activate,
    Activated,
    CacheSealed,
    GradientAccumulated,
    PublishState,
    Scored,
    StatePublished,
    UpdateApplied,
    WorkerExited,
    WorkerReady,
)
from flexmarl.core.protocols import WorkerSpec
from flexmarl.core.records import CommitRecord, TokenColumn, TokenValues, TurnRow
from flexmarl.scheduling import PolicyDemand, ReadySample
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.passes import PassesStep
from flexmarl.training.replay import ReplayedStep
from flexmarl.training.scoring import Scoring
from flexmarl.training.state import PolicyStanding, PolicyState, PolicyUpdate, TrainerState, TrainingSeams
from flexmarl.training.streamed import StreamedStep
from flexmarl.training.work import StepWork, Work

logger = logging.getLogger(__name__)


class Trainer:
    """One policy's process group. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        policy: PolicyName,
        make_spec: Callable[[WorkerId], WorkerSpec],
        algorithm: AlgorithmConfig,
        seams: TrainingSeams,
        on_change: Callable[[], None],
    ) -> None:
        """Start nothing yet; `on_change` is called whenever slots or a waiting caller may be affected."""
        self.policy = policy
        self.state = TrainerState.DORMANT
        self.slot: int | None = None
        self._make_spec = make_spec
        self._algorithm = algorithm
        self._seams = seams
        self._on_change = on_change
        self._standing = PolicyStanding(policy=policy)
        self._process = Incarnation(policy, seams, self.advance)
        self._scoring = Scoring(self._process, self._standing, seams)
        self._step: StepWork = self._new_step(0, may_train=False)
        self._replay: ReplayedStep | None = None
        """Takes the place of the step's work, until a step begins."""
        self._num_deaths = 0
        """Since its last finished command; to load its state is no progress."""
        self._waiting_since_s = 0.0
        self._is_closing = False

    # --- commands of the engine ---------------------------------------------------------------------------------------

    def open(self, state: PolicyState) -> None:
        """Take the state to begin with."""
        self._standing.state_key = state.state_key
        self._standing.weights_version = state.weights_version
        self._waiting_since_s = self._seams.runtime.clock.now_s()

    def begin_step(self, step: int, *, may_train: bool) -> None:
        """Forget the last step."""
        self._replay = None
        self._step = self._new_step(step, may_train=may_train)

    def set_open_groups(self, num_open: int) -> None:
        """So many groups of the step may still close."""
        self._step.set_open_groups(num_open)

    def add_ready(self, samples: list[ReadySample]) -> None:
        """Samples whose group has closed."""
        self._with_more_work(lambda: self._step.add_ready(samples))

    def allow_training(self) -> None:
        """All samples of the step are ready (serial mode)."""
        self._with_more_work(self._step.allow_training)

    def score(
        self,
        column: TokenColumn,
        turns: Sequence[TurnRow],
        on_done: Callable[[tuple[TokenValues, ...]], None],
    ) -> None:
        """Compute a token column, fill it in the store, then call `on_done`."""
        self._with_more_work(lambda: self._scoring.add(column, turns, on_done))

    def update(self, policy_version: int) -> None:
        """Train what is left, then update to `policy_version`."""
        self._with_more_work(lambda: self._step.finish(policy_version))

    def replay(self, record: CommitRecord) -> None:
        """Train a committed step again, if it trained this policy."""
        self.begin_step(record.step, may_train=False)
        if record.policies[self.policy].micro_batches:
            self._with_more_work(lambda: self._set_replay(record))

    def _set_replay(self, record: CommitRecord) -> None:
        self._replay = ReplayedStep(self._process, self._standing, self._seams, record)

    def activate(self, slot: int) -> None:
        """Start the process group on a slot."""
        self.slot = slot
        self.state = TrainerState.ACTIVATING
        self._process.start(self._make_spec, self._receive)

    def suspend(self) -> bool:
        """Give the slot up; False when the gradient cache must be sealed first, which has been started."""
        if not self._work.leave():
            return False
        self.state = TrainerState.SUSPENDING
        self._process.stop()
        return True

    def close(self) -> None:
        """Start nothing any more; deaths are expected from now on."""
        self._is_closing = True

    def _new_step(self, step: int, *, may_train: bool) -> StepWork:
        if self._algorithm.num_updates > 1:
            return PassesStep(self._process, self._standing, self._seams, self._algorithm, step=step)
        return StreamedStep(self._process, self._standing, self._seams, step=step, may_train=may_train)

    def _with_more_work(self, add: Callable[[], None]) -> None:
        if not self.demand().wants_slot:
            self._waiting_since_s = self._seams.runtime.clock.now_s()
        add()
        self.advance()

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def must_publish(self) -> bool:
        """Its state is not yet on the object plane: the run has just begun."""
        return self._standing.must_publish

    @property
    def is_step_done(self) -> bool:
        """The commit or replay in progress has nothing more to do for this policy."""
        return self._work.is_done

    @property
    def can_be_allocated(self) -> bool:
        """An allocation rule may look at it: it is not waiting for the store to release a dead incarnation."""
        return self.slot is not None or self._process.busy_with is None

    def demand(self) -> PolicyDemand:
        """Return what an allocation rule sees of it."""
        return PolicyDemand(
            policy=self.policy,
            num_backlog_tokens=self._work.num_backlog_tokens + self._scoring.num_backlog_tokens,
            is_needed=self.must_publish or self._work.is_needed,
            waiting_s=self._seams.runtime.clock.now_s() - self._waiting_since_s,
            slot=self.slot,
            is_idle=self.state is TrainerState.RUNNING and self._process.busy_with is None,
            is_leaving=self.state is TrainerState.SUSPENDING,
        )

    def result(self) -> PolicyUpdate:
        """Return the newest state; unchanged when the step had no sample for this policy."""
        return self._work.result()

    @property
    def _work(self) -> Work:
        return self._step if self._replay is None else self._replay

    # --- facts --------------------------------------------------------------------------------------------------------

    def _receive(self, worker_id: WorkerId, fact: object) -> None:
        self._seams.inbox.post(worker_id, fact, lambda: self._handle(worker_id, fact))

    def _handle(self, worker_id: WorkerId, fact: object) -> None:
        if worker_id != self._process.worker_id:
            return
        busy_with = self._process.end_command()
        match fact:
            case WorkerExited():
                self._exited(fact, busy_with)
                return
            case WorkerReady():
                self._process.command(
                    Activate(
                        policy=self.policy,
                        policy_version=self._standing.weights_version,
                        state=self._standing.state_key,
                        seal=self._work.seal_key,
                    )
                )
                return
            case Activated():
                self.state = TrainerState.RUNNING
                self._standing.digest = fact.weights_digest
            case StatePublished():
                self._standing.published(self._standing.weights_version, fact.weights_digest)
            case Scored():
                self._scoring.take(fact)
            case GradientAccumulated() | CacheSealed() | UpdateApplied():
                self._work.take(fact)
            case _:
                raise InvariantError(f"{worker_id} sent an unexpected {type(fact).__name__}")
        if not isinstance(fact, Activated):
            self._num_deaths = 0
        self.advance()

    def _exited(self, fact: WorkerExited, busy_with: str | None) -> None:
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
            work = self._scoring.died() or self._work.died(busy_with)
            if max(self._num_deaths, work.num_deaths) >= self._seams.config.max_attempts:
                self._seams.inbox.fail(self._too_many_deaths(fact.reason, work.doing))
                return
            logger.warning("%s ended (%s); starting it again", dead_holder, fact.reason)
            self._seams.events.emit(
                WorkerRestarted(worker=f"trainer-{self.policy}", incarnation=self._process.number, reason=fact.reason)
            )
            self._work.recover(dead_holder)
        self._on_change()

    def _too_many_deaths(self, reason: str, doing: str) -> BackendError:
        limit = self._seams.config.max_attempts
        return BackendError(
            f"the process group of policy {self.policy} ended {limit} times (training.max_attempts={limit}) "
            f"with {doing}; the last time: {reason}"
        )

    # --- decisions ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Give the process group its next command, if it can take one: publish, else score, else gradient work."""
        if self.state is TrainerState.RUNNING and self._process.busy_with is None and not self._is_closing:
            if self.must_publish:
                version = self._standing.weights_version
                self._process.command(
                    PublishState(
                        state_key=self._standing.key("state", version),
                        weights_key=self._standing.key("weights", version),
                    )
                )
            elif not self._scoring.advance(is_between_updates=self._work.is_between_updates):
                self._work.advance()
        self._on_change()
