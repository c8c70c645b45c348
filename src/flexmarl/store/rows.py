"""One policy's table of rows: its columns, and the statements that read and move its rows.

Columns: the key with the attempt, meta columns, where the payload lies, the data columns `reward` and `advantage`, one
ready bit per data column, and the state of the row. Every change of a status goes through a `RowMove`.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexmarl.core.ids import PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue
from flexmarl.core.records import FinishReason, Sample, TurnRow, VersionSpan
from flexmarl.store.lifecycle import OPEN_STATUSES, RowMove, RowStatus
from flexmarl.store.payload import PayloadLog, PayloadSlot, pack_turn, unpack_turn

DATA_COLUMNS = ("turn", "reward", "advantage")
"""What a row must have before it is ready; each has a bit `has_<column>`. The turn is the payload with its scalars."""

_KEY = "step, query, trajectory, agent, branch, turn"
_KEY_IS = "step=? AND query=? AND trajectory=? AND agent=? AND branch=? AND turn=?"
_TRAJECTORY_IS = "step=? AND query=? AND trajectory=?"
_SLOT = "payload_offset, payload_bytes, payload_checksum"
_TURN = f"attempt, policy_version, weights_version, temperature, finish_reason, {_SLOT}"
_IS_COMPLETE = " AND ".join(["has_outcome", *(f"has_{column}" for column in DATA_COLUMNS)])
_LIVE = f"status <> '{RowStatus.SUPERSEDED}'"


def status_in(statuses: Iterable[RowStatus]) -> str:
    """Return the condition that a row has one of these states.

    Spelled with OR and literals: only so does SQLite see that the partial index on open rows covers it.
    """
    return "(" + " OR ".join(f"status='{status}'" for status in statuses) + ")"


def _key_values(key: SampleKey) -> tuple[int, int, int, str, int, int]:
    return (key.step, key.query, key.trajectory, key.agent, key.branch, key.turn)


def _trajectory_values(key: TrajectoryKey) -> tuple[int, int, int]:
    return (key.step, key.query, key.trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What a row's state and data columns hold."""

    status: RowStatus
    reason: str | None
    reward: float | None
    advantage: float | None
    lease_id: int | None


class PolicyTable:
    """The rows of one policy. Every method runs inside a transaction of the caller."""

    def __init__(self, connection: sqlite3.Connection, payload: PayloadLog, policy: PolicyName, number: int) -> None:
        """Name the table `rows_<number>_<policy>`: the number tells policies apart that differ in case only."""
        self.policy = policy
        self._connection = connection
        self._payload = payload
        self._table = '"' + f"rows_{number}_{policy}".replace('"', '""') + '"'
        self._index = '"' + f"open_{number}_{policy}".replace('"', '""') + '"'
        # Named, because SQLite prefers the primary key, which would read the whole step for a few open rows.
        self._by_status = f"{self._table} INDEXED BY {self._index}"

    def create(self) -> None:
        """Create the table and the partial index on its open rows."""
        bits = ", ".join(f"has_{column} INTEGER NOT NULL DEFAULT 0" for column in DATA_COLUMNS)
        self._connection.execute(
            f"CREATE TABLE {self._table} (step INTEGER NOT NULL, query INTEGER NOT NULL, trajectory INTEGER NOT NULL, "
            "agent TEXT NOT NULL, branch INTEGER NOT NULL, turn INTEGER NOT NULL, attempt INTEGER NOT NULL, "
            "sample_id TEXT NOT NULL, policy_version INTEGER NOT NULL, weights_version INTEGER NOT NULL, "
            "temperature REAL NOT NULL, finish_reason TEXT NOT NULL, num_tokens INTEGER NOT NULL, "
            "payload_offset INTEGER NOT NULL, payload_bytes INTEGER NOT NULL, payload_checksum INTEGER NOT NULL, "
            f"reward REAL, advantage REAL, {bits}, has_outcome INTEGER NOT NULL DEFAULT 0, "
            "status TEXT NOT NULL, reason TEXT, lease_id INTEGER, micro_batch_id TEXT, "
            f"PRIMARY KEY ({_KEY}, attempt)) WITHOUT ROWID"
        )
        self._connection.execute(
            # SQLite appends the rest of the primary key, so the index also gives key order.
            f"CREATE INDEX {self._index} ON {self._table} (step, status) WHERE {status_in(OPEN_STATUSES)}"
        )

    # --- turns --------------------------------------------------------------------------------------------------------

    def insert(self, row: TurnRow) -> None:
        """Add a partial row; its payload is appended first, so that no row ever points to bytes that are not there."""
        slot = self._payload.append(pack_turn(row))
        self._connection.execute(
            f"INSERT INTO {self._table} ({_KEY}, {_TURN}, sample_id, num_tokens, has_turn, status) "
            "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,1,?)",
            (
                *_key_values(row.key),
                row.attempt,
                row.policy_version,
                row.weights_version,
                row.temperature,
                row.finish_reason.value,
                slot.offset,
                slot.num_bytes,
                slot.checksum,
                row.key.sample_id,
                len(row.prompt_tokens) + len(row.response_tokens),
                RowStatus.PARTIAL.value,
            ),
        )

    def find_turn(self, key: SampleKey, attempt: int) -> TurnRow | None:
        """Return a turn, read back whole, or None."""
        columns = self._connection.execute(
            f"SELECT {_TURN} FROM {self._table} WHERE {_KEY_IS} AND attempt=?", (*_key_values(key), attempt)
        ).fetchone()
        return None if columns is None else self._read_turn(key, *columns)

    def _read_turn(
        self,
        key: SampleKey,
        attempt: int,
        policy_version: int,
        weights_version: int,
        temperature: float,
        finish_reason: str,
        payload_offset: int,
        payload_bytes: int,
        payload_checksum: int,
    ) -> TurnRow:
        slot = PayloadSlot(offset=payload_offset, num_bytes=payload_bytes, checksum=payload_checksum)
        lists = unpack_turn(self._payload.read(slot))
        spans = tuple(VersionSpan(start=start, end=end, policy_version=v) for start, end, v in lists.version_spans)
        return TurnRow(
            key=key,
            attempt=attempt,
            policy=self.policy,
            policy_version=policy_version,
            weights_version=weights_version,
            prompt_tokens=lists.prompt_tokens,
            response_tokens=lists.response_tokens,
            logprobs=lists.logprobs,
            temperature=temperature,
            finish_reason=FinishReason(finish_reason),
            version_spans=spans,
        )

    def samples(self, step: int, lease_id: int) -> list[Sample]:
        """Return the leased rows of a lease with everything that training needs, in key order."""
        found = self._connection.execute(
            f"SELECT {_KEY}, {_TURN}, advantage, reward FROM {self._by_status} "
            f"WHERE step=? AND {status_in([RowStatus.LEASED])} AND lease_id=? ORDER BY {_KEY}",
            (step, lease_id),
        ).fetchall()
        return [
            Sample(
                turn=self._read_turn(SampleKey(*columns[:6]), *columns[6:-2]),
                advantage=columns[-2],
                reward=columns[-1],
            )
            for columns in found
        ]

    # --- attempts -----------------------------------------------------------------------------------------------------

    def keys_of_attempt(self, trajectory: TrajectoryKey, attempt: int) -> list[SampleKey]:
        """Return the rows of one attempt."""
        found = self._connection.execute(
            f"SELECT {_KEY} FROM {self._table} WHERE {_TRAJECTORY_IS} AND attempt=?",
            (*_trajectory_values(trajectory), attempt),
        )
        return [SampleKey(*columns) for columns in found]

    def supersede(self, trajectory: TrajectoryKey, reason: str) -> None:
        """Move every live row of a trajectory to superseded."""
        self._move(RowMove.SUPERSEDE, _TRAJECTORY_IS, _trajectory_values(trajectory), reason=reason)

    def end_attempt(self, trajectory: TrajectoryKey, attempt: int) -> None:
        """Set the outcome bit of an attempt's rows; those with all their data become ready."""
        where, values = f"{_TRAJECTORY_IS} AND attempt=?", (*_trajectory_values(trajectory), attempt)
        self._connection.execute(f"UPDATE {self._table} SET has_outcome=1 WHERE {where}", values)
        self._move(RowMove.COMPLETE, f"{where} AND {_IS_COMPLETE}", values)

    def fail_attempt(self, trajectory: TrajectoryKey, attempt: int, reason: str) -> None:
        """Move an attempt's rows to failed."""
        where = f"{_TRAJECTORY_IS} AND attempt=?"
        self._move(RowMove.FAIL, where, (*_trajectory_values(trajectory), attempt), reason=reason)

    # --- data columns -------------------------------------------------------------------------------------------------

    def state_of(self, key: SampleKey) -> RowState | None:
        """Return the state of the key's live row, or None when there is none."""
        columns = self._connection.execute(
            f"SELECT status, reason, reward, advantage, lease_id FROM {self._table} WHERE {_KEY_IS} AND {_LIVE}",
            _key_values(key),
        ).fetchone()
        if columns is None:
            return None
        status, reason, reward, advantage, lease_id = columns
        return RowState(status=RowStatus(status), reason=reason, reward=reward, advantage=advantage, lease_id=lease_id)

    def fill(self, values: Sequence[AdvantageValue]) -> int:
        """Fill empty advantage columns of partial and masked rows and return how many; complete rows become ready."""
        changed = self._connection.executemany(
            f"UPDATE {self._table} SET reward=?, advantage=?, has_reward=1, has_advantage=1 "
            f"WHERE {_KEY_IS} AND NOT has_advantage AND {status_in([RowStatus.PARTIAL, RowStatus.MASKED])}",
            [(value.reward, value.advantage, *_key_values(value.key)) for value in values],
        )
        self._move_many(RowMove.COMPLETE, [value.key for value in values], where=f"{_KEY_IS} AND {_IS_COMPLETE}")
        return changed.rowcount

    def mask(self, keys: Sequence[SampleKey], reason: str) -> int:
        """Move rows to masked and return how many could be moved."""
        return self._move_many(RowMove.MASK, keys, reason=reason)

    # --- leases -------------------------------------------------------------------------------------------------------

    def ready(self, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order with their numbers of tokens."""
        found = self._connection.execute(
            f"SELECT {_KEY}, num_tokens FROM {self._by_status} "
            f"WHERE step=? AND {status_in([RowStatus.READY])} ORDER BY {_KEY}",
            (step,),
        )
        return [(SampleKey(*columns[:6]), columns[6]) for columns in found]

    def lease(self, keys: Sequence[SampleKey], lease_id: int, micro_batch_id: str) -> int:
        """Move rows to leased and return how many could be moved."""
        return self._move_many(RowMove.LEASE, keys, lease_id=lease_id, micro_batch_id=micro_batch_id)

    def move_leased(self, move: RowMove, step: int, lease_id: int) -> int:
        """Move the rows of a lease from the move's one source and return how many could be moved."""
        statement = self._move_statement(self._by_status, move, "step=? AND lease_id=?", [])
        return self._connection.execute(statement, (step, lease_id)).rowcount

    def release(self, step: int, lease_id: int) -> list[SampleKey]:
        """Move the rows of a lease back to ready and return them."""
        found = self._connection.execute(
            f"SELECT {_KEY} FROM {self._table} WHERE step=? AND {status_in(RowMove.RELEASE.sources)} AND lease_id=?",
            (step, lease_id),
        ).fetchall()
        where, values = "step=? AND lease_id=?", (step, lease_id)
        self._move(RowMove.RELEASE, where, values, lease_id=None, micro_batch_id=None)
        return [SampleKey(*columns) for columns in found]

    # --- steps --------------------------------------------------------------------------------------------------------

    def keys_in(self, step: int, statuses: Iterable[RowStatus]) -> list[SampleKey]:
        """Return the rows of a step that have one of these states, in key order."""
        found = self._connection.execute(
            f"SELECT {_KEY} FROM {self._table} WHERE step=? AND {status_in(statuses)} ORDER BY {_KEY}", (step,)
        )
        return [SampleKey(*columns) for columns in found]

    def trained_micro_batches(self, step: int) -> set[str]:
        """Return the micro-batches whose rows are acknowledged or sealed."""
        found = self._connection.execute(
            f"SELECT DISTINCT micro_batch_id FROM {self._table} WHERE step=? AND {status_in(RowMove.COMMIT.sources)}",
            (step,),
        )
        return {micro_batch_id for (micro_batch_id,) in found}

    def commit(self, step: int) -> int:
        """Move the trained rows of a step to committed and return how many."""
        return self._move(RowMove.COMMIT, "step=?", (step,))

    def count(self, step: int) -> dict[RowStatus, int]:
        """Return the number of rows of a step by state."""
        found = self._connection.execute(
            f"SELECT status, count(*) FROM {self._table} WHERE step=? GROUP BY status", (step,)
        )
        return {RowStatus(status): number for status, number in found}

    def forget(self, step: int) -> None:
        """Delete the rows of this step and of all later ones."""
        self._connection.execute(f"DELETE FROM {self._table} WHERE step>=?", (step,))

    def payload_end(self) -> int:
        """Return the offset behind the last payload of any row."""
        query = f"SELECT coalesce(max(payload_offset + payload_bytes), 0) FROM {self._table}"
        return int(self._connection.execute(query).fetchone()[0])

    def slots_behind(self, offset: int) -> list[tuple[int, PayloadSlot]]:
        """Return the step and the payload of every row that lies behind `offset`."""
        found = self._connection.execute(
            f"SELECT step, {_SLOT} FROM {self._table} WHERE payload_offset + payload_bytes > ?", (offset,)
        )
        return [
            (step, PayloadSlot(offset=start, num_bytes=num_bytes, checksum=checksum))
            for step, start, num_bytes, checksum in found
        ]

    # --- moves --------------------------------------------------------------------------------------------------------

    def _move(self, move: RowMove, where: str, values: Sequence[object], **assign: object) -> int:
        statement = self._move_statement(self._table, move, where, assign)
        return self._connection.execute(statement, (*assign.values(), *values)).rowcount

    def _move_many(self, move: RowMove, keys: Sequence[SampleKey], *, where: str = _KEY_IS, **assign: object) -> int:
        statement = self._move_statement(self._table, move, where, assign)
        values = tuple(assign.values())
        return self._connection.executemany(statement, [(*values, *_key_values(key)) for key in keys]).rowcount

    @staticmethod
    def _move_statement(table: str, move: RowMove, where: str, assign: Iterable[str]) -> str:
        extra = "".join(f", {column}=?" for column in assign)
        return f"UPDATE {table} SET status='{move.target}'{extra} WHERE {status_in(move.sources)} AND {where}"
