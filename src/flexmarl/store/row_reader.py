"""Reading one policy's table of rows. `rows.py` has its columns and what changes them."""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexmarl.core.ids import PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import FinishReason, TokenColumn
from flexmarl.store.batch import PackedBatch
from flexmarl.store.lifecycle import RowMove, RowStatus
from flexmarl.store.packing import PackedSample, PackedTurn
from flexmarl.store.payload import PayloadEnd, PayloadReader, PayloadSlot

KEY = "step, query, trajectory, agent, branch, turn"
KEY_IS = "step=? AND query=? AND trajectory=? AND agent=? AND branch=? AND turn=?"
TRAJECTORY_IS = "step=? AND query=? AND trajectory=?"
SLOT = ("segment", "offset", "bytes", "checksum")
SLOTS = {"payload": "", **{str(column): f"has_{column} AND " for column in TokenColumn}}
"""What has a place in the payload log, each with the condition that it is there."""
_META = "attempt, policy_version, weights_version, temperature, finish_reason"
LIVE = f"status <> '{RowStatus.SUPERSEDED}'"


def slot_columns(name: str) -> str:
    """Return the columns that say where a payload record lies."""
    return ", ".join(f"{name}_{part}" for part in SLOT)


TURN = f"{_META}, {slot_columns('payload')}"
_SAMPLE = f"{KEY}, {TURN}, advantage, reward, " + ", ".join(slot_columns(column) for column in TokenColumn)
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}


def table_name(policy: PolicyName, number: int) -> str:
    """Return `rows_<number>_<policy>`, quoted: the number tells policies apart that differ in case only."""
    return '"' + f"rows_{number}_{policy}".replace('"', '""') + '"'


def status_in(statuses: Iterable[RowStatus]) -> str:
    """Return the condition that a row has one of these states.

    Spelled with OR and literals: only so does SQLite see that the partial index on open rows covers it.
    """
    return "(" + " OR ".join(f"status='{status}'" for status in statuses) + ")"


IS_READY = status_in([RowStatus.READY])
"""As the partial index on ready rows finds them, in key order."""


def key_values(key: SampleKey) -> tuple[int, int, int, str, int, int]:
    """Return the columns of a key."""
    return (key.step, key.query, key.trajectory, key.agent, key.branch, key.turn)


def trajectory_values(key: TrajectoryKey) -> tuple[int, int, int]:
    """Return the columns of a trajectory's key."""
    return (key.step, key.query, key.trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What a row's state and data columns hold."""

    status: RowStatus
    reason: str | None
    reward: float | None
    advantage: float | None
    lease_id: int | None
    num_passes: int
    num_response_tokens: int


class RowReader:
    """The rows of one policy, to be looked at."""

    def __init__(self, connection: sqlite3.Connection, payload: PayloadReader, policy: PolicyName, number: int) -> None:
        """Read the table with that number."""
        self.policy = policy
        self.name = table_name(policy, number)
        self._connection = connection
        self._payload = payload
        self._ready_index, self._lease_index = (
            '"' + f"{kind}_{number}_{policy}".replace('"', '""') + '"' for kind in ("ready", "leased")
        )
        # Named, because SQLite prefers the primary key, which would read the whole step for a few rows.
        self._ready_rows = f"{self.name} INDEXED BY {self._ready_index}"
        self._leased_rows = f"{self.name} INDEXED BY {self._lease_index}"

    # --- keys and states ----------------------------------------------------------------------------------------------

    def keys_of_attempt(self, trajectory: TrajectoryKey, attempt: int) -> list[SampleKey]:
        """Return the rows of one attempt."""
        found = self._connection.execute(
            f"SELECT {KEY} FROM {self.name} WHERE {TRAJECTORY_IS} AND attempt=?",
            (*trajectory_values(trajectory), attempt),
        )
        return [SampleKey(*columns) for columns in found]

    def keys_in(self, step: int, statuses: Iterable[RowStatus]) -> list[SampleKey]:
        """Return the rows of a step that have one of these states, in key order."""
        found = self._connection.execute(
            f"SELECT {KEY} FROM {self.name} WHERE step=? AND {status_in(statuses)} ORDER BY {KEY}", (step,)
        )
        return [SampleKey(*columns) for columns in found]

    def key_without_passes(self, step: int, num_passes: int) -> tuple[SampleKey, int] | None:
        """Return a trained row that was not used so often, and how often it was; None when there is none."""
        found = self._connection.execute(
            f"SELECT {KEY}, num_passes FROM {self.name} "
            f"WHERE step=? AND {status_in(RowMove.COMMIT.sources)} AND num_passes<>? ORDER BY {KEY} LIMIT 1",
            (step, num_passes),
        ).fetchone()
        return None if found is None else (SampleKey(*found[:6]), found[6])

    def ready(self, step: int) -> list[tuple[SampleKey, int]]:
        """Return ready rows in key order with their numbers of tokens."""
        found = self._connection.execute(
            f"SELECT {KEY}, num_tokens FROM {self._ready_rows} WHERE step=? AND {IS_READY} ORDER BY {KEY}",
            (step,),
        )
        return [(SampleKey(*columns[:6]), columns[6]) for columns in found]

    def state_of(self, key: SampleKey) -> RowState | None:
        """Return the state of the key's live row, or None when there is none."""
        columns = self._connection.execute(
            "SELECT status, reason, reward, advantage, lease_id, num_passes, num_response_tokens "
            f"FROM {self.name} WHERE {KEY_IS} AND {LIVE}",
            key_values(key),
        ).fetchone()
        if columns is None:
            return None
        status, reason, reward, advantage, lease_id, num_passes, num_response_tokens = columns
        return RowState(
            status=RowStatus(status),
            reason=reason,
            reward=reward,
            advantage=advantage,
            lease_id=lease_id,
            num_passes=num_passes,
            num_response_tokens=num_response_tokens,
        )

    def count(self, step: int) -> dict[RowStatus, int]:
        """Return the number of rows of a step by state."""
        found = self._connection.execute(
            f"SELECT status, count(*) FROM {self.name} WHERE step=? GROUP BY status", (step,)
        )
        return {RowStatus(status): number for status, number in found}

    # --- turns --------------------------------------------------------------------------------------------------------

    def find_turn(self, key: SampleKey, attempt: int) -> PackedTurn | None:
        """Return a turn, read back whole, or None."""
        found = self.turns(f"{KEY_IS} AND attempt=?", (*key_values(key), attempt))
        return found[0] if found else None

    def turns(self, where: str, values: Sequence[object]) -> list[PackedTurn]:
        """Return turns in key order."""
        found = self._connection.execute(
            f"SELECT {KEY}, {TURN} FROM {self.name} WHERE {where} ORDER BY {KEY}, attempt", values
        ).fetchall()
        bodies = self._payload.read_many([PayloadSlot(*row[11:15]) for row in found])
        return [self._turn(row, body) for row, body in zip(found, bodies, strict=True)]

    def _turn(self, columns: tuple[object, ...], body: bytes) -> PackedTurn:
        """Return a turn from the columns KEY and META."""
        step, query, trajectory, agent, branch, turn, attempt, version, weights_version, temperature, reason = columns[
            :11
        ]
        return PackedTurn(
            key=SampleKey(step, query, trajectory, agent, branch, turn),  # type: ignore[arg-type]
            attempt=attempt,  # type: ignore[arg-type]
            policy=self.policy,
            policy_version=version,  # type: ignore[arg-type]
            weights_version=weights_version,  # type: ignore[arg-type]
            temperature=temperature,  # type: ignore[arg-type]
            finish_reason=_FINISH_REASONS[reason],  # type: ignore[index]
            body=body,
        )

    def _samples(self, table: str, where: str, values: Sequence[object]) -> list[PackedSample]:
        """Return rows with everything that training needs, in key order."""
        found = self._connection.execute(f"SELECT {_SAMPLE} FROM {table} WHERE {where} ORDER BY {KEY}", values)
        rows = found.fetchall()
        bodies = self._payload.read_many([PayloadSlot(*row[11:15]) for row in rows])
        tokens: list[dict[TokenColumn, bytes]] = [{} for _ in rows]
        for number, column in enumerate(TokenColumn):
            filled = [(each, row[17 + 4 * number : 21 + 4 * number]) for each, row in zip(tokens, rows, strict=True)]
            filled = [(each, PayloadSlot(*slot)) for each, slot in filled if slot[0] is not None]
            values = self._payload.read_many([slot for _, slot in filled])
            for (each, _), value in zip(filled, values, strict=True):
                each[column] = value
        return [
            PackedSample(turn=self._turn(row, body), advantage=row[15], reward=row[16], token_columns=each)
            for row, body, each in zip(rows, bodies, tokens, strict=True)
        ]

    def committed_samples(self, keys: Sequence[SampleKey]) -> list[PackedSample]:
        """Return committed rows by their keys, of one step."""
        where = f"{KEY_IS} AND {status_in([RowStatus.COMMITTED])}"
        return [sample for key in keys for sample in self._samples(self.name, where, key_values(key))]

    def scored(self, step: int, column: TokenColumn) -> list[tuple[SampleKey, bytes]]:
        """Return the filled token columns of a step's live rows in key order."""
        found = self._connection.execute(
            f"SELECT {KEY}, {slot_columns(column)} FROM {self.name} "
            f"WHERE step=? AND has_{column} AND {LIVE} ORDER BY {KEY}",
            (step,),
        ).fetchall()
        bodies = self._payload.read_many([PayloadSlot(*row[6:]) for row in found])
        return [(SampleKey(*row[:6]), body) for row, body in zip(found, bodies, strict=True)]

    def ready_batch(self, step: int, limit: int) -> PackedBatch:
        """Return at most `limit` ready rows in key order."""
        found = self._connection.execute(
            f"SELECT {_SAMPLE} FROM {self._ready_rows} WHERE step=? AND {IS_READY} ORDER BY {KEY} LIMIT ?",
            (step, limit),
        ).fetchall()
        content, places = self._payload.read_records([PayloadSlot(*row[11:15]) for row in found])
        rows = [(*row[:11], *row[15:17], *place) for row, place in zip(found, places, strict=True)]
        tokens = {}
        for number, column in enumerate(TokenColumn):
            first = 17 + 4 * number
            slots = [None if row[first] is None else PayloadSlot(*row[first : first + 4]) for row in found]
            if any(slots):
                bodies = iter(self._payload.read_many([slot for slot in slots if slot is not None]))
                tokens[column] = [None if slot is None else next(bodies) for slot in slots]
        return PackedBatch(policy=self.policy, rows=rows, content=content, token_columns=tokens)

    def leased_samples(self, step: int, lease_id: int) -> list[PackedSample]:
        """Return the rows of an active lease in key order."""
        where = f"step=? AND {status_in([RowStatus.LEASED])} AND lease_id=?"
        return self._samples(self._leased_rows, where, (step, lease_id))

    def tokens_of(self, column: TokenColumn, key: SampleKey) -> bytes | None:
        """Return the token column of the key's live row, or None when it is empty."""
        found = self._connection.execute(
            f"SELECT {slot_columns(column)} FROM {self.name} WHERE {KEY_IS} AND has_{column} AND {LIVE}",
            key_values(key),
        ).fetchone()
        return None if found is None else self._payload.read(PayloadSlot(*found))

    # --- payload records ----------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int, int]]:
        """Return each segment that rows point to, with the offset behind their last record and their newest step."""
        parts = [
            f"SELECT {name}_segment AS segment, max({name}_offset + {name}_bytes) AS ending, max(step) AS step "
            f"FROM {self.name} WHERE {condition}1 GROUP BY {name}_segment"
            for name, condition in SLOTS.items()
        ]
        union = " UNION ALL ".join(parts)
        return self._connection.execute(
            f"SELECT segment, max(ending), max(step) FROM ({union}) GROUP BY segment"
        ).fetchall()

    def slots_behind(self, end: PayloadEnd) -> list[tuple[int, PayloadSlot]]:
        """Return the step and the place of every payload record that ends behind `end`."""
        slots = []
        for name, condition in SLOTS.items():
            found = self._connection.execute(
                f"SELECT step, {slot_columns(name)} FROM {self.name} WHERE {condition}"
                f"({name}_segment, {name}_offset + {name}_bytes) > (?,?)",
                end,
            )
            slots += [(step, PayloadSlot(*slot)) for step, *slot in found]
        return slots
