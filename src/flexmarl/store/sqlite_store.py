"""`SqliteStore`: the experience store of one run, over an SQLite index and a payload file.

Every method hands one blocking function to the runtime's `call`, which runs them one at a time in order; there is no
other concurrency in the store. Each function is one transaction; those that wait for a turn are written together.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, Lease, PolicyProgress
from flexmarl.core.records import (
    CommitRecord,
    DispatchRecord,
    OutcomeRecord,
    Sample,
    Seal,
    TrajectoryFailure,
    TurnRow,
)
from flexmarl.store import attempts, leases, steps
from flexmarl.store.database import FolderLock
from flexmarl.store.faults import translated
from flexmarl.store.index import Index
from flexmarl.store.recovery import RecoveryReport, open_folder, open_in_memory

T = TypeVar("T")


class BlockingCall(Protocol):
    """`Runtime.call`: runs a blocking function off the event loop, one at a time, in order."""

    async def __call__(self, function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
        """Return `function(*args)`."""
        ...


DURABLE_OPERATIONS = frozenset({steps.open_step, steps.commit, steps.rewind})
"""Those that survive power loss; each is written alone."""
MAX_BATCH = 256
"""Operations written together; bounds the time until the first of them is answered."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """One call that waits for its turn."""

    function: Callable[..., Any]
    args: tuple[object, ...]
    done: asyncio.Future[Any]

    def settle(self, error: Exception | None, result: Any) -> None:
        """Answer, unless nobody waits any more."""
        if self.done.cancelled():
            return
        if error is None:
            self.done.set_result(result)
        else:
            self.done.set_exception(error)


class SqliteStore:
    """An `ExperienceStore`. A folder has one owner at a time; `None` keeps everything in memory."""

    def __init__(self, index: Index, lock: FolderLock | None, recovery: RecoveryReport, call: BlockingCall) -> None:
        """Take over opened files; use `open`."""
        self._index: Index | None = index
        self._lock = lock
        self._call = call
        self._waiting: deque[_Operation] = deque()
        self._writer: asyncio.Task[None] | None = None
        self.recovery = recovery
        """What opening had to mend."""

    @classmethod
    async def open(cls, folder: Path | None, call: BlockingCall) -> Self:
        """Open the store in `folder`, or create it, and release the leases of the process that had it before.

        Raises:
            StoreError: the folder is in use, not writable, damaged, or written by newer code.
        """
        if folder is None:
            return cls(await call(open_in_memory), None, RecoveryReport(), call)
        index, lock, recovery = await call(open_folder, folder)
        return cls(index, lock, recovery, call)

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Run an operation in its turn; those that wait together are written together (group commit)."""
        loop = asyncio.get_running_loop()
        operation = _Operation(function, args, loop.create_future())
        self._waiting.append(operation)
        if self._writer is None:
            self._writer = loop.create_task(self._write(), name="store")
        result: T = await operation.done
        return result

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    outcomes = await self._call(self._run_batch, batch)
                except Exception as refused:  # noqa: BLE001 (the runtime is closed: tell who waits)
                    outcomes = [(refused, None)] * len(batch)
                for operation, (error, result) in zip(batch, outcomes, strict=True):
                    operation.settle(error, result)
        finally:
            self._writer = None

    def _next_batch(self) -> list[_Operation]:
        batch = [self._waiting.popleft()]
        while (
            self._waiting
            and len(batch) < MAX_BATCH
            and not {batch[-1].function, self._waiting[0].function} & DURABLE_OPERATIONS
        ):
            batch.append(self._waiting.popleft())
        return batch

    def _run_batch(self, batch: list[_Operation]) -> list[tuple[Exception | None, Any]]:
        """Return the error or the result of each operation; what fails alone does not undo the others."""
        index = self._index
        if index is None:
            return [(InvariantError(f"the store was closed before {each.function.__name__}"), None) for each in batch]
        try:
            if len(batch) == 1:
                with translated(index.database.name):
                    return [(None, batch[0].function(index, *batch[0].args))]
            with translated(index.database.name), index.database.group():
                return [self._run_grouped(index, operation) for operation in batch]
        except Exception as error:  # noqa: BLE001 (passed on to whoever waits for it)
            index.forget_unwritten_tables()
            return [(error, None)] * len(batch)

    def _run_grouped(self, index: Index, operation: _Operation) -> tuple[Exception | None, Any]:
        try:
            with translated(index.database.name):
                return None, operation.function(index, *operation.args)
        except Exception as error:
            if not index.connection.in_transaction:
                raise  # the whole group is gone
            return error, None

    async def open_step(self, dispatch: DispatchRecord) -> None:
        """Record the content of a step before its first request; survives power loss."""
        await self._run(steps.open_step, dispatch)

    async def begin_attempt(self, trajectory: TrajectoryKey) -> int:
        """Return the number of a new attempt (0 is the first); rows of older attempts become superseded with it.

        Raises:
            InvariantError: the trajectory has ended, or its step has no dispatch record.
        """
        return await self._run(attempts.begin_attempt, trajectory)

    async def put_turn(self, row: TurnRow) -> None:
        """Add a partial row.

        Raises:
            FencedError: its attempt is no longer the newest, or has ended.
            InvariantError: the same key and attempt was put with other content.
        """
        await self._run(attempts.put_turn, row)

    async def record_outcome(self, outcome: OutcomeRecord) -> None:
        """Record an attempt's end for all its agents in one transaction.

        A row of the attempt that the outcome does not list is masked with reason `not_in_outcome`.

        Raises:
            ConfigError: a reward is not finite.
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

    async def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        """Take partial or ready rows out of training, with a reason."""
        await self._run(leases.mask, policy, keys, reason)

    async def ready(self, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order, each with its number of prompt and response tokens."""
        return await self._run(leases.ready, policy, step)

    async def lease(
        self, policy: PolicyName, holder: HolderId, micro_batch_id: str, keys: Sequence[SampleKey]
    ) -> tuple[Lease, list[Sample]]:
        """Lease ready rows of one step to a holder, all or none, and read them in the order of `keys`.

        Raises:
            CapacityError: a row is not ready.
            InvariantError: the micro-batch id is in use in this step, or `keys` are empty, repeated or of two steps.
        """
        return await self._run(leases.lease, policy, holder, micro_batch_id, keys)

    async def acknowledge(self, lease: Lease) -> None:
        """The holder's gradient cache includes the rows. Raises FencedError when the lease has ended."""
        await self._run(leases.acknowledge, lease)

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
            InvariantError: a row of the step is neither acknowledged, sealed, masked, failed nor superseded, or the
                record's micro-batches or version are not what the store holds.
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

    async def rewind(self, policy_version: int) -> None:
        """Forget everything of steps at or after `policy_version`; survives power loss."""
        await self._run(steps.rewind, policy_version)

    async def close(self) -> None:
        """Finish what was begun and release the files. A second call does nothing."""
        if self._writer is not None:
            await asyncio.wait([self._writer])
        await self._call(self._close_blocking)

    def _close_blocking(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            index.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
