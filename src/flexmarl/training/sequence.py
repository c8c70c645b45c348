"""Gradient work that is known beforehand: micro-batches in a fixed order, cut into optimizer updates.

It is one piece of work: only the last update is published, so when the incarnation dies, all of it begins again from
the state before the step. Invariants (tests name them):

* the order of micro-batches depends on what the sequence was made from, never on time or deaths;
* the process group keeps its slot from the first micro-batch to the last update.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import HolderId
from flexmarl.core.messages import AccumulateGradient, Activate, ApplyUpdate, GradientAccumulated, UpdateApplied
from flexmarl.core.records import Denominators, Sample
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.metrics import combine_metrics
from flexmarl.training.state import PolicyStanding, PolicyUpdate, TrainingSeams
from flexmarl.training.work import GradientFact, InterruptedWork


class UpdateSequence(ABC):
    """Implements `Work`; where samples come from, and who is told that they were used, is a subclass's."""

    seal_key = None
    """Nothing is sealed."""

    def __init__(
        self, process: Incarnation, standing: PolicyStanding, seams: TrainingSeams, *, step: int, num_passes: int
    ) -> None:
        """Wait for `_begin`."""
        self._process = process
        self._standing = standing
        self._seams = seams
        self._step = step
        self._num_passes = num_passes
        self._sizes: tuple[int, ...] = ()
        """Micro-batches of each update."""
        self._ends: tuple[int, ...] = ()
        """Micro-batches up to the end of each update."""
        self._new_version: int | None = None
        self._update: PolicyUpdate | None = None
        self._num_deaths = 0
        self._is_started = False
        """A micro-batch has been asked for."""
        self._is_recovering = False
        self._restart()

    def _begin(self, policy_version: int, sizes: Sequence[int]) -> None:
        """Work through micro-batches 0, 1, ..., cut into updates of `sizes`; the last one makes `policy_version`."""
        self._new_version = policy_version
        self._sizes = tuple(sizes)
        self._ends = tuple(accumulate(sizes))

    def _restart(self) -> None:
        self._micro_batches: list[str] = []
        """Those added, in order; the last one may be in flight."""
        self._num_added = 0
        self._num_updates = 0
        self._of_update = Denominators()
        self._total = Denominators()
        self._metrics: dict[str, float] = {}

    # --- what subclasses say ------------------------------------------------------------------------------------------

    @abstractmethod
    def _fetch(self, place: int, then: Callable[[str, Sequence[Sample]], None]) -> None:
        """Read micro-batch `place` and call `then` with its id and samples, as store work of the process."""

    @abstractmethod
    def _used(self, place: int, then: Callable[[], None]) -> None:
        """The gradient cache includes micro-batch `place`: record that, then call `then`."""

    @abstractmethod
    def _given_back(self, dead_holder: HolderId, then: Callable[[], None]) -> None:
        """An incarnation is dead: end what it held, then call `then`."""

    @abstractmethod
    def _describe(self) -> str:
        """Name the micro-batch in flight with its rows, for an error."""

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def num_backlog_tokens(self) -> int:
        """Nothing before the sequence begins; then it is needed, whatever its size."""
        return 0

    @property
    def is_needed(self) -> bool:
        """It has begun and is not done."""
        return bool(self._sizes) and self._update is None

    @property
    def is_done(self) -> bool:
        """Every update is applied, or there is none."""
        return not self.is_needed

    @property
    def is_between_updates(self) -> bool:
        """An update is applied and others follow."""
        return self._update is None and self._num_updates > 0

    def result(self) -> PolicyUpdate:
        """Return the newest state; unchanged when there was nothing to train."""
        return self._update or self._standing.as_update()

    # --- decisions and facts ------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Add the next micro-batch, or update when all of an update's are added."""
        if not self.is_needed or self._is_recovering:
            return
        if self._num_added == self._ends[self._num_updates]:
            self._apply_update()
        else:
            self._is_started = True
            self._fetch(self._num_added, self._send)

    def leave(self) -> bool:
        """Nothing is sealed: it is idle only before it begins and when it is done."""
        return True

    def _send(self, micro_batch_id: str, samples: Sequence[Sample]) -> None:
        self._micro_batches.append(micro_batch_id)
        self._process.command(
            AccumulateGradient(micro_batch_id=micro_batch_id, policy_version=self._step, samples=tuple(samples))
        )

    def _apply_update(self) -> None:
        assert self._new_version is not None
        is_last = self._num_updates + 1 == len(self._sizes)
        self._process.command(
            ApplyUpdate(
                policy_version=self._new_version,
                denominators=self._of_update,
                state_key=self._standing.key("state", self._new_version) if is_last else None,
                weights_key=self._standing.key("weights", self._new_version) if is_last else None,
            )
        )

    def take(self, fact: GradientFact) -> None:
        """Handle the answer to a command."""
        match fact:
            case GradientAccumulated():
                self._accumulated(fact)
            case UpdateApplied():
                self._updated(fact)
            case _:
                raise InvariantError(f"{self._process.worker_id} sent {type(fact).__name__}, which nobody asked for")

    def _accumulated(self, fact: GradientAccumulated) -> None:
        if fact.micro_batch_id != self._micro_batches[-1]:
            raise InvariantError(
                f"{self._process.worker_id} reports {fact.micro_batch_id}, in flight is {self._micro_batches[-1]}"
            )

        def counted() -> None:
            self._num_added += 1
            self._of_update = self._of_update.plus(fact.denominators)
            self._metrics = combine_metrics(self._metrics, fact.metrics)

        self._used(self._num_added, counted)

    def _updated(self, fact: UpdateApplied) -> None:
        if fact.policy_version != self._new_version:
            raise InvariantError(
                f"{self._process.worker_id} made version {fact.policy_version}, not {self._new_version}"
            )
        self._num_updates += 1
        self._total = self._total.plus(self._of_update)
        self._of_update = Denominators()
        self._metrics = combine_metrics(self._metrics, fact.metrics)
        if self._num_updates == len(self._sizes):
            self._standing.published(fact.policy_version, fact.weights_digest)
            self._update = self._standing.as_update(
                denominators=self._per_pass(),
                micro_batches=tuple(self._micro_batches),
                update_sizes=self._sizes,
                num_passes=self._num_passes,
                metrics=self._metrics,
            )

    def _per_pass(self) -> Denominators:
        """Return what each sample counts once: the total over all passes divided by their number, which is exact."""
        num_samples, samples_left = divmod(self._total.num_samples, self._num_passes)
        num_tokens, tokens_left = divmod(self._total.num_tokens, self._num_passes)
        if samples_left or tokens_left:
            raise InvariantError(
                f"policy {self._standing.policy}, step {self._step}: {self._num_passes} passes over the same samples "
                f"counted {self._total}"
            )
        return Denominators(num_samples=num_samples, num_tokens=num_tokens)

    # --- deaths -------------------------------------------------------------------------------------------------------

    def died(self, busy_with: str | None) -> InterruptedWork:
        """Count a death with the whole sequence: none of it survives."""
        self._num_deaths += self._is_started and self.is_needed and busy_with not in (None, Activate.__name__)
        is_adding = busy_with is not None and len(self._micro_batches) > self._num_added
        doing = self._describe() if is_adding else "no micro-batch" if busy_with is None else f"{busy_with} in flight"
        return InterruptedWork(num_deaths=self._num_deaths, doing=doing)

    def recover(self, dead_holder: HolderId) -> None:
        """Begin again. An update that is done is kept: its state is on the object plane."""
        if not self.is_needed or not self._is_started:
            return
        assert self._new_version is not None
        # It may have died between publishing and reporting: the next incarnation publishes these keys again.
        for kind in ("state", "weights"):
            self._seams.runtime.objects.delete(self._standing.key(kind, self._new_version))
        self._restart()
        self._is_recovering = True
        self._given_back(dead_holder, self._recovered)

    def _recovered(self) -> None:
        self._is_recovering = False
