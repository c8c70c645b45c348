"""The training side of a committed step, run again from stored rows with recorded cuts: no leases, no store writes.

Invariant (tests name it): the weights are those of the commit record, bit for bit, or the run fails.
"""

from collections.abc import Callable, Sequence

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import HolderId, SampleKey
from flexmarl.core.messages import UpdateApplied
from flexmarl.core.records import CommitRecord, PolicyCommit, Sample
from flexmarl.training.incarnation import Incarnation
from flexmarl.training.sequence import UpdateSequence
from flexmarl.training.state import PolicyStanding, TrainingSeams
from flexmarl.training.work import GradientFact, describe_rows


class ReplayedStep(UpdateSequence):
    """Implements `Work`."""

    def __init__(
        self, process: Incarnation, standing: PolicyStanding, seams: TrainingSeams, record: CommitRecord
    ) -> None:
        """Begin at once; the record's version is one above the weights held now.

        Raises:
            StoreError: the record's updates do not add up to its micro-batches.
        """
        commit = record.policies[standing.policy]
        super().__init__(process, standing, seams, step=record.step, num_passes=commit.num_passes)
        self._commit: PolicyCommit = commit
        self._keys: tuple[SampleKey, ...] = ()
        self._differs = False
        """It ended with other weights than were committed."""
        if sum(commit.update_sizes) != len(commit.micro_batches):
            raise StoreError(
                f"the commit record of step {record.step} has {len(commit.micro_batches)} micro-batches of policy "
                f"{standing.policy} in updates of {commit.update_sizes}: it is damaged, or not of this format"
            )
        self._begin(record.policy_version, commit.update_sizes)

    @property
    def num_backlog_tokens(self) -> int:
        """Trained tokens of all passes, until it is done."""
        return self._commit.denominators.num_tokens * self._num_passes if self.is_needed else 0

    @property
    def is_done(self) -> bool:
        """Every update is applied, and gave what was committed."""
        return not self.is_needed and not self._differs

    def _fetch(self, place: int, then: Callable[[str, Sequence[Sample]], None]) -> None:
        micro_batch_id = self._commit.micro_batches[place]

        def read(samples: list[Sample]) -> None:
            self._keys = tuple(sample.turn.key for sample in samples)
            then(micro_batch_id, samples)

        work = self._seams.store.micro_batch(self._standing.policy, self._step, micro_batch_id)
        self._process.store_work(f"micro_batch {micro_batch_id}", work, read)

    def _used(self, place: int, then: Callable[[], None]) -> None:
        then()

    def _given_back(self, dead_holder: HolderId, then: Callable[[], None]) -> None:
        then()

    def _describe(self) -> str:
        return describe_rows(self._micro_batches[-1], self._keys)

    def take(self, fact: GradientFact) -> None:
        """Handle the answer to a command; the last one must have made what was committed."""
        super().take(fact)
        if isinstance(fact, UpdateApplied) and not self.is_needed:
            self._compare()

    def _compare(self) -> None:
        found, commit = self.result(), self._commit
        if (found.denominators, found.digest) == (commit.denominators, commit.weights_digest):
            return
        self._differs = True
        self._seams.inbox.fail(
            StoreError(
                f"replaying step {self._step} gives policy {self._standing.policy} other weights than were committed: "
                f"digest {found.digest} of {found.denominators}, recorded are {commit.weights_digest} of "
                f"{commit.denominators}. The machine, its libraries or the training options differ from those of the "
                "run: use training.backend.accumulation=canonical for runs that move, or checkpoint.replay=false to go "
                "back to the checkpoint"
            )
        )
