"""The seam of the experience store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import CommitRecord, DispatchRecord, OutcomeRecord, Sample, Seal, TrajectoryFailure, TurnRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageValue:
    """The data columns that the close of a group fills."""

    key: SampleKey
    advantage: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Rows that one holder may train, until it acknowledges, dies or is fenced."""

    lease_id: int
    """Also the fencing token: it rises with every lease of the run."""
    policy: PolicyName
    holder: HolderId
    micro_batch_id: str
    keys: tuple[SampleKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProgress:
    """Number of rows of a policy's step by status."""

    num_partial: int = 0
    num_ready: int = 0
    num_leased: int = 0
    num_acknowledged: int = 0
    num_sealed: int = 0
    num_committed: int = 0
    num_masked: int = 0
    num_failed: int = 0
    num_superseded: int = 0


class ExperienceStore(Protocol):
    """One table per policy; rows live `partial -> ready -> leased -> acknowledged -> sealed -> committed`.

    Calls that return have survived SIGKILL of any process; dispatch, commit and checkpoint records also power loss.
    Repeating a call with the same key, attempt and content changes nothing; other content raises InvariantError.
    """

    async def open_step(self, dispatch: DispatchRecord) -> None:
        """Record the content of a step before its first request."""
        ...

    async def begin_attempt(self, trajectory: TrajectoryKey) -> int:
        """Return the number of a new attempt (0 is the first); rows of older attempts become superseded with it."""
        ...

    async def put_turn(self, row: TurnRow) -> None:
        """Add a partial row. Raises FencedError when its attempt is no longer the newest."""
        ...

    async def record_outcome(self, outcome: OutcomeRecord) -> None:
        """Record an attempt's end for all its agents in one transaction.

        Raises InvariantError when a turn of the outcome is not in the store; FencedError for an old attempt.
        """
        ...

    async def record_failure(self, failure: TrajectoryFailure) -> None:
        """Record that a trajectory failed for good; its rows become failed with the reason."""
        ...

    async def fill(self, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
        """Fill the advantage columns; rows whose attempt has an outcome become ready."""
        ...

    async def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        """Take rows out of training, with a reason."""
        ...

    async def ready(self, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order, each with its number of prompt and response tokens."""
        ...

    async def lease(
        self, policy: PolicyName, holder: HolderId, micro_batch_id: str, keys: Sequence[SampleKey]
    ) -> tuple[Lease, list[Sample]]:
        """Lease ready rows to a holder, all or none, and read them. Raises CapacityError when one is not ready."""
        ...

    async def acknowledge(self, lease: Lease) -> None:
        """The holder's gradient cache includes the rows. Raises FencedError when the lease has ended."""
        ...

    async def release(self, holder: HolderId) -> list[SampleKey]:
        """The holder is gone: its leased and unsealed acknowledged rows are ready again. Returns them."""
        ...

    async def seal(self, holder: HolderId, seal: Seal) -> None:
        """Make a sealed cache current and its micro-batches' rows sealed, in one transaction."""
        ...

    async def current_seal(self, policy: PolicyName, step: int) -> Seal | None:
        """Return the newest seal of the policy's step."""
        ...

    async def commit(self, record: CommitRecord) -> None:
        """Make the step's trained rows committed, durably, for all policies at once.

        Raises InvariantError when a row of the step is neither acknowledged, sealed, masked, failed nor superseded.
        """
        ...

    async def progress(self, step: int) -> dict[PolicyName, PolicyProgress]:
        """Count rows by status."""
        ...

    async def last_commit(self) -> CommitRecord | None:
        """Return the newest commit record."""
        ...

    async def trained_ids(self, step: int) -> dict[PolicyName, list[SampleKey]]:
        """Return the committed rows of a step in key order."""
        ...

    async def rewind(self, policy_version: int) -> None:
        """Forget everything of steps at or after `policy_version`: resume from a checkpoint without replay."""
        ...

    async def close(self) -> None:
        """Release the files."""
        ...
