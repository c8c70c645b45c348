"""The gradient work of a step with several updates: passes over all of its samples, in commit.

Invariants (tests name them):

* every sample is used once per pass, by one incarnation, which holds it from the first pass to the last update;
* the order of a pass depends on run seed, step, policy and pass alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.events import MicroBatchLeased
from flexmarl.core.ids import HolderId, SampleKey
from flexmarl.core.protocols import Lease
from flexmarl.core.records import Sample
from flexmarl.core.rng import HashRng, derive_seed
from flexmarl.scheduling import ReadySample, cut_into_updates
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.sequence import UpdateSequence
from flexmarl.training.staleness import check_staleness
from flexmarl.training.state import PolicyStanding, TrainingSeams
from flexmarl.training.work import describe_lease


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedBatch:
    """A micro-batch of one pass."""

    num_passes_done: int
    keys: tuple[SampleKey, ...]
    num_tokens: int


class PassesStep(UpdateSequence):
    """Implements `StepWork`: collects the step's samples until `finish`, then works through them."""

    def __init__(
        self,
        process: Incarnation,
        standing: PolicyStanding,
        seams: TrainingSeams,
        algorithm: AlgorithmConfig,
        *,
        step: int,
    ) -> None:
        """Begin without samples."""
        super().__init__(process, standing, seams, step=step, num_passes=algorithm.num_epochs)
        self._algorithm = algorithm
        self._samples: list[ReadySample] = []
        self._plan: list[_PlannedBatch] = []
        self._lease: Lease | None = None
        self._num_leases = 0
        """For micro-batch ids that are never used twice."""

    def add_ready(self, samples: list[ReadySample]) -> None:
        """Take the samples of a closed group."""
        if self._sizes:
            raise InvariantError(f"samples of step {self._step} were added for {samples[0].key} after its update began")
        self._samples += samples

    def set_open_groups(self, num_open: int) -> None:
        """Nothing is streamed, so nothing tapers."""

    def allow_training(self) -> None:
        """Nothing begins before `finish`."""

    def finish(self, policy_version: int) -> None:
        """Cut all passes and begin."""
        sizes = []
        for epoch in range(self._algorithm.num_epochs):
            rng = HashRng(derive_seed(self._seams.run_seed, "minibatches", self._step, self._standing.policy, epoch))
            updates = cut_into_updates(
                self._samples,
                num_minibatches=self._algorithm.num_minibatches,
                max_tokens=self._seams.config.micro_batch_tokens,
                rng=rng,
            )
            sizes += [len(batches) for batches in updates]
            self._plan += [_planned(epoch, batch) for batches in updates for batch in batches]
        self._begin(policy_version, sizes)

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens of the micro-batches that remain."""
        return sum(batch.num_tokens for batch in self._plan[self._num_added :])

    def _fetch(self, place: int, then: Callable[[str, Sequence[Sample]], None]) -> None:
        batch = self._plan[place]
        policy = self._standing.policy
        micro_batch_id = f"{policy}/s{self._step}/m{self._num_leases}"
        self._num_leases += 1
        self._seams.events.emit(
            MicroBatchLeased(policy=policy, micro_batch_id=micro_batch_id, keys=batch.keys, num_tokens=batch.num_tokens)
        )

        def leased(result: tuple[Lease, list[Sample]]) -> None:
            self._lease, samples = result
            check_staleness(samples, step=self._step, max_staleness=self._seams.max_staleness)
            then(micro_batch_id, samples)

        work = self._seams.store.lease(
            policy, self._process.holder, micro_batch_id, batch.keys, num_passes_done=batch.num_passes_done
        )
        self._process.store_work(f"lease {micro_batch_id}", work, leased)

    def _used(self, place: int, then: Callable[[], None]) -> None:
        lease = self._lease
        assert lease is not None

        def acknowledged(_: None) -> None:
            self._lease = None
            then()

        work = self._seams.store.acknowledge(lease)
        self._process.store_work(f"acknowledge {lease.micro_batch_id}", work, acknowledged)

    def _given_back(self, dead_holder: HolderId, then: Callable[[], None]) -> None:
        self._lease = None
        work = self._seams.store.release(dead_holder)
        self._process.store_work(f"release {dead_holder}", work, lambda _: then())

    def _describe(self) -> str:
        return describe_lease(self._lease, None)


def _planned(epoch: int, batch: Sequence[ReadySample]) -> _PlannedBatch:
    return _PlannedBatch(
        num_passes_done=epoch,
        keys=tuple(sorted(sample.key for sample in batch)),
        num_tokens=sum(sample.num_tokens for sample in batch),
    )
