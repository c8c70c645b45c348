"""One policy's table of rows: its columns, and the statements that read and move its rows.

Columns: the key with the attempt, meta columns, where the payload lies, the data columns (`reward`, `advantage`, user
columns, and where each token column lies), one ready bit `has_<column>` per data column, and the state of the row.
Every change of a status goes through a `RowMove`.
"""

import sqlite3
from collections.abc import Mapping, Sequence

from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, PolicyColumns
from flexmarl.core.records import ColumnScalar, TokenColumn
from flexmarl.store.columns import check_values, required_token_columns, user_columns
from flexmarl.store.lifecycle import OPEN_STATUSES, RowMove, RowStatus
from flexmarl.store.packing import PackedTurn, body_counts
from flexmarl.store.payload import PayloadLog
from flexmarl.store.row_reader import (
    IS_READY,
    KEY,
    KEY_IS,
    SLOT,
    TRAJECTORY_IS,
    TURN,
    RowReader,
    key_values,
    slot_columns,
    status_in,
    trajectory_values,
)

_INSERTED = f"{KEY}, {TURN}, num_tokens, num_response_tokens"
_NUM_INSERTED = 17


class PolicyTable(RowReader):
    """The rows of one policy. Every method runs inside a transaction of the caller."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        payload: PayloadLog,
        policy: PolicyName,
        number: int,
        declared: PolicyColumns,
        woken: set[PolicyName],
    ) -> None:
        """`woken` gets the policy whenever one of its rows has become ready."""
        super().__init__(connection, payload, policy, number)
        self.user_columns = user_columns(declared)
        self.required_tokens = required_token_columns(declared)
        self._woken = woken
        self._log = payload
        required = [column.ready_bit for column in self.user_columns if column.is_required]
        bits = ["has_outcome", "has_turn", "has_reward", "has_advantage", *required]
        self._is_complete = " AND ".join([*bits, *(f"has_{column}" for column in self.required_tokens)])

    def create(self) -> None:
        """Create the table and its partial indexes."""
        user = "".join(
            f"{column.sql_name} {column.sql_type}, {column.ready_bit} INTEGER NOT NULL DEFAULT 0, "
            for column in self.user_columns
        )
        tokens = "".join(
            f"{slot_columns(column).replace(',', ' INTEGER,')} INTEGER, has_{column} INTEGER NOT NULL DEFAULT 0, "
            for column in TokenColumn
        )
        self._connection.execute(
            f"CREATE TABLE {self.name} (step INTEGER NOT NULL, query INTEGER NOT NULL, trajectory INTEGER NOT NULL, "
            "agent TEXT NOT NULL, branch INTEGER NOT NULL, turn INTEGER NOT NULL, attempt INTEGER NOT NULL, "
            "sample_id TEXT AS (query || '_' || turn || '_' || trajectory), "
            "policy_version INTEGER NOT NULL, weights_version INTEGER NOT NULL, "
            "temperature REAL NOT NULL, finish_reason TEXT NOT NULL, num_tokens INTEGER NOT NULL, "
            "num_response_tokens INTEGER NOT NULL, payload_segment INTEGER NOT NULL, payload_offset INTEGER NOT NULL, "
            "payload_bytes INTEGER NOT NULL, payload_checksum INTEGER NOT NULL, has_turn INTEGER NOT NULL DEFAULT 1, "
            "reward REAL, has_reward INTEGER NOT NULL DEFAULT 0, advantage REAL, "
            f"has_advantage INTEGER NOT NULL DEFAULT 0, {user}{tokens}has_outcome INTEGER NOT NULL DEFAULT 0, "
            "status TEXT NOT NULL, reason TEXT, lease_id INTEGER, "
            f"num_passes INTEGER NOT NULL DEFAULT 0, PRIMARY KEY ({KEY}, attempt)) WITHOUT ROWID"
        )
        # SQLite appends the rest of the primary key, so the index also gives key order.
        self._connection.execute(f"CREATE INDEX {self._ready_index} ON {self.name} (step) WHERE {IS_READY}")
        # Without the status, so that rows that are acknowledged, sealed or committed change in one place.
        self._connection.execute(
            f"CREATE INDEX {self._lease_index} ON {self.name} (lease_id) WHERE lease_id IS NOT NULL"
        )

    # --- turns --------------------------------------------------------------------------------------------------------

    def insert(self, turn: PackedTurn) -> None:
        """Add a partial row; its payload is appended first, so that no row ever points to bytes that are not there."""
        (values,) = self._inserted([turn])
        marks = ",".join("?" * _NUM_INSERTED)
        self._connection.execute(
            f"INSERT INTO {self.name} ({_INSERTED}, status) VALUES ({marks}, '{RowStatus.PARTIAL}')", values
        )

    def insert_finished(
        self,
        turns: Sequence[PackedTurn],
        rewards: Sequence[float],
        advantages: Sequence[float],
        columns: Sequence[Mapping[str, ColumnScalar]],
    ) -> None:
        """Add rows with all their data but for token columns: they are ready unless they need those."""
        status = RowStatus.PARTIAL if self.required_tokens else RowStatus.READY
        marks = ",".join("?" * (_NUM_INSERTED + 2))
        self._connection.executemany(
            f"INSERT INTO {self.name} ({_INSERTED}, reward, advantage, has_reward, has_advantage, has_outcome, status) "
            f"VALUES ({marks}, 1, 1, 1, '{status}')",
            [(*row, *data) for row, *data in zip(self._inserted(turns), rewards, advantages, strict=True)],
        )
        if self.user_columns or any(columns):
            for turn, values in zip(turns, columns, strict=True):
                self.set_user_columns(turn.key, turn.attempt, values)
        self._woken.add(self.policy)

    def _inserted(self, turns: Sequence[PackedTurn]) -> list[tuple[object, ...]]:
        counts = [body_counts(turn) for turn in turns]
        slots = self._log.append([turn.body for turn in turns], max(turn.key.step for turn in turns))
        return [
            (
                *key_values(turn.key),
                turn.attempt,
                turn.policy_version,
                turn.weights_version,
                turn.temperature,
                turn.finish_reason.value,
                *slot,
                num_prompt + num_response,
                num_response,
            )
            for turn, slot, (num_prompt, num_response) in zip(turns, slots, counts, strict=True)
        ]

    def set_user_columns(self, key: SampleKey, attempt: int, values: Mapping[str, ColumnScalar]) -> None:
        """Fill the user columns of a row.

        Raises:
            ConfigError: a value is missing that is required, of the wrong type, or of an unknown column.
        """
        checked = check_values(key, self.policy, self.user_columns, values)
        if not self.user_columns:
            return
        assign = ", ".join(f"{column.sql_name}=?, {column.ready_bit}=?" for column in self.user_columns)
        bound = [part for value in checked for part in (value, value is not None)]
        self._connection.execute(
            f"UPDATE {self.name} SET {assign} WHERE {KEY_IS} AND attempt=?", (*bound, *key_values(key), attempt)
        )

    # --- attempts -----------------------------------------------------------------------------------------------------

    def supersede(self, trajectory: TrajectoryKey, reason: str) -> None:
        """Move every live row of a trajectory to superseded."""
        self._move(RowMove.SUPERSEDE, TRAJECTORY_IS, trajectory_values(trajectory), reason=reason)

    def end_attempt(self, trajectory: TrajectoryKey, attempt: int) -> None:
        """Set the outcome bit of an attempt's rows; those with all their data become ready."""
        where, values = f"{TRAJECTORY_IS} AND attempt=?", (*trajectory_values(trajectory), attempt)
        self._connection.execute(f"UPDATE {self.name} SET has_outcome=1 WHERE {where}", values)
        self._move(RowMove.COMPLETE, f"{where} AND {self._is_complete}", values)

    def fail_attempt(self, trajectory: TrajectoryKey, attempt: int, reason: str) -> None:
        """Move an attempt's rows to failed."""
        where = f"{TRAJECTORY_IS} AND attempt=?"
        self._move(RowMove.FAIL, where, (*trajectory_values(trajectory), attempt), reason=reason)

    def has_open_rows(self) -> bool:
        """Return whether a row is neither committed nor out of training."""
        query = f"SELECT 1 FROM {self.name} WHERE {status_in(OPEN_STATUSES)} LIMIT 1"
        return self._connection.execute(query).fetchone() is not None

    # --- data columns -------------------------------------------------------------------------------------------------

    def fill(self, values: Sequence[AdvantageValue]) -> int:
        """Fill empty advantage columns of partial and masked rows and return how many; complete rows become ready."""
        changed = self._connection.executemany(
            f"UPDATE {self.name} SET reward=?, advantage=?, has_reward=1, has_advantage=1 "
            f"WHERE {KEY_IS} AND NOT has_advantage AND {status_in([RowStatus.PARTIAL, RowStatus.MASKED])}",
            [(value.reward, value.advantage, *key_values(value.key)) for value in values],
        )
        self._complete([value.key for value in values])
        return changed.rowcount

    def fill_tokens(self, column: TokenColumn, keys: Sequence[SampleKey], bodies: Sequence[bytes]) -> int:
        """Fill an empty token column of rows that nobody trains and return how many; complete rows become ready."""
        slots = self._log.append(bodies, keys[0].step)
        assign = ", ".join(f"{column}_{part}=?" for part in SLOT)
        fillable = status_in([RowStatus.PARTIAL, RowStatus.READY, RowStatus.MASKED, RowStatus.FAILED])
        values = zip(slots, keys, bodies, strict=True)
        changed = self._connection.executemany(
            f"UPDATE {self.name} SET {assign}, has_{column}=1 "
            f"WHERE {KEY_IS} AND num_response_tokens=? AND NOT has_{column} AND {fillable}",
            [(*slot, *key_values(key), len(body) // 8) for slot, key, body in values],
        )
        self._complete(keys)
        return changed.rowcount

    def _complete(self, keys: Sequence[SampleKey]) -> None:
        self._move_many(RowMove.COMPLETE, keys, where=f"{KEY_IS} AND {self._is_complete}")

    def mask(self, keys: Sequence[SampleKey], reason: str) -> int:
        """Move rows to masked and return how many could be moved."""
        return self._move_many(RowMove.MASK, keys, reason=reason)

    # --- leases -------------------------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[SampleKey], lease_id: int) -> int:
        """Move ready rows to leased and return how many could be moved."""
        return self._move_many(RowMove.LEASE, keys, lease_id=lease_id)

    def lease_through(self, last: tuple[object, ...], lease_id: int) -> int:
        """Move the ready rows of a step, in key order up to `last`, to leased and return how many."""
        where = "step=? AND (query, trajectory, agent, branch, turn) <= (?,?,?,?,?)"
        statement = self._move_statement(self._ready_rows, RowMove.LEASE, where, {"lease_id": "?"})
        return self._connection.execute(statement, (lease_id, *last)).rowcount

    def lease_again(self, keys: Sequence[SampleKey], lease_id: int, *, holder: HolderId, num_passes: int) -> int:
        """Move rows that their holder has acknowledged for so many passes to leased and return how many."""
        owned = "SELECT lease_id FROM leases WHERE holder=? AND status='acknowledged'"
        where = f"{KEY_IS} AND num_passes=? AND lease_id IN ({owned})"
        return self._move_many(RowMove.LEASE_AGAIN, keys, where=where, last=(num_passes, holder), lease_id=lease_id)

    def move_leased(self, move: RowMove, step: int, lease_id: int) -> int:
        """Move the rows of a lease from the move's one source and return how many could be moved."""
        assign = {"num_passes": "num_passes+1"} if move is RowMove.ACKNOWLEDGE else {}
        statement = self._move_statement(self._leased_rows, move, "step=? AND lease_id=?", assign)
        return self._connection.execute(statement, (step, lease_id)).rowcount

    def release(self, move: RowMove, step: int, lease_id: int) -> list[SampleKey]:
        """Move the rows of a lease back to ready and return them."""
        condition = f"step=? AND {status_in(move.sources)} AND lease_id=?"
        found = self._connection.execute(f"SELECT {KEY} FROM {self._leased_rows} WHERE {condition}", (step, lease_id))
        keys = [SampleKey(*columns) for columns in found]
        self._move(move, "step=? AND lease_id=?", (step, lease_id), lease_id=None, num_passes=0)
        return keys

    # --- steps --------------------------------------------------------------------------------------------------------

    def commit(self, step: int) -> int:
        """Move the trained rows of a step to committed and return how many."""
        return self._move(RowMove.COMMIT, "step=?", (step,))

    def forget(self, step: int) -> None:
        """Delete the rows of this step and of all later ones."""
        self._connection.execute(f"DELETE FROM {self.name} WHERE step>=?", (step,))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _move(self, move: RowMove, where: str, values: Sequence[object], **assign: object) -> int:
        statement = self._move_statement(self.name, move, where, dict.fromkeys(assign, "?"))
        return self._moved(move, self._connection.execute(statement, (*assign.values(), *values)).rowcount)

    def _move_many(
        self,
        move: RowMove,
        keys: Sequence[SampleKey],
        *,
        where: str = KEY_IS,
        last: tuple[object, ...] = (),
        **assign: object,
    ) -> int:
        statement = self._move_statement(self.name, move, where, dict.fromkeys(assign, "?"))
        values = tuple(assign.values())
        rows = [(*values, *key_values(key), *last) for key in keys]
        return self._moved(move, self._connection.executemany(statement, rows).rowcount)

    def _moved(self, move: RowMove, num_rows: int) -> int:
        if move.target is RowStatus.READY and num_rows > 0:
            self._woken.add(self.policy)
        return num_rows

    @staticmethod
    def _move_statement(table: str, move: RowMove, where: str, assign: Mapping[str, str]) -> str:
        extra = "".join(f", {column}={value}" for column, value in assign.items())
        return f"UPDATE {table} SET status='{move.target}'{extra} WHERE {status_in(move.sources)} AND {where}"
