"""The seam of the experience store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import (
    CommitRecord,
    DispatchRecord,
    FinishedTrajectory,
    OutcomeRecord,
    Sample,
    Seal,
    StepExtension,
    TokenColumn,
    TokenValues,
    TrajectoryFailure,
    TurnRow,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyColumns:
    """The data columns of one policy's table beside turn, reward and advantage, and which of them training needs."""

    scalars: Mapping[str, str] = field(default_factory=dict)
    """User columns: name to `int`, `float`, `bool` or `str`."""
    required: frozenset[str] = frozenset()
    """Names of scalar and token columns without which a row is not ready."""


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
class StoredTrajectory:
    """A trajectory of an open step as a resumed run finds it."""

    key: TrajectoryKey
    attempt: int
    """The newest one."""
    turns: tuple[TurnRow, ...]
    """Of that attempt, in key order."""
    outcome: OutcomeRecord | None
    failure: TrajectoryFailure | None
    """At most one of the two is set; neither when the attempt had not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """A step without a commit as a resumed run finds it."""

    dispatch: DispatchRecord
    extensions: tuple[StepExtension, ...]
    """In the order in which they were recorded."""
    trajectories: tuple[StoredTrajectory, ...]
    """Those that had begun, in key order."""
    scored: Mapping[PolicyName, Mapping[TokenColumn, tuple[TokenValues, ...]]]
    """Token columns of live rows that are filled already."""


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

    async def declare(self, columns: Mapping[PolicyName, PolicyColumns]) -> None:
        """Take the data columns of each policy's table; what rows in flight need cannot change.

        Raises StoreError when a table has other user columns, or rows in flight with other requirements.
        """
        ...

    async def open_step(self, dispatch: DispatchRecord) -> None:
        """Record the content of a step before its first request."""
        ...

    async def extend_step(self, extension: StepExtension) -> None:
        """Add trajectories to an open step before their first request.

        Raises InvariantError when the step is not open, the query is not in it, or the numbers do not go on where its
        trajectories so far end.
        """
        ...

    async def put_finished(self, trajectories: Sequence[FinishedTrajectory]) -> None:
        """Add whole trajectories of an open step in one transaction; their rows are ready. The fast way in."""
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

    async def fill_tokens(self, policy: PolicyName, column: TokenColumn, values: Sequence[TokenValues]) -> None:
        """Fill a token column of live rows; rows that now have their outcome and all required columns become ready.

        Raises InvariantError when a row has other values there, or their number is not that of its response tokens.
        """
        ...

    async def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        """Take rows out of training, with a reason."""
        ...

    async def ready(self, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order, each with its number of prompt and response tokens."""
        ...

    async def lease(
        self,
        policy: PolicyName,
        holder: HolderId,
        micro_batch_id: str,
        keys: Sequence[SampleKey],
        *,
        num_passes_done: int = 0,
    ) -> tuple[Lease, list[Sample]]:
        """Lease rows to a holder, all or none, and read them in the order of `keys`.

        With `num_passes_done=0` they must be ready; with p > 0 they must be acknowledged by the same holder for exactly
        p passes: a further use of the same samples within one step. Raises CapacityError when one is not.
        """
        ...

    async def claim(
        self,
        policy: PolicyName,
        step: int,
        holder: HolderId,
        micro_batch_id: str,
        *,
        max_rows: int,
        timeout_s: float,
        acknowledging: Lease | None = None,
    ) -> tuple[Lease, list[Sample]] | None:
        """Lease up to `max_rows` ready rows in key order; wait for one until the deadline, else return None.

        `acknowledging`, a lease of the holder, is acknowledged in the same transaction, also when no row is ready; an
        error leaves both undone. Wakes when rows become ready, without polling. Raises FencedError when the holder was
        fenced, or the lease to acknowledge has ended.
        """
        ...

    async def fence(self, holder: HolderId) -> list[SampleKey]:
        """Release a holder's rows and refuse everything it does from now on: it is dead, or taken for dead."""
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

    async def commits_after(self, policy_version: int) -> list[CommitRecord]:
        """Return the commit records of later versions, in order."""
        ...

    async def micro_batch(self, policy: PolicyName, step: int, micro_batch_id: str) -> list[Sample]:
        """Return the samples of a committed micro-batch in the order in which they were trained.

        Raises StoreError when their payload has been pruned, or is damaged.
        """
        ...

    async def open_steps(self) -> list[StoredStep]:
        """Return every step that was dispatched and not committed, in order."""
        ...

    async def prune(self, policy_version: int) -> None:
        """Free the payloads of committed steps below `policy_version`: a complete checkpoint covers them.

        Their keys, rewards, advantages and states stay.
        """
        ...

    async def pruned_version(self) -> int:
        """Return the lowest version from which every later committed step can be read again."""
        ...

    async def rewind(self, policy_version: int) -> None:
        """Forget everything of steps at or after `policy_version`: resume from a checkpoint without replay."""
        ...

    async def close(self) -> None:
        """Release the files."""
        ...
