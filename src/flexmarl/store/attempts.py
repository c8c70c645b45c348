"""Trajectories in the store: attempts, their turns, and the one record with which each attempt ends."""

import math
import sqlite3
from dataclasses import dataclass

from flexmarl.core.errors import ConfigError, FencedError, InvariantError
from flexmarl.core.ids import PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import OutcomeRecord, TrajectoryFailure, TurnRow
from flexmarl.store.index import Index
from flexmarl.store.payload import pack_turn
from flexmarl.store.schema import encode_record

NOT_IN_OUTCOME = "not_in_outcome"
"""Why a row is masked whose turn finished, though its workflow had given up waiting for it."""


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
        if connection.execute("SELECT 1 FROM dispatches WHERE step=?", (key.step,)).fetchone() is None:
            raise InvariantError(f"{key}: step {key.step} has no dispatch record; open_step comes first")
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
    table = index.table_for_rows(row.policy)
    with index.transaction() as connection:
        newest = _require_newest(connection, row.key.trajectory_key, row.attempt, row.key)
        for policy, other in index.tables.items():
            stored = other.find_turn(row.key, row.attempt)
            if stored is not None:
                _require_same(stored, row, policy)
                return
        if newest.kind is not None:
            raise FencedError(f"{row.key}: attempt {row.attempt} has already ended with an {newest.kind} record")
        table.insert(row)


def _require_same(stored: TurnRow, row: TurnRow, policy: PolicyName) -> None:
    # Packed, so that a NaN equals itself.
    if pack_turn(stored) == pack_turn(row) and _scalars(stored) == _scalars(row):
        return
    raise InvariantError(
        f"{row.key} attempt {row.attempt} of policy {row.policy!r} was put before with other content "
        f"(policy {policy!r}, {len(stored.response_tokens)} response tokens, now {len(row.response_tokens)})"
    )


def _scalars(row: TurnRow) -> tuple[object, ...]:
    return (row.policy, row.policy_version, row.weights_version, row.temperature, row.finish_reason)


def record_outcome(index: Index, outcome: OutcomeRecord) -> None:
    """End an attempt for all its agents at once; rows that have their data become ready."""
    _check_rewards(outcome)
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
        unheard: dict[PolicyName, list[SampleKey]] = {}
        for turn in owners.keys() - set(outcome.turns):
            unheard.setdefault(owners[turn], []).append(turn)
        for policy, table in index.tables.items():
            table.mask(unheard.get(policy, []), NOT_IN_OUTCOME)
            table.end_attempt(key, attempt)


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


def _check_rewards(outcome: OutcomeRecord) -> None:
    given = [(f"agent {agent!r}", reward) for agent, reward in outcome.rewards.items()]
    given += [(f"turn {turn.key} of agent {turn.key.agent!r}", turn.reward) for turn in outcome.turn_rewards]
    for whose, reward in given:
        if not math.isfinite(reward):
            raise ConfigError(
                f"{outcome.trajectory}: the reward of {whose} is {reward}, expected a finite number: "
                "fix the reward function, or raise in it to make the trajectory a failure"
            )
