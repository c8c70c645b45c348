"""Training's side of the store: data columns, leases, acknowledgements and seals."""

import math
import sqlite3
from collections.abc import Sequence

from flexmarl.core.errors import CapacityError, FencedError, InvariantError
from flexmarl.core.ids import HolderId, PolicyName, SampleKey
from flexmarl.core.protocols import AdvantageValue, Lease
from flexmarl.core.records import Seal, TokenColumn, TokenValues
from flexmarl.store.batch import PackedBatch
from flexmarl.store.index import Index
from flexmarl.store.lifecycle import LeaseStatus, RowMove, RowStatus
from flexmarl.store.packing import PackedSample, pack_values
from flexmarl.store.row_reader import key_values
from flexmarl.store.rows import PolicyTable
from flexmarl.store.schema import decode_record, encode_keys, encode_record


def fill(index: Index, policy: PolicyName, values: Sequence[AdvantageValue]) -> None:
    """Fill the advantage columns of live rows."""
    if not values:
        return
    for value in values:
        if not (math.isfinite(value.advantage) and math.isfinite(value.reward)):
            raise InvariantError(f"{value.key}: advantage {value.advantage} of reward {value.reward} is not finite")
    table = index.table(policy, values[0].key)
    with index.transaction():
        if table.fill(values) == len(values):
            return
        for value in values:
            state = table.state_of(value.key)
            if state is None or (state.reward, state.advantage) != (value.reward, value.advantage):
                raise InvariantError(f"{value.key}: cannot fill {value.reward, value.advantage}; the row is {state}")


def fill_tokens(index: Index, policy: PolicyName, column: TokenColumn, values: Sequence[TokenValues]) -> None:
    """Fill a token column of live rows."""
    if not values:
        return
    for value in values:
        if not all(map(math.isfinite, value.values)):
            raise InvariantError(f"{value.key}: a number of {column} is not finite")
    keys, bodies = [value.key for value in values], [pack_values(value.values) for value in values]
    table = index.table(policy, keys[0])
    with index.transaction():
        if table.fill_tokens(column, keys, bodies) == len(values):
            return
        for key, body in zip(keys, bodies, strict=True):
            if table.tokens_of(column, key) != body:
                raise InvariantError(
                    f"{key}: cannot fill {len(body) // 8} numbers of {column}; the row is {table.state_of(key)}"
                )


def mask(index: Index, policy: PolicyName, keys: Sequence[SampleKey], reason: str) -> None:
    """Take live rows that nobody trains out of training."""
    if not keys:
        return
    table = index.table(policy, keys[0])
    with index.transaction():
        if table.mask(keys, reason) == len(keys):
            return
        for key in keys:
            state = table.state_of(key)
            if state is None or (state.status, state.reason) != (RowStatus.MASKED, reason):
                raise InvariantError(f"{key}: cannot mask with reason {reason!r}; the row is {state}")


def ready(index: Index, policy: PolicyName, step: int) -> list[tuple[SampleKey, int]]:
    """Return ready rows in key order with their numbers of tokens."""
    table = index.tables.get(policy)
    return [] if table is None else table.ready(step)


def lease(
    index: Index,
    policy: PolicyName,
    holder: HolderId,
    micro_batch_id: str,
    keys: Sequence[SampleKey],
    num_passes_done: int = 0,
) -> tuple[Lease, list[PackedSample]]:
    """Lease rows of one step, all or none, and read them in the order of `keys`."""
    if not keys or len(set(keys)) < len(keys) or len({key.step for key in keys}) > 1:
        raise InvariantError(
            f"micro-batch {micro_batch_id}: needs distinct rows of one step, got {list(map(str, keys))}"
        )
    table = index.table(policy, keys[0])
    with index.transaction() as connection:
        _require_not_fenced(index, holder)
        if _live_lease(connection, policy, keys[0].step, micro_batch_id) is not None:
            _require_leasable(table, keys, micro_batch_id, num_passes_done)
            raise _leased_before(policy, keys[0].step, micro_batch_id)
        columns = [key_values(key)[1:] for key in keys]
        lease_id = _grant(connection, policy, holder, micro_batch_id, keys[0].step, columns)
        granted = Lease(
            lease_id=lease_id, policy=policy, holder=holder, micro_batch_id=micro_batch_id, keys=tuple(keys)
        )
        if num_passes_done == 0:
            num_moved = table.lease(keys, granted.lease_id)
        else:
            num_moved = table.lease_again(keys, granted.lease_id, holder=holder, num_passes=num_passes_done)
        if num_moved < len(keys):
            _require_leasable(table, keys, micro_batch_id, num_passes_done, lease_id=granted.lease_id)
        samples = {sample.turn.key: sample for sample in table.leased_samples(keys[0].step, granted.lease_id)}
    return granted, [samples[key] for key in keys]


def claim(
    index: Index,
    policy: PolicyName,
    step: int,
    holder: HolderId,
    micro_batch_id: str,
    max_rows: int,
    acknowledging: Lease | None = None,
) -> tuple[Lease, PackedBatch] | None:
    """Lease the first ready rows in key order, None when there is none; the lease has no keys, the batch has them.

    `acknowledging` is acknowledged first, also when there is no row.
    """
    if max_rows < 1:
        raise InvariantError(f"micro-batch {micro_batch_id}: claim of {max_rows} rows, expected at least 1")
    table = index.tables.get(policy)
    with index.transaction() as connection:
        if acknowledging is not None:
            _acknowledge(index, connection, acknowledging)
        _require_not_fenced(index, holder)
        batch = None if table is None else table.ready_batch(step, max_rows)
        if table is None or not batch:
            return None
        try:
            lease_id = _grant(connection, policy, holder, micro_batch_id, step, [row[1:6] for row in batch.rows])
        except sqlite3.IntegrityError as error:
            raise _leased_before(policy, step, micro_batch_id) from error
        num_moved = table.lease_through(batch.rows[-1][:6], lease_id)
        assert num_moved == len(batch), (num_moved, len(batch))
    return Lease(lease_id=lease_id, policy=policy, holder=holder, micro_batch_id=micro_batch_id, keys=()), batch


def _leased_before(policy: PolicyName, step: int, micro_batch_id: str) -> InvariantError:
    return InvariantError(f"micro-batch {micro_batch_id} of {policy!r}, step {step}, has been leased before")


def _require_not_fenced(index: Index, holder: HolderId) -> None:
    if index.is_fenced(holder):
        raise FencedError(f"{holder} has been fenced: it was dead, or taken for dead")


def _grant(
    connection: sqlite3.Connection,
    policy: PolicyName,
    holder: HolderId,
    micro_batch_id: str,
    step: int,
    keys: Sequence[tuple[int, int, str, int, int]],
) -> int:
    """Write a lease on keys of a step, and return its id."""
    lease_id = connection.execute(
        "INSERT INTO leases (policy, step, holder, micro_batch_id, num_rows, keys, status) VALUES (?,?,?,?,?,?,?)",
        (policy, step, holder, micro_batch_id, len(keys), encode_keys(keys), LeaseStatus.ACTIVE.value),
    ).lastrowid
    assert lease_id is not None
    return lease_id


def _live_lease(
    connection: sqlite3.Connection, policy: PolicyName, step: int, micro_batch_id: str
) -> tuple[int, str, str] | None:
    """Return (lease_id, holder, status) of the micro-batch's lease that was not released: there is at most one."""
    found: tuple[int, str, str] | None = connection.execute(
        "SELECT lease_id, holder, status FROM leases "
        "WHERE policy=? AND step=? AND micro_batch_id=? AND status <> 'released'",
        (policy, step, micro_batch_id),
    ).fetchone()
    return found


def _require_leasable(
    table: PolicyTable,
    keys: Sequence[SampleKey],
    micro_batch_id: str,
    num_passes_done: int,
    *,
    lease_id: int | None = None,
) -> None:
    """Raise CapacityError when a row is neither leasable nor just leased as `lease_id`."""
    refused = []
    wanted = RowStatus.READY if num_passes_done == 0 else RowStatus.ACKNOWLEDGED
    for key in keys:
        state = table.state_of(key)
        if state is None:
            refused.append(f"{key} is not in the store")
            continue
        is_leasable = state.status is wanted and state.num_passes == num_passes_done
        if not (is_leasable if lease_id is None else state.lease_id == lease_id):
            passes = f" ({state.num_passes} passes)" if num_passes_done else ""
            refused.append(f"{key} is {state.status}{passes}")
    if refused:
        what = "ready" if num_passes_done == 0 else f"acknowledged by the holder for {num_passes_done} passes"
        raise CapacityError(
            f"micro-batch {micro_batch_id}: {len(refused)} of {len(keys)} rows are not {what}: {'; '.join(refused[:3])}"
        )


def acknowledge(index: Index, granted: Lease) -> None:
    """Count a lease's rows as part of its holder's gradient cache."""
    with index.transaction() as connection:
        _acknowledge(index, connection, granted)


def _acknowledge(index: Index, connection: sqlite3.Connection, granted: Lease) -> None:
    found = connection.execute(
        "SELECT step, num_rows, status FROM leases WHERE lease_id=? AND policy=? AND holder=?",
        (granted.lease_id, granted.policy, granted.holder),
    ).fetchone()
    if found is None or found[2] == LeaseStatus.RELEASED:
        raise FencedError(
            f"lease {granted.lease_id} of {granted.holder} on micro-batch {granted.micro_batch_id} has ended"
        )
    step, num_rows, status = found
    if status == LeaseStatus.ACTIVE:
        table = index.tables[granted.policy]
        _move_lease(connection, table, RowMove.ACKNOWLEDGE, step, granted.lease_id, num_rows)


def release(index: Index, holder: HolderId) -> list[SampleKey]:
    """End every unsealed lease of a holder and return its rows, ready again, in key order."""
    with index.transaction() as connection:
        return _release(index, connection, "(status='active' OR status='acknowledged') AND holder=?", (holder,))


def fence(index: Index, holder: HolderId) -> list[SampleKey]:
    """Release a holder and refuse everything it does from now on."""
    with index.transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO fenced VALUES (?)", (holder,))
        return _release(index, connection, "(status='active' OR status='acknowledged') AND holder=?", (holder,))


def release_all(index: Index, connection: sqlite3.Connection) -> tuple[int, int]:
    """End every lease of steps without a commit, inside a transaction; their seals have died with the last process.

    Returns the numbers of rows that were not sealed, and that were.
    """
    open_step = "step NOT IN (SELECT step FROM commits)"
    num_unsealed = len(_release(index, connection, f"status IN ('active', 'acknowledged') AND {open_step}", ()))
    num_sealed = len(_release(index, connection, f"status='sealed' AND {open_step}", (), RowMove.UNSEAL))
    connection.execute(f"DELETE FROM seals WHERE {open_step}")
    return num_unsealed, num_sealed


def _release(
    index: Index,
    connection: sqlite3.Connection,
    where: str,
    values: tuple[object, ...],
    move: RowMove = RowMove.RELEASE,
) -> list[SampleKey]:
    found = connection.execute(f"SELECT lease_id, policy, step FROM leases WHERE {where}", values).fetchall()
    keys = []
    for lease_id, policy, step in found:
        keys += index.tables[policy].release(move, step, lease_id)
    released = [(LeaseStatus.RELEASED.value, lease_id) for lease_id, _, _ in found]
    connection.executemany("UPDATE leases SET status=? WHERE lease_id=?", released)
    return sorted(keys)


def seal(index: Index, holder: HolderId, new: Seal) -> None:
    """Make a sealed cache the current one; the rows of the micro-batches that it adds are sealed."""
    with index.transaction() as connection:
        _require_not_fenced(index, holder)
        current, number = _newest_seal(connection, new.policy, new.step)
        if current == new:
            return
        where = f"seal {new.object_key} of {new.policy!r}, step {new.step}"
        if new.predecessor != (current.object_key if current else None):
            raise InvariantError(f"{where}: its predecessor is {new.predecessor}, the current seal is {current}")
        included = set(current.micro_batches) if current else set()
        if missing := included - set(new.micro_batches):
            raise InvariantError(f"{where}: leaves out {sorted(missing)} of its predecessor")
        for micro_batch_id in new.micro_batches:
            if micro_batch_id not in included:
                _seal_micro_batch(index, connection, holder, new, micro_batch_id)
        values = (new.policy, new.step, number + 1, holder, encode_record(new))
        connection.execute("INSERT INTO seals VALUES (?,?,?,?,?)", values)


def _seal_micro_batch(
    index: Index, connection: sqlite3.Connection, holder: HolderId, new: Seal, micro_batch_id: str
) -> None:
    live = _live_lease(connection, new.policy, new.step, micro_batch_id)
    if live is None or live[1] != holder:
        raise FencedError(f"seal {new.object_key}: {holder} holds no lease on micro-batch {micro_batch_id}")
    lease_id, _, status = live
    if status != LeaseStatus.ACKNOWLEDGED:
        raise InvariantError(f"seal {new.object_key}: micro-batch {micro_batch_id} is {status}, not acknowledged")
    num_rows = connection.execute("SELECT num_rows FROM leases WHERE lease_id=?", (lease_id,)).fetchone()[0]
    _move_lease(connection, index.tables[new.policy], RowMove.SEAL, new.step, lease_id, num_rows)


def _move_lease(
    connection: sqlite3.Connection, table: PolicyTable, move: RowMove, step: int, lease_id: int, num_rows: int
) -> None:
    """Move a lease with all of its rows. A lease's states have the names of its rows' states, but for `active`."""
    moved = table.move_leased(move, step, lease_id)
    if moved != num_rows:
        raise InvariantError(f"lease {lease_id}: {moved} of {num_rows} rows could move to {move.target}")
    connection.execute("UPDATE leases SET status=? WHERE lease_id=?", (LeaseStatus(move.target).value, lease_id))


def current_seal(index: Index, policy: PolicyName, step: int) -> Seal | None:
    """Return the newest seal of the policy's step."""
    return _newest_seal(index.connection, policy, step)[0]


def _newest_seal(connection: sqlite3.Connection, policy: PolicyName, step: int) -> tuple[Seal | None, int]:
    """Return the newest seal with its number, counted from 1; 0 when there is none."""
    found = connection.execute(
        "SELECT record, number FROM seals WHERE policy=? AND step=? ORDER BY number DESC LIMIT 1", (policy, step)
    ).fetchone()
    return (None, 0) if found is None else (decode_record(Seal, found[0]), found[1])
