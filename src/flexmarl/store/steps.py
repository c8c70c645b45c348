"""A step as a whole: its dispatch record, its commit over all policies, its counts, and the way back."""

import sqlite3

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.core.protocols import PolicyProgress
from flexmarl.core.records import CommitRecord, DispatchRecord
from flexmarl.store.index import Index
from flexmarl.store.lifecycle import BLOCKS_COMMIT, LeaseStatus, RowStatus
from flexmarl.store.schema import STEP_TABLES, decode_record, encode_record, write_meta


def open_step(index: Index, dispatch: DispatchRecord) -> None:
    """Record the content of a step, durably."""
    text = encode_record(dispatch)
    with index.durable_transaction() as connection:
        found = connection.execute("SELECT record FROM dispatches WHERE step=?", (dispatch.step,)).fetchone()
        if found is None:
            connection.execute("INSERT INTO dispatches VALUES (?,?)", (dispatch.step, text))
        elif found[0] != text:
            raise InvariantError(f"step {dispatch.step} was dispatched before as {found[0]}; now: {text}")


def commit(index: Index, record: CommitRecord) -> None:
    """Move the trained rows of all policies to committed with the record that says so, durably."""
    text = encode_record(record)
    with index.durable_transaction() as connection:
        found = connection.execute("SELECT record FROM commits WHERE step=?", (record.step,)).fetchone()
        if found is not None:
            if found[0] != text:
                raise InvariantError(f"step {record.step} was committed before as {found[0]}; now: {text}")
            return
        _check_version(connection, record)
        for policy, table in index.tables.items():
            if blocking := table.keys_in(record.step, BLOCKS_COMMIT):
                state = table.state_of(blocking[0])
                raise InvariantError(
                    f"commit of step {record.step}: {len(blocking)} rows of policy {policy!r} are neither trained, "
                    f"masked, failed nor superseded; first {blocking[0]}: {state}"
                )
        _check_micro_batches(index, record)
        for table in index.tables.values():
            table.commit(record.step)
        connection.execute(
            "UPDATE leases SET status=? WHERE step=? AND status IN (?,?)",
            (LeaseStatus.COMMITTED.value, record.step, LeaseStatus.ACKNOWLEDGED.value, LeaseStatus.SEALED.value),
        )
        connection.execute("INSERT INTO commits VALUES (?,?,?)", (record.step, record.policy_version, text))


def _check_version(connection: sqlite3.Connection, record: CommitRecord) -> None:
    """Versions rise by one, and step k makes version k + 1: `rewind` relies on it."""
    if record.policy_version != record.step + 1:
        raise InvariantError(f"commit of step {record.step} makes version {record.policy_version}, not one more")
    newest = connection.execute("SELECT max(policy_version) FROM commits").fetchone()[0]
    if newest is not None and record.policy_version != newest + 1:
        raise InvariantError(f"commit of version {record.policy_version}: the newest committed version is {newest}")
    if connection.execute("SELECT 1 FROM dispatches WHERE step=?", (record.step,)).fetchone() is None:
        raise InvariantError(f"commit of step {record.step}: it was never dispatched")


def _check_micro_batches(index: Index, record: CommitRecord) -> None:
    """What is in the new weights, as the record says, is what the rows say."""
    tables = dict.fromkeys([*record.policies, *index.tables])
    for policy in tables:
        table = index.tables.get(policy)
        trained = set() if table is None else table.trained_micro_batches(record.step)
        part = record.policies.get(policy)
        recorded = set() if part is None else set(part.micro_batches)
        if trained != recorded:
            raise InvariantError(
                f"commit of step {record.step}, policy {policy!r}: the record and the rows differ in micro-batches "
                f"{sorted(trained ^ recorded)}; trained {sorted(trained)}"
            )


def progress(index: Index, step: int) -> dict[PolicyName, PolicyProgress]:
    """Count a step's rows by status; policies without rows in it are left out."""
    counts = {policy: table.count(step) for policy, table in index.tables.items()}
    return {
        policy: PolicyProgress(**{f"num_{status}": number for status, number in count.items()})
        for policy, count in counts.items()
        if count
    }


def last_commit(index: Index) -> CommitRecord | None:
    """Return the newest commit record."""
    found = index.connection.execute("SELECT record FROM commits ORDER BY policy_version DESC LIMIT 1").fetchone()
    return None if found is None else decode_record(CommitRecord, found[0])


def trained_ids(index: Index, step: int) -> dict[PolicyName, list[SampleKey]]:
    """Return the committed rows of a step in key order; policies without any are left out."""
    found = {policy: table.keys_in(step, [RowStatus.COMMITTED]) for policy, table in index.tables.items()}
    return {policy: keys for policy, keys in found.items() if keys}


def rewind(index: Index, policy_version: int) -> None:
    """Forget everything of steps at or after `policy_version`, durably."""
    with index.durable_transaction() as connection:
        forget_steps(index, connection, policy_version)
    # Only now: a payload is dropped when no index on disk can point to it any more.
    index.payload.truncate(payload_end(index))


def forget_steps(index: Index, connection: sqlite3.Connection, step: int) -> None:
    """Delete every record of this step and later ones, inside a durable transaction."""
    for table in index.tables.values():
        table.forget(step)
    for name in STEP_TABLES:
        connection.execute(f"DELETE FROM {name} WHERE step>=?", (step,))
    write_meta(connection, "payload_synced_bytes", payload_end(index))


def payload_end(index: Index) -> int:
    """Return the offset behind the last payload that a row points to."""
    return max((table.payload_end() for table in index.tables.values()), default=0)
