"""Rows as they cross the store's socket: flat lists, since there are many; their token lists stay packed as they are.

    turn        [step, query, trajectory, agent, branch, turn, attempt, policy, policy_version, weights_version,
                 temperature, finish_reason, body]
    trajectory  [step, query, trajectory, record, turns, rewards, advantages, columns]
    lease       [lease_id, policy, holder, micro_batch_id]; its keys are those of the rows that come with it, and
                 nobody needs them where it goes back
    granted     [lease, rows of a PackedBatch, its content, {token column: bodies}]

Bad input raises ConfigError.
"""

from typing import Any

from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import Lease
from flexmarl.core.records import FinishReason, TokenColumn
from flexmarl.store import PackedBatch, PackedTrajectory, PackedTurn

_TURN = (int, int, int, str, int, int, int, str, int, int, float, str, bytes)
_TRAJECTORY = (int, int, int, str, list, list, list, list)
_LEASE = (int, str, str, str)
_CLAIM = (str, int, str, str, int, float)
_GRANTED = (list, list, bytes, dict)
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_TOKEN_COLUMNS = {column.value: column for column in TokenColumn}


def _require(plain: Any, types: tuple[type, ...], what: str) -> None:
    if type(plain) is not list or tuple(map(type, plain)) != types:
        raise ConfigError(f"a {what} is [{', '.join(each.__name__ for each in types)}], got {plain!r:.200}")


def _require_all(plain: list[Any], kind: type, num_items: int, what: str) -> None:
    if len(plain) != num_items or not set(map(type, plain)) <= {kind}:
        raise ConfigError(f"{what}: expected {num_items} of {kind.__name__}, got {plain!r:.200}")


def encode_turn(turn: PackedTurn) -> list[Any]:
    """Return a turn as plain data."""
    key = turn.key
    return [
        key.step,
        key.query,
        key.trajectory,
        key.agent,
        key.branch,
        key.turn,
        turn.attempt,
        turn.policy,
        turn.policy_version,
        turn.weights_version,
        float(turn.temperature),
        turn.finish_reason.value,
        turn.body,
    ]


def decode_turn(plain: Any) -> PackedTurn:
    """Return what `encode_turn` wrote."""
    _require(plain, _TURN, "turn")
    if plain[11] not in _FINISH_REASONS:
        raise ConfigError(f"a turn has finish_reason {plain[11]!r:.80}, expected {', '.join(_FINISH_REASONS)}")
    return PackedTurn(
        key=SampleKey(*plain[:6]),
        attempt=plain[6],
        policy=plain[7],
        policy_version=plain[8],
        weights_version=plain[9],
        temperature=plain[10],
        finish_reason=_FINISH_REASONS[plain[11]],
        body=plain[12],
    )


def encode_trajectory(packed: PackedTrajectory) -> list[Any]:
    """Return a whole trajectory as plain data."""
    key = packed.trajectory
    return [
        key.step,
        key.query,
        key.trajectory,
        packed.record,
        [encode_turn(turn) for turn in packed.turns],
        [float(reward) for reward in packed.rewards],
        [float(advantage) for advantage in packed.advantages],
        [dict(columns) for columns in packed.columns],
    ]


def decode_trajectory(plain: Any) -> PackedTrajectory:
    """Return what `encode_trajectory` wrote."""
    _require(plain, _TRAJECTORY, "trajectory")
    step, query, trajectory, record, turns, rewards, advantages, columns = plain
    _require_all(rewards, float, len(turns), "rewards of a trajectory")
    _require_all(advantages, float, len(turns), "advantages of a trajectory")
    _require_all(columns, dict, len(turns), "columns of a trajectory")
    return PackedTrajectory(
        trajectory=TrajectoryKey(step, query, trajectory),
        record=record,
        turns=tuple(map(decode_turn, turns)),
        rewards=tuple(rewards),
        advantages=tuple(advantages),
        columns=tuple(columns),
    )


def decode_trajectories(plain: Any) -> list[PackedTrajectory]:
    """Return the only argument of `put_finished`."""
    if not isinstance(plain, list) or len(plain) != 1 or not isinstance(plain[0], list):
        raise ConfigError(f"put_finished: expected one list of trajectories, got {plain!r:.80}")
    return [decode_trajectory(each) for each in plain[0]]


def encode_lease(lease: Lease) -> list[Any]:
    """Return a lease as plain data."""
    return [lease.lease_id, lease.policy, lease.holder, lease.micro_batch_id]


def decode_lease(plain: Any, keys: tuple[SampleKey, ...] = ()) -> Lease:
    """Return what `encode_lease` wrote."""
    _require(plain, _LEASE, "lease")
    return Lease(lease_id=plain[0], policy=plain[1], holder=plain[2], micro_batch_id=plain[3], keys=keys)


def decode_claim(plain: Any) -> tuple[PolicyName, int, HolderId, str, int, float, Lease | None]:
    """Return the arguments of `claim`."""
    _require(plain[:-1] if isinstance(plain, list) else plain, _CLAIM, "claim, but for its lease to acknowledge,")
    policy, step, holder, micro_batch_id, max_rows, timeout_s, lease = plain
    acknowledging = None if lease is None else decode_lease(lease)
    return policy, step, holder, micro_batch_id, max_rows, timeout_s, acknowledging


def encode_granted(granted: tuple[Lease, PackedBatch] | None) -> list[Any] | None:
    """Return a lease with its rows as plain data."""
    if granted is None:
        return None
    lease, batch = granted
    tokens = {column.value: bodies for column, bodies in batch.token_columns.items()}
    return [encode_lease(lease), batch.rows, batch.content, tokens]


def decode_granted(plain: Any) -> tuple[Lease, PackedBatch] | None:
    """Return what `encode_granted` wrote; the lease has the keys of its rows."""
    if plain is None:
        return None
    _require(plain, _GRANTED, "lease with its rows")
    lease, rows, content, tokens = plain
    batch = PackedBatch(
        policy=lease[1],
        rows=rows,
        content=content,
        token_columns={_TOKEN_COLUMNS[column]: bodies for column, bodies in tokens.items()},
    )
    return decode_lease(lease, batch.keys()), batch
