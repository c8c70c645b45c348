"""Trajectories in the store: attempts, their turns, and the one record with which each attempt ends."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.core.errors import FencedError, InvariantError
from flexmarl.core.ids import PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import StoredTrajectory
from flexmarl.core.records import NOT_IN_OUTCOME, OutcomeRecord, TrajectoryFailure, TurnRow
from flexmarl.store.index import Index
from flexmarl.store.packing import PackedTurn, body_counts, check_rewards, pack_turn, unpack_turn
from flexmarl.store.schema import decode_record, encode_record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newest:
    """The newest attempt of a trajectory, and the record with which it ended."""

    attempt: int
    kind: str | None
    record: str | None


def _newest_attempt(connection: sqlite3.Connection, key: TrajectoryKey) -> _Newest | None:
    found = connection.execute(
        "SELECT attempt, kind, record FROM attempts LEFT JOIN outcomes USING (step, query, trajectory, attempt) "
        "WHERE step=? AND query=? AND trajectory=? ORDER BY attempt DESC LIMIT 1",
        (key.step, key.query, key.trajectory),
    ).fetchone()
    return None if found is None else _Newest(attempt=found[0], kind=found[1], record=found[2])


def _require_newest(connection: sqlite3.Connection, key: TrajectoryKey, attempt: int, what: object) -> _Newest:
    """Return the newest attempt, which must be `attempt`."""
    newest = _newest_attempt(connection, key)
    if newest is None or attempt > newest.attempt:
        begun = "none" if newest is None else f"0 to {newest.attempt}"
        raise InvariantError(f"{what}: attempt {attempt} was never begun; begun: {begun}")
    if attempt < newest.attempt:
        raise FencedError(f"{what}: attempt {attempt} has been superseded by attempt {newest.attempt}")
    return newest


def begin_attempt(index: Index, key: TrajectoryKey) -> int:
    """Number a new attempt and supersede the rows of older ones."""
    with index.transaction() as connection:
        index.plan_of(key)
        newest = _newest_attempt(connection, key)
        if newest is not None and newest.kind is not None:
            # Its rewards have counted in a group, and its rows may be in a gradient.
            raise InvariantError(f"{key}: attempt {newest.attempt} has already ended with an {newest.kind} record")
        attempt = 0 if newest is None else newest.attempt + 1
        connection.execute("INSERT INTO attempts VALUES (?,?,?,?)", (key.step, key.query, key.trajectory, attempt))
        if attempt > 0:
            for table in index.tables.values():
                table.supersede(key, f"attempt {attempt}")
        return attempt


def put_turn(index: Index, row: TurnRow) -> None:
    """Add a partial row of the newest attempt."""
    turn = pack_turn(row)
    table = index.table_for_rows(row.policy)
    with index.transaction() as connection:
        newest = _require_newest(connection, row.key.trajectory_key, row.attempt, row.key)
        for other in index.tables.values():
            stored = other.find_turn(row.key, row.attempt)
            if stored is not None:
                require_same_turn(stored, turn)
                return
        if newest.kind is not None:
            raise FencedError(f"{row.key}: attempt {row.attempt} has already ended with an {newest.kind} record")
        index.plan_of(row.key.trajectory_key).check_versions(turn)
        table.insert(turn)


def require_same_turn(stored: PackedTurn, turn: PackedTurn) -> None:
    """Refuse a turn that is in the store already with other content; a NaN equals itself.

    Raises:
        InvariantError: it differs.
    """
    if stored != turn:
        raise InvariantError(
            f"{turn.key} attempt {turn.attempt} of policy {turn.policy!r} was put before with other content "
            f"(policy {stored.policy!r}, {body_counts(stored)[1]} response tokens, now {body_counts(turn)[1]})"
        )


def record_outcome(index: Index, outcome: OutcomeRecord) -> None:
    """End an attempt for all its agents at once; rows that have their data become ready."""
    check_rewards(outcome)
    key, attempt = outcome.trajectory, outcome.attempt
    with index.transaction() as connection:
        if not _end(connection, key, attempt, "outcome", outcome):
            return
        owners = _owners(index, key, attempt)
        if missing := sorted(set(outcome.turns) - owners.keys()):
            raise InvariantError(
                f"{key} attempt {attempt}: {len(missing)} of {len(outcome.turns)} turns of its outcome are not in the "
                f"store, first {missing[0]}"
            )
        _set_user_columns(index, outcome, owners)
        unheard: dict[PolicyName, list[SampleKey]] = {}
        for turn in owners.keys() - set(outcome.turns):
            unheard.setdefault(owners[turn], []).append(turn)
        for policy, table in index.tables.items():
            table.mask(unheard.get(policy, []), NOT_IN_OUTCOME)
            table.end_attempt(key, attempt)


def _set_user_columns(index: Index, outcome: OutcomeRecord, owners: Mapping[SampleKey, PolicyName]) -> None:
    columns = {each.key: each.values for each in outcome.turn_columns}
    if unheard := sorted(columns.keys() - set(outcome.turns)):
        raise InvariantError(f"{outcome.trajectory}: columns for {unheard[0]}, a turn that its outcome does not list")
    for turn in outcome.turns:
        index.tables[owners[turn]].set_user_columns(turn, outcome.attempt, columns.get(turn, {}))


def record_failure(index: Index, failure: TrajectoryFailure) -> None:
    """End an attempt, and with it its trajectory, without an outcome."""
    key, attempt = failure.trajectory, failure.attempt
    with index.transaction() as connection:
        if _end(connection, key, attempt, "failure", failure):
            for table in index.tables.values():
                table.fail_attempt(key, attempt, failure.kind)


def _end(
    connection: sqlite3.Connection,
    key: TrajectoryKey,
    attempt: int,
    kind: str,
    record: OutcomeRecord | TrajectoryFailure,
) -> bool:
    """Write an attempt's last record; return whether it is new."""
    newest = _require_newest(connection, key, attempt, key)
    text = encode_record(record)
    if newest.kind is None:
        values = (key.step, key.query, key.trajectory, attempt, kind, text)
        connection.execute("INSERT INTO outcomes VALUES (?,?,?,?,?,?)", values)
        return True
    if (newest.kind, newest.record) != (kind, text):
        raise InvariantError(
            f"{key} attempt {attempt} has already ended with an {newest.kind} record: {newest.record}; now: {text}"
        )
    return False


def _owners(index: Index, key: TrajectoryKey, attempt: int) -> dict[SampleKey, PolicyName]:
    """Return the policy of every row of an attempt."""
    owners: dict[SampleKey, PolicyName] = {}
    for policy, table in index.tables.items():
        owners.update(dict.fromkeys(table.keys_of_attempt(key, attempt), policy))
    return owners


def trajectories(index: Index, step: int) -> list[StoredTrajectory]:
    """Return the trajectories of a step that had begun, in key order, each with its newest attempt."""
    found = index.connection.execute(
        "SELECT query, trajectory, max(attempt), kind, record FROM attempts "
        "LEFT JOIN outcomes USING (step, query, trajectory, attempt) "
        "WHERE step=? GROUP BY query, trajectory ORDER BY query, trajectory",
        (step,),
    ).fetchall()
    turns: dict[tuple[TrajectoryKey, int], list[TurnRow]] = {}
    for table in index.tables.values():
        for turn in table.turns("step=?", (step,)):
            turns.setdefault((turn.key.trajectory_key, turn.attempt), []).append(unpack_turn(turn))
    stored = []
    for query, trajectory, attempt, kind, text in found:
        key = TrajectoryKey(step, query, trajectory)
        stored.append(
            StoredTrajectory(
                key=key,
                attempt=attempt,
                turns=tuple(sorted(turns.get((key, attempt), []), key=lambda turn: turn.key)),
                outcome=decode_record(OutcomeRecord, text) if kind == "outcome" else None,
                failure=decode_record(TrajectoryFailure, text) if kind == "failure" else None,
            )
        )
    return stored
