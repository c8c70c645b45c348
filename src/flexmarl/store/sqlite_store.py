"""`SqliteStore`: the experience store of one run, over an SQLite index and a payload file.

Every method hands one blocking function to the runtime's `call` (`operations.py`), or runs it in its turn where there
is none; there is no other concurrency in the store. Each function is one transaction.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, Lease, PolicyColumns, PolicyProgress, StoredStep
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
from flexmarl.store import attempts, bulk, leases, steps
from flexmarl.store.batch import PackedBatch
from flexmarl.store.database import FolderLock
from flexmarl.store.index import Index
from flexmarl.store.operations import BlockingCall, OperationQueue
from flexmarl.store.packing import PackedTrajectory, pack_finished, unpack_sample
from flexmarl.store.recovery import RecoveryReport, open_folder, open_in_memory


def lease(index: Index, *args: Any) -> tuple[Lease, list[Sample]]:
    """Lease rows and unpack them, off the event loop."""
    granted, packed = leases.lease(index, *args)
    return granted, [unpack_sample(sample) for sample in packed]


class SqliteStore(OperationQueue):
    """An `ExperienceStore`. A folder has one owner at a time; `None` keeps everything in memory."""

    def __init__(
        self, index: Index, lock: FolderLock | None, recovery: RecoveryReport, call: BlockingCall | None
    ) -> None:
        """Take over opened files; use `open`."""
        super().__init__(index, call)
        self._lock = lock
        self._claiming: dict[PolicyName, set[asyncio.Event]] = {}
        """Claims that wait for ready rows."""
        self.recovery = recovery
        """What opening had to mend."""

    @classmethod
    async def open(
        cls,
        folder: Path | None,
        call: BlockingCall | None,
        columns: Mapping[PolicyName, PolicyColumns] | None = None,
    ) -> Self:
        """Open the store in `folder`, or create it, and release what the process that had it before was working on.

        A `call` of None runs every operation in the event loop's thread: for a process that only owns the store.
        `columns` are the data columns of each policy's table beside the built-in ones; None takes what the store has.

        Raises:
            ConfigError: a declaration of columns is wrong.
            StoreError: the folder is in use, not writable, damaged, written by other code, or has other columns.
        """
        if folder is None:
            index = open_in_memory(columns) if call is None else await call(open_in_memory, columns)
            return cls(index, None, RecoveryReport(), call)
        opened = open_folder(folder, columns) if call is None else await call(open_folder, folder, columns)
        index, lock, recovery = opened
        return cls(index, lock, recovery, call)

    def _after_batch(self) -> None:
        """Wake the claims on policies that got ready rows; no operation runs at this moment."""
        if self._index is not None:
            for policy in self._index.woken & self._claiming.keys():
                for event in self._claiming[policy]:
                    event.set()
            self._index.woken.clear()

    def _wake_all(self) -> None:
        for events in self._claiming.values():
            for event in events:
                event.set()

    async def declare(self, columns: Mapping[PolicyName, PolicyColumns]) -> None:
        """Take the data columns of each policy's table; what rows in flight need cannot change.

        Raises:
            ConfigError: a declaration is wrong.
            StoreError: a table has other user columns, or rows in flight that were made with other requirements.
        """
        await self._run(Index.declare, columns)

    async def open_step(self, dispatch: DispatchRecord) -> None:
        """Record the content of a step before its first request; survives power loss."""
        await self._run(steps.open_step, dispatch)

    async def extend_step(self, extension: StepExtension) -> None:
        """Add trajectories to an open step before their first request; survives power loss.

        Raises:
            InvariantError: the step is not open, the query is not in it, or the numbers do not go on where its
                trajectories so far end.
        """
        await self._run(steps.extend_step, extension)

    async def put_finished(self, trajectories: Sequence[FinishedTrajectory]) -> None:
        """Add whole trajectories of open steps in one transaction; rows that need no token column are ready.

        Raises:
            ConfigError: a reward or user column is missing or wrong.
            InvariantError: a trajectory was not dispatched, was begun in another way, or was put with other content.
        """
        await self.start_put([pack_finished(each) for each in trajectories])

    def start_put(self, trajectories: Sequence[PackedTrajectory]) -> asyncio.Future[None]:
        """Do the same with trajectories that `pack_finished` has checked and packed, perhaps in another process."""
        return self._start(bulk.put_packed, trajectories)

    async def begin_attempt(self, trajectory: TrajectoryKey) -> int:
        """Return the number of a new attempt (0 is the first); rows of older attempts become superseded with it.

        Raises:
            InvariantError: the trajectory has ended, or was not dispatched.
        """
        return await self._run(attempts.begin_attempt, trajectory)

    async def put_turn(self, row: TurnRow) -> None:
        """Add a partial row.

        Raises:
            FencedError: its attempt is no longer the newest, or has ended.
            InvariantError: the same key and attempt was put with other content, or its step was dispatched for other
                versions.
        """
        await self._run(attempts.put_turn, row)

    async def record_outcome(self, outcome: OutcomeRecord) -> None:
        """Record an attempt's end for all its agents in one transaction.

        A row of the attempt that the outcome does not list is masked with reason `not_in_outcome`.

        Raises:
            ConfigError: a reward is not finite, or a user column is missing or wrong.
            InvariantError: a turn is missing, or the attempt ended otherwise before.
            FencedError: the attempt is no longer the newest.
        """
        await self._run(attempts.record_outcome, outcome)

    async def record_failure(self, failure: TrajectoryFailure) -> None:
        """Record that a trajectory failed for good; its rows become failed with the failure's kind as reason."""
        await self._run(attempts.record_failure, failure)

    async def fill(self, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
        """Fill the advantage columns; rows whose attempt has an outcome become ready, masked ones stay masked."""
        await self._run(leases.fill, policy, values)

    async def fill_tokens(self, policy: PolicyName, column: TokenColumn, values: Sequence[TokenValues]) -> None:
        """Fill a token column of live rows that nobody trains yet; complete rows become ready, masked ones stay masked.

        Raises:
            InvariantError: a row has other values there, is not there, is in training, or has another number of tokens.
        """
        await self._run(leases.fill_tokens, policy, column, values)

    async def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        """Take partial or ready rows out of training, with a reason."""
        await self._run(leases.mask, policy, keys, reason)

    async def ready(self, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order, each with its number of prompt and response tokens."""
        return await self._run(leases.ready, policy, step)

    async def lease(
        self,
        policy: PolicyName,
        holder: HolderId,
        micro_batch_id: str,
        keys: Sequence[SampleKey],
        *,
        num_passes_done: int = 0,
    ) -> tuple[Lease, list[Sample]]:
        """Lease rows of one step to a holder, all or none, and read them in the order of `keys`.

        With `num_passes_done=0` they must be ready; with p > 0 acknowledged by the same holder for exactly p passes.

        Raises:
            CapacityError: a row is not.
            FencedError: the holder was fenced.
            InvariantError: the micro-batch id is in use in this step, or `keys` are empty, repeated or of two steps.
        """
        return await self._run(lease, policy, holder, micro_batch_id, keys, num_passes_done)

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

        `acknowledging` is acknowledged in the same transaction, also when no row is ready. A caller that gives up
        waiting must release its holder: the rows may just have been leased to it.

        Raises:
            FencedError: the holder was fenced, perhaps while it waited, or the lease to acknowledge has ended.
        """
        claimed = await self.claim_packed(
            policy,
            step,
            holder,
            micro_batch_id,
            max_rows=max_rows,
            timeout_s=timeout_s,
            acknowledging=acknowledging,
        )
        if claimed is None:
            return None
        lease, batch = claimed
        return replace(lease, keys=batch.keys()), batch.samples()

    def start_claim(
        self,
        policy: PolicyName,
        step: int,
        holder: HolderId,
        micro_batch_id: str,
        *,
        max_rows: int,
        acknowledging: Lease | None = None,
    ) -> asyncio.Future[tuple[Lease, PackedBatch] | None]:
        """Do the same without waiting for rows, and leave them packed; the lease has no keys, the batch has them."""
        return self._start(leases.claim, policy, step, holder, micro_batch_id, max_rows, acknowledging)

    async def claim_packed(
        self,
        policy: PolicyName,
        step: int,
        holder: HolderId,
        micro_batch_id: str,
        *,
        max_rows: int,
        timeout_s: float,
        acknowledging: Lease | None = None,
    ) -> tuple[Lease, PackedBatch] | None:
        """Do the same, and wait for rows."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        event = asyncio.Event()
        self._claiming.setdefault(policy, set()).add(event)
        try:
            while True:
                event.clear()
                claimed = await self.start_claim(
                    policy, step, holder, micro_batch_id, max_rows=max_rows, acknowledging=acknowledging
                )
                if claimed is not None:
                    return claimed
                acknowledging = None
                try:
                    async with asyncio.timeout_at(deadline_s):
                        await event.wait()
                except TimeoutError:
                    return None
        finally:
            self._claiming[policy].discard(event)

    async def fence(self, holder: HolderId) -> list[SampleKey]:
        """Release a holder's rows and refuse its leases, acknowledgements and seals from now on, for good.

        Returns the rows in key order.
        """
        released = await self._run(leases.fence, holder)
        self._wake_all()  # the holder itself may be waiting
        return released

    async def acknowledge(self, lease: Lease) -> None:
        """The holder's gradient cache includes the rows. Raises FencedError when the lease has ended."""
        await self.start_acknowledge(lease)

    def start_acknowledge(self, lease: Lease) -> asyncio.Future[None]:
        """Do the same."""
        return self._start(leases.acknowledge, lease)

    async def release(self, holder: HolderId) -> list[SampleKey]:
        """The holder is gone: its leased and unsealed acknowledged rows are ready again. Returns them in key order."""
        return await self._run(leases.release, holder)

    async def seal(self, holder: HolderId, seal: Seal) -> None:
        """Make a sealed cache current and its micro-batches' rows sealed, in one transaction.

        Raises:
            InvariantError: its predecessor is not the current seal, or a micro-batch is not acknowledged.
            FencedError: the holder no longer holds a micro-batch.
        """
        await self._run(leases.seal, holder, seal)

    async def current_seal(self, policy: PolicyName, step: int) -> Seal | None:
        """Return the newest seal of the policy's step."""
        return await self._run(leases.current_seal, policy, step)

    async def commit(self, record: CommitRecord) -> None:
        """Make the step's trained rows committed, for all policies at once; survives power loss.

        Raises:
            InvariantError: a row of the step is neither acknowledged, sealed, masked, failed nor superseded, a
                dispatched trajectory has no end, or the record's micro-batches, passes, updates or version are not
                what the store holds.
        """
        await self._run(steps.commit, record)

    async def progress(self, step: int) -> dict[PolicyName, PolicyProgress]:
        """Count rows by status; policies without rows in the step are left out."""
        return await self._run(steps.progress, step)

    async def last_commit(self) -> CommitRecord | None:
        """Return the newest commit record."""
        return await self._run(steps.last_commit)

    async def trained_ids(self, step: int) -> dict[PolicyName, list[SampleKey]]:
        """Return the committed rows of a step in key order; policies without any are left out."""
        return await self._run(steps.trained_ids, step)

    async def commits_after(self, policy_version: int) -> list[CommitRecord]:
        """Return the commit records of later versions, in order."""
        return await self._run(steps.commits_after, policy_version)

    async def micro_batch(self, policy: PolicyName, step: int, micro_batch_id: str) -> list[Sample]:
        """Return the samples of a committed micro-batch in the order in which they were trained.

        Raises:
            InvariantError: no commit has it.
            StoreError: their payload has been pruned, or is damaged.
        """
        packed = await self._run(steps.micro_batch, policy, step, micro_batch_id)
        return [unpack_sample(sample) for sample in packed]

    async def open_steps(self) -> list[StoredStep]:
        """Return every step that was dispatched and not committed, in order."""
        return await self._run(steps.open_steps)

    async def prune(self, policy_version: int) -> None:
        """Free the payloads of committed steps below `policy_version`, as far as whole segments have no others.

        Raises:
            InvariantError: a step below is not committed.
        """
        await self._run(steps.prune, policy_version)

    async def pruned_version(self) -> int:
        """Return the lowest version from which on every committed step can be read again; 0 if nothing was pruned."""
        return await self._run(steps.pruned_version)

    async def rewind(self, policy_version: int) -> None:
        """Forget everything of steps at or after `policy_version`; survives power loss."""
        await self._run(steps.rewind, policy_version)

    async def close(self) -> None:
        """Finish what was begun and release the files. A second call does nothing."""
        await self._finish()
        if self._call is None:
            self._close_blocking()
        else:
            await self._call(self._close_blocking)
        self._wake_all()

    def _close_blocking(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            index.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
