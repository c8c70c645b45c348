"""Whole trajectories that were generated elsewhere: the fast way in, a few statements for any number of rows."""

import math
import sqlite3
from collections.abc import Sequence

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import PolicyName
from flexmarl.store.attempts import require_same_turn
from flexmarl.store.index import Index
from flexmarl.store.packing import PackedTrajectory


def put_packed(index: Index, trajectories: Sequence[PackedTrajectory]) -> None:
    """Add trajectories in one transaction; those that are there already must be the same.

    Raises:
        ConfigError: a user column is missing or wrong.
        InvariantError: a trajectory was not dispatched, was begun in another way, or was put with other content.
    """
    for policy in {turn.policy for each in trajectories for turn in each.turns}:
        index.table_for_rows(policy)
    for each in trajectories:
        _check(index, each)
    try:
        with index.transaction() as connection:
            _insert(index, connection, trajectories)
    except _AlreadyBegunError:
        with index.transaction() as connection:
            for each in trajectories:
                if not _is_stored(index, connection, each):
                    _insert(index, connection, [each])


class _AlreadyBegunError(Exception):
    """A trajectory of the batch has an attempt."""


def _check(index: Index, each: PackedTrajectory) -> None:
    plan = index.plan_of(each.trajectory)
    step, query, trajectory = each.trajectory.step, each.trajectory.query, each.trajectory.trajectory
    for turn in each.turns:
        key = turn.key
        is_own = key.trajectory == trajectory and key.query == query and key.step == step
        if turn.attempt != 0 or not is_own:
            raise InvariantError(f"{each.trajectory}: turn {turn.key} attempt {turn.attempt} is not of its attempt 0")
        plan.check_versions(turn)
    if not all(map(math.isfinite, (*each.rewards, *each.advantages))):
        raise InvariantError(f"{each.trajectory}: a reward or an advantage is not finite")


def _insert(index: Index, connection: sqlite3.Connection, trajectories: Sequence[PackedTrajectory]) -> None:
    keys = [(each.trajectory.step, each.trajectory.query, each.trajectory.trajectory) for each in trajectories]
    try:
        connection.executemany("INSERT INTO attempts VALUES (?,?,?,0)", keys)
    except sqlite3.IntegrityError as error:
        raise _AlreadyBegunError from error
    records = [(*key, each.record) for key, each in zip(keys, trajectories, strict=True)]
    connection.executemany("INSERT INTO outcomes VALUES (?,?,?,0,'outcome',?)", records)
    by_policy: dict[PolicyName, list[tuple[PackedTrajectory, int]]] = {}
    for each in trajectories:
        for number, turn in enumerate(each.turns):
            by_policy.setdefault(turn.policy, []).append((each, number))
    for policy, rows in by_policy.items():
        index.tables[policy].insert_finished(
            [each.turns[number] for each, number in rows],
            [each.rewards[number] for each, number in rows],
            [each.advantages[number] for each, number in rows],
            [each.columns[number] for each, number in rows],
        )


def _is_stored(index: Index, connection: sqlite3.Connection, each: PackedTrajectory) -> bool:
    """Return whether the trajectory is in the store.

    Raises:
        InvariantError: it is, with other content.
    """
    key = each.trajectory
    found = connection.execute(
        "SELECT attempt, kind, record FROM attempts LEFT JOIN outcomes USING (step, query, trajectory, attempt) "
        "WHERE step=? AND query=? AND trajectory=? ORDER BY attempt DESC LIMIT 1",
        (key.step, key.query, key.trajectory),
    ).fetchone()
    if found is None:
        return False
    if found != (0, "outcome", each.record):
        raise InvariantError(f"{key}: was begun before, as attempt {found[0]} with {found[1]} record {found[2]}")
    for turn, reward, advantage in zip(each.turns, each.rewards, each.advantages, strict=True):
        table = index.tables[turn.policy]
        stored, state = table.find_turn(turn.key, 0), table.state_of(turn.key)
        if stored is None or state is None:
            raise InvariantError(f"{turn.key}: was put before, though not with policy {turn.policy!r}")
        require_same_turn(stored, turn)
        if (state.reward, state.advantage) != (reward, advantage):
            raise InvariantError(f"{turn.key}: put with {reward, advantage}; the row is {state}")
    return True
