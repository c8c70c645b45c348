"""The experience store of another process: the methods of `ExperienceStore`, as calls that wait for their answer.

Errors are those of the store, raised here as the same classes. A client may be used by several threads; their calls go
one after the other.
"""

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from flexmarl.core.codec import from_plain
from flexmarl.core.errors import FlexMARLError, InvariantError
from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, Lease, PolicyProgress, StoredStep
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
from flexmarl.runtime.local.store_line import Line
from flexmarl.runtime.local.store_rows import decode_granted, encode_lease, encode_trajectory
from flexmarl.runtime.local.store_wire import (
    ACKNOWLEDGE,
    BEAT,
    CLAIM,
    HELLO,
    PUT_FINISHED,
    WIRE_VERSION,
    encode_arguments,
    operation,
)
from flexmarl.store import PackedBatch, pack_finished

_BEATS_PER_TIMEOUT = 5
_MAX_PUTS = 8
"""Under way at most from one client, so that an owner that is slower holds its client up, not its memory."""


class _Heartbeat:
    """A thread that does nothing but tell the owner that this process lives, over a connection of its own."""

    def __init__(self, folder: Path, holder: HolderId, *, holder_timeout_s: float) -> None:
        self._line = Line(folder)
        self._holder = holder
        self._timeout_s = holder_timeout_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {holder}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_stopped.wait(self._timeout_s / _BEATS_PER_TIMEOUT):
                self._line.ask(BEAT, [self._holder], timeout_s=self._timeout_s)
        except FlexMARLError:
            return  # It is fenced, or the owner is gone: its next call says so.

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()
        self._line.close()
        self._thread.join()


class SentClaim(NamedTuple):
    """A claim that is under way."""

    number: int
    wait_s: float
    """How long its answer may take."""


class StoreClient:
    """A store that another process owns and lends (`StoreService`).

    With a holder it may lease rows. The owner fences the holder, so that its leased and unsealed acknowledged rows are
    ready again, when this client is closed, when its process ends in any way, or when it is silent for the owner's
    `holder_timeout_s`, as a stopped process is. Slow work ends no lease: a thread of the client keeps it. Only one call
    that keeps Python's interpreter lock for all that time does.
    """

    def __init__(self, folder: Path, *, holder: HolderId | None = None, call_timeout_s: float = 60.0) -> None:
        """Connect to the owner of the store in `folder`, whose every answer has to come within `call_timeout_s`.

        Raises:
            StoreError: nobody lends this store.
            InvariantError: the holder is connected already.
            ConfigError: the owner is another version of FlexMARL.
        """
        self.holder = holder
        self._call_timeout_s = call_timeout_s
        self._line = Line(folder)
        self._puts: deque[int] = deque()
        """Calls of `put_finished_soon` without an answer so far, oldest first."""
        self._heartbeat: _Heartbeat | None = None
        try:
            holder_timeout_s = self._line.ask(HELLO, [WIRE_VERSION, holder], call_timeout_s)
            if holder is not None:
                self._heartbeat = _Heartbeat(folder, holder, holder_timeout_s=holder_timeout_s)
        except BaseException:
            self._line.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. The owner fences the holder. A second call does nothing."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        self._line.close()

    def _ask(self, name: str, *arguments: object) -> Any:
        plain = self._line.ask(name, encode_arguments(arguments), self._call_timeout_s)
        return from_plain(operation(name).result, plain)

    def _own_holder(self, name: str) -> HolderId:
        if self.holder is None:
            raise InvariantError(f"{name} needs a holder: connect with StoreClient(folder, holder=...)")
        return self.holder

    # --- turns --------------------------------------------------------------------------------------------------------

    def open_step(self, dispatch: DispatchRecord) -> None:
        """Record the content of a step before its first request; survives power loss."""
        self._ask("open_step", dispatch)

    def extend_step(self, extension: StepExtension) -> None:
        """Add trajectories to an open step before their first request."""
        self._ask("extend_step", extension)

    def put_finished(self, trajectories: Sequence[FinishedTrajectory]) -> None:
        """Add whole trajectories of an open step in one transaction; their rows are ready. The fast way in."""
        self.put_finished_soon(trajectories)
        self.wait_for_puts()

    def put_finished_soon(self, trajectories: Sequence[FinishedTrajectory]) -> None:
        """Do the same without waiting: the rows are in the store when `wait_for_puts` has returned.

        While the owner writes these, the caller goes on; it waits for the oldest call when many are under way. The
        error of an earlier call may be raised here.
        """
        packed = [encode_trajectory(pack_finished(each)) for each in trajectories]
        if len(self._puts) >= _MAX_PUTS:
            self._line.receive(self._puts.popleft(), self._call_timeout_s)
        self._puts.append(self._line.send(PUT_FINISHED, [packed], self._call_timeout_s))

    def wait_for_puts(self) -> None:
        """Return once everything that was put is in the store; raise the first error of `put_finished_soon`."""
        while self._puts:
            self._line.receive(self._puts.popleft(), self._call_timeout_s)

    def begin_attempt(self, trajectory: TrajectoryKey) -> int:
        """Return the number of a new attempt; rows of older attempts become superseded with it."""
        attempt: int = self._ask("begin_attempt", trajectory)
        return attempt

    def put_turn(self, row: TurnRow) -> None:
        """Add a partial row. Raises FencedError when its attempt is no longer the newest."""
        self._ask("put_turn", row)

    def record_outcome(self, outcome: OutcomeRecord) -> None:
        """Record an attempt's end for all its agents in one transaction."""
        self._ask("record_outcome", outcome)

    def record_failure(self, failure: TrajectoryFailure) -> None:
        """Record that a trajectory failed for good."""
        self._ask("record_failure", failure)

    # --- data columns -------------------------------------------------------------------------------------------------

    def fill(self, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
        """Fill the advantage columns; rows whose attempt has an outcome become ready."""
        self._ask("fill", policy, values)

    def fill_tokens(self, policy: PolicyName, column: TokenColumn, values: Sequence[TokenValues]) -> None:
        """Fill a token column of live rows."""
        self._ask("fill_tokens", policy, column, values)

    def mask(self, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
        """Take rows out of training, with a reason."""
        self._ask("mask", policy, keys, reason)

    # --- training -----------------------------------------------------------------------------------------------------

    def ready(self, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order, each with its number of prompt and response tokens."""
        rows: list[tuple[SampleKey, int]] = self._ask("ready", policy, step)
        return rows

    def lease(
        self, policy: PolicyName, micro_batch_id: str, keys: Sequence[SampleKey], *, num_passes_done: int = 0
    ) -> tuple[Lease, list[Sample]]:
        """Lease these rows, all or none. Raises CapacityError when one cannot be."""
        holder = self._own_holder("lease")
        granted: tuple[Lease, list[Sample]] = self._ask("lease", policy, holder, micro_batch_id, keys, num_passes_done)
        return granted

    def claim(
        self,
        policy: PolicyName,
        step: int,
        micro_batch_id: str,
        *,
        max_rows: int,
        timeout_s: float,
        acknowledging: Lease | None = None,
    ) -> tuple[Lease, list[Sample]] | None:
        """Lease up to `max_rows` ready rows; wait for one up to `timeout_s`, else return None.

        Acknowledges a lease in the same transaction, also when no row is ready; an error leaves both undone.

        Raises:
            FencedError: the owner took this client for dead, so that the lease to acknowledge has ended too; connect
                again under a new holder.
        """
        granted = self.claim_packed(
            policy, step, micro_batch_id, max_rows=max_rows, timeout_s=timeout_s, acknowledging=acknowledging
        )
        return None if granted is None else (granted[0], granted[1].samples())

    def claim_packed(
        self,
        policy: PolicyName,
        step: int,
        micro_batch_id: str,
        *,
        max_rows: int,
        timeout_s: float,
        acknowledging: Lease | None = None,
    ) -> tuple[Lease, PackedBatch] | None:
        """Do the same and leave the rows packed: their numbers are views of what came. The fast way out."""
        return self.receive_claim(
            self.send_claim(
                policy, step, micro_batch_id, max_rows=max_rows, timeout_s=timeout_s, acknowledging=acknowledging
            )
        )

    def send_claim(
        self,
        policy: PolicyName,
        step: int,
        micro_batch_id: str,
        *,
        max_rows: int,
        timeout_s: float,
        acknowledging: Lease | None = None,
    ) -> "SentClaim":
        """Send the request of `claim_packed` alone, so that the owner works on it while the caller does something else.

        `receive_claim` must follow: the rows are this holder's whether or not it asks for them.
        """
        lease = None if acknowledging is None else encode_lease(acknowledging)
        arguments = [policy, step, self._own_holder(CLAIM), micro_batch_id, max_rows, float(timeout_s), lease]
        wait_s = self._call_timeout_s + timeout_s
        return SentClaim(self._line.send(CLAIM, arguments, wait_s), wait_s)

    def receive_claim(self, sent: "SentClaim") -> tuple[Lease, PackedBatch] | None:
        """Return the result of a claim that was sent."""
        return decode_granted(self._line.receive(sent.number, sent.wait_s))

    def acknowledge(self, lease: Lease) -> None:
        """The holder's gradient cache includes the rows. Raises FencedError when the lease has ended."""
        self._line.ask(ACKNOWLEDGE, encode_lease(lease), self._call_timeout_s)

    def seal(self, seal: Seal) -> None:
        """Make a sealed cache current and its micro-batches' rows sealed, in one transaction."""
        self._ask("seal", self._own_holder("seal"), seal)

    def current_seal(self, policy: PolicyName, step: int) -> Seal | None:
        """Return the newest seal of the policy's step."""
        seal: Seal | None = self._ask("current_seal", policy, step)
        return seal

    def commit(self, record: CommitRecord) -> None:
        """Make the step's trained rows committed, for all policies at once; survives power loss."""
        self._ask("commit", record)

    # --- what the store holds -----------------------------------------------------------------------------------------

    def progress(self, step: int) -> dict[PolicyName, PolicyProgress]:
        """Count rows by status."""
        counts: dict[PolicyName, PolicyProgress] = self._ask("progress", step)
        return counts

    def last_commit(self) -> CommitRecord | None:
        """Return the newest commit record."""
        record: CommitRecord | None = self._ask("last_commit")
        return record

    def commits_after(self, policy_version: int) -> list[CommitRecord]:
        """Return the commit records of later versions, in order."""
        records: list[CommitRecord] = self._ask("commits_after", policy_version)
        return records

    def trained_ids(self, step: int) -> dict[PolicyName, list[SampleKey]]:
        """Return the committed rows of a step in key order."""
        keys: dict[PolicyName, list[SampleKey]] = self._ask("trained_ids", step)
        return keys

    def micro_batch(self, policy: PolicyName, step: int, micro_batch_id: str) -> list[Sample]:
        """Return the samples of a committed micro-batch in the order in which they were trained."""
        samples: list[Sample] = self._ask("micro_batch", policy, step, micro_batch_id)
        return samples

    def open_steps(self) -> list[StoredStep]:
        """Return every step that was dispatched and not committed, in order."""
        steps: list[StoredStep] = self._ask("open_steps")
        return steps

    def pruned_version(self) -> int:
        """Return the lowest version from which every later committed step can be read again."""
        version: int = self._ask("pruned_version")
        return version
