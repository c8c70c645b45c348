"""`StoreView`: a look into a store that another process may be working on. It changes nothing and takes no lock."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import PolicyColumns
from flexmarl.core.records import (
    CommitRecord,
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    Sample,
    Seal,
    StepExtension,
    TokenColumn,
    TrajectoryFailure,
    TurnRow,
)
from flexmarl.store.bytes_file import DiskSegments
from flexmarl.store.columns import UserColumn, user_columns
from flexmarl.store.faults import translated
from flexmarl.store.lifecycle import LeaseStatus, RowStatus
from flexmarl.store.packing import unpack_sample, unpack_turn
from flexmarl.store.payload import PayloadReader
from flexmarl.store.plan import StepPlan
from flexmarl.store.row_reader import KEY, LIVE, TRAJECTORY_IS, RowReader, trajectory_values
from flexmarl.store.schema import check_format, decode_keys, decode_record, read_meta
from flexmarl.store.view_records import (
    AttemptView,
    GroupView,
    LeaseView,
    RewardSummary,
    RowCounts,
    SealView,
    StepView,
    StoreSummary,
    TrajectoryView,
    TurnView,
)

T = TypeVar("T")

BUSY_TIMEOUT_S = 5.0
"""How long a look waits for the owner to start or end."""

_TURN_META = (
    f"{KEY}, attempt, policy_version, weights_version, temperature, finish_reason, num_tokens, num_response_tokens, "
    "status, reason, reward, advantage, lease_id, num_passes, " + ", ".join(f"has_{column}" for column in TokenColumn)
)


class StoreView:
    """A store, to be looked at. Each method sees one moment of it; two calls may see two moments."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        """Take over a connection; use `open`."""
        self._folder = folder
        self._connection = connection
        self._payload = PayloadReader(DiskSegments(folder, is_read_only=True), {})

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the store in `folder` for reading.

        Raises:
            StoreError: there is no store, it is damaged, or other code wrote it.
        """
        path = folder / "index.db"
        if not path.is_file():
            raise StoreError(f"{folder} has no experience store (no index.db): give the folder of a run that has begun")
        # Without a log nobody is writing, and no file beside it may be made: the folder may be read-only.
        mode = "mode=ro" if path.with_name("index.db-wal").exists() else "mode=ro&immutable=1"
        with translated(str(path)):
            uri = f"{path.absolute().as_uri()}?{mode}"
            # Calls come one at a time, though not always from the same thread.
            connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S
            )
            try:
                tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
                if "meta" not in tables:
                    raise StoreError(f"{path} is a database of something else: give the folder of a run")
                check_format(connection, str(path))
            except BaseException:
                connection.close()
                raise
        return cls(folder, connection)

    def close(self) -> None:
        """Release the files."""
        self._payload.close()
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the view itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the files."""
        self.close()

    def _read(self, function: Callable[..., T], *args: object) -> T:
        """Run queries that see the same moment; what cannot be understood is damaged."""
        name = str(self._folder / "index.db")
        with translated(name):
            self._connection.execute("BEGIN")
            try:
                return function(*args)
            except ValueError as error:
                raise StoreError(f"{name} is damaged: {error}; restore the file") from error
            finally:
                self._connection.execute("ROLLBACK")

    # --- what there is ------------------------------------------------------------------------------------------------

    def summary(self) -> StoreSummary:
        """Return what holds for the store as a whole."""
        return self._read(self._summary)

    def _summary(self) -> StoreSummary:
        files = sorted(path for path in self._folder.iterdir() if path.name.startswith(("index.db", "payload-")))
        pruned = self._connection.execute("SELECT coalesce(max(policy_version), 0) FROM pruned_segments").fetchone()[0]
        fenced = self._connection.execute("SELECT holder FROM fenced ORDER BY holder")
        return StoreSummary(
            format_version=read_meta(self._connection, "format_version"),
            columns={reader.policy: declared for reader, declared in self._readers()},
            fenced=tuple(HolderId(holder) for (holder,) in fenced),
            pruned_version=pruned,
            file_bytes={path.name: path.stat().st_size for path in files if path.exists()},
        )

    def _readers(self) -> list[tuple[RowReader, PolicyColumns]]:
        pruned = self._connection.execute("SELECT segment, policy_version FROM pruned_segments").fetchall()
        self._payload.pruned = dict(pruned)
        found = self._connection.execute("SELECT number, policy, columns FROM policies ORDER BY number").fetchall()
        return [
            (RowReader(self._connection, self._payload, policy, number), decode_record(PolicyColumns, text))
            for number, policy, text in found
        ]

    def steps(self) -> list[StepView]:
        """Return every step that was dispatched, in order."""
        return self._read(self._steps)

    def _steps(self) -> list[StepView]:
        found = self._connection.execute("SELECT step FROM dispatches ORDER BY step").fetchall()
        return [self._step(step) for (step,) in found]

    def _step(self, step: int) -> StepView:
        plan = self._plan(step)
        record = self._connection.execute("SELECT record FROM commits WHERE step=?", (step,)).fetchone()
        ends = self._ends(step)
        rows = {reader.policy: self._counts(reader, step) for reader, _ in self._readers()}
        return StepView(
            dispatch=plan.dispatch,
            extensions=plan.extensions,
            commit=None if record is None else decode_record(CommitRecord, record[0]),
            num_trajectories=sum(plan.num_trajectories.values()),
            num_outcomes=sum(kind == "outcome" for _, kind in ends),
            num_failures=sum(kind == "failure" for _, kind in ends),
            rows={policy: counts for policy, counts in rows.items() if counts.by_status},
        )

    def _plan(self, step: int) -> StepPlan:
        found = self._connection.execute("SELECT record FROM dispatches WHERE step=?", (step,)).fetchone()
        if found is None:
            newest = self._connection.execute("SELECT max(step) FROM dispatches").fetchone()[0]
            raise StoreError(f"{self._folder} has no step {step}; the newest is {newest}")
        extensions = self._connection.execute("SELECT record FROM extensions WHERE step=? ORDER BY number", (step,))
        return StepPlan(
            dispatch=decode_record(DispatchRecord, found[0]),
            extensions=[decode_record(StepExtension, text) for (text,) in extensions],
        )

    def _ends(self, step: int) -> list[tuple[int, str]]:
        """Return the query of each trajectory that has ended, and how."""
        return self._connection.execute("SELECT query, kind FROM outcomes WHERE step=?", (step,)).fetchall()

    def _counts(self, reader: RowReader, step: int) -> RowCounts:
        found = self._connection.execute(
            f"SELECT status, reason, count(*) FROM {reader.name} WHERE step=? GROUP BY status, reason", (step,)
        )
        by_status: dict[RowStatus, int] = {}
        by_reason: dict[tuple[RowStatus, str], int] = {}
        for name, reason, number in found:
            status = RowStatus(name)
            by_status[status] = by_status.get(status, 0) + number
            if reason is not None:
                by_reason[status, reason] = number
        return RowCounts(by_status=by_status, by_reason=by_reason)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, step: int) -> StepView:
        """Return one step. Raises StoreError when it was not dispatched."""
        return self._read(self._step, step)

    def groups(self, step: int) -> list[GroupView]:
        """Return what each query did with each policy, in order. Raises StoreError when there is no such step."""
        return self._read(self._groups, step)

    def _groups(self, step: int) -> list[GroupView]:
        plan, ends = self._plan(step), self._ends(step)
        groups = []
        for reader, _ in self._readers():
            found = self._connection.execute(
                f"SELECT query, status, count(*), count(reward), total(reward), min(reward), max(reward) "
                f"FROM {reader.name} WHERE step=? AND {LIVE} GROUP BY query, status ORDER BY query",
                (step,),
            )
            by_query: dict[int, list[tuple[Any, ...]]] = {}
            for query, *counts in found:
                by_query.setdefault(query, []).append(tuple(counts))
            for query, rows in by_query.items():
                groups.append(
                    GroupView(
                        query=query,
                        policy=reader.policy,
                        num_trajectories=plan.num_trajectories.get(query, 0),
                        num_outcomes=ends.count((query, "outcome")),
                        num_failures=ends.count((query, "failure")),
                        num_rows=sum(row[1] for row in rows),
                        by_status={RowStatus(row[0]): row[1] for row in rows},
                        rewards=_rewards(rows),
                    )
                )
        return sorted(groups, key=lambda group: (group.query, group.policy))

    def leases(self, step: int) -> list[LeaseView]:
        """Return every lease of a step, in order."""
        query = "SELECT lease_id, policy, holder, micro_batch_id, num_rows, status FROM leases WHERE step=?"
        found = self._read(lambda: self._connection.execute(f"{query} ORDER BY lease_id", (step,)).fetchall())
        return [
            LeaseView(
                lease_id=lease_id,
                policy=PolicyName(policy),
                holder=HolderId(holder),
                micro_batch_id=micro_batch_id,
                num_rows=num_rows,
                status=LeaseStatus(status),
            )
            for lease_id, policy, holder, micro_batch_id, num_rows, status in found
        ]

    def seals(self, step: int) -> list[SealView]:
        """Return every seal of a step, in order of policy and number; those of a run that died are forgotten."""
        query = "SELECT number, holder, record FROM seals WHERE step=? ORDER BY policy, number"
        found = self._read(lambda: self._connection.execute(query, (step,)).fetchall())
        return [
            SealView(number=number, holder=HolderId(holder), seal=decode_record(Seal, text))
            for number, holder, text in found
        ]

    def commits(self) -> list[CommitRecord]:
        """Return every commit record, in order."""
        query = "SELECT record FROM commits ORDER BY step"
        found = self._read(lambda: self._connection.execute(query).fetchall())
        return [decode_record(CommitRecord, text) for (text,) in found]

    # --- trajectories -------------------------------------------------------------------------------------------------

    def trajectory(self, key: TrajectoryKey) -> TrajectoryView:
        """Return a trajectory with all its attempts. Raises StoreError when it has not begun."""
        return self._read(self._trajectory, key)

    def _trajectory(self, key: TrajectoryKey) -> TrajectoryView:
        found = self._connection.execute(
            "SELECT attempt, kind, record FROM attempts LEFT JOIN outcomes USING (step, query, trajectory, attempt) "
            f"WHERE {TRAJECTORY_IS} ORDER BY attempt",
            trajectory_values(key),
        ).fetchall()
        if not found:
            raise StoreError(f"{self._folder}: trajectory {key} has not begun")
        turns = [
            turn for reader, columns in self._readers() for turn in self._turns(reader, user_columns(columns), key)
        ]
        turns.sort(key=lambda turn: turn.key)
        return TrajectoryView(
            key=key,
            attempts=tuple(
                AttemptView(
                    attempt=attempt,
                    outcome=decode_record(OutcomeRecord, text) if kind == "outcome" else None,
                    failure=decode_record(TrajectoryFailure, text) if kind == "failure" else None,
                    turns=tuple(turn for turn in turns if turn.attempt == attempt),
                )
                for attempt, kind, text in found
            ),
        )

    def _turns(self, reader: RowReader, user: list[UserColumn], key: TrajectoryKey) -> list[TurnView]:
        own = "".join(f", {column.sql_name}" for column in user)
        found = self._connection.execute(
            f"SELECT {_TURN_META}{own} FROM {reader.name} WHERE {TRAJECTORY_IS}", trajectory_values(key)
        )
        first = 19 + len(TokenColumn)
        return [
            TurnView(
                key=SampleKey(*row[:6]),
                attempt=row[6],
                policy=reader.policy,
                policy_version=row[7],
                weights_version=row[8],
                temperature=row[9],
                finish_reason=FinishReason(row[10]),
                num_prompt_tokens=row[11] - row[12],
                num_response_tokens=row[12],
                status=RowStatus(row[13]),
                reason=row[14],
                reward=row[15],
                advantage=row[16],
                lease_id=row[17],
                num_passes=row[18],
                columns={
                    column.name: bool(value) if column.kind == "bool" else value
                    for column, value in zip(user, row[first:], strict=True)
                    if value is not None
                },
                scored=tuple(column for column, bit in zip(TokenColumn, row[19:first], strict=True) if bit),
            )
            for row in found
        ]

    def turn_rows(self, step: int) -> list[TurnRow]:
        """Return the turns of a step with their tokens, without superseded ones, in key order.

        Raises:
            StoreError: they have been pruned, or are damaged.
        """
        return self._read(self._turn_rows, step)

    def _turn_rows(self, step: int) -> list[TurnRow]:
        packed = [turn for reader, _ in self._readers() for turn in reader.turns(f"step=? AND {LIVE}", (step,))]
        return [unpack_turn(turn) for turn in sorted(packed, key=lambda turn: turn.key)]

    def micro_batch(self, policy: PolicyName, step: int, micro_batch_id: str) -> list[Sample]:
        """Return the samples of a committed micro-batch in the order in which they were trained.

        Raises:
            StoreError: no commit has it, or its payload has been pruned, or is damaged.
        """
        return self._read(self._micro_batch, policy, step, micro_batch_id)

    def _micro_batch(self, policy: PolicyName, step: int, micro_batch_id: str) -> list[Sample]:
        found = self._connection.execute(
            "SELECT keys FROM leases WHERE policy=? AND step=? AND micro_batch_id=? AND status=?",
            (policy, step, micro_batch_id, LeaseStatus.COMMITTED),
        ).fetchone()
        if found is None:
            raise StoreError(
                f"{self._folder}: micro-batch {micro_batch_id} of policy {policy!r}, step {step}, is in no commit"
            )
        keys = decode_keys(step, found[0])
        (reader,) = (reader for reader, _ in self._readers() if reader.policy == policy)
        samples = {packed.turn.key: packed for packed in reader.committed_samples(keys)}
        return [unpack_sample(samples[key]) for key in keys]


def _rewards(rows: list[tuple[Any, ...]]) -> RewardSummary | None:
    """Summarise (status, rows, rewards, sum, lowest, highest) of several states."""
    rows = [row for row in rows if row[2] > 0]
    num_rows = sum(row[2] for row in rows)
    if num_rows == 0:
        return None
    return RewardSummary(
        num_rows=num_rows,
        mean=sum(row[3] for row in rows) / num_rows,
        lowest=min(row[4] for row in rows),
        highest=max(row[5] for row in rows),
    )
