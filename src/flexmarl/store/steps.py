"""A step as a whole: its dispatch record, its commit over all policies, its counts, and the way back."""

import sqlite3
from collections.abc import Mapping

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.core.protocols import PolicyProgress, StoredStep
from flexmarl.core.records import CommitRecord, DispatchRecord, StepExtension, TokenColumn, TokenValues
from flexmarl.store.attempts import trajectories
from flexmarl.store.index import Index
from flexmarl.store.lifecycle import BLOCKS_COMMIT, LeaseStatus, RowStatus
from flexmarl.store.packing import PackedSample, unpack_values
from flexmarl.store.schema import STEP_TABLES, decode_keys, decode_record, encode_record, read_meta, write_meta


def open_step(index: Index, dispatch: DispatchRecord) -> None:
    """Record the content of a step, durably."""
    text = encode_record(dispatch)
    if not dispatch.min_version <= dispatch.max_version <= dispatch.step:
        raise InvariantError(f"step {dispatch.step} dispatched for versions that do not fit it: {text}")
    with index.durable_transaction() as connection:
        found = connection.execute("SELECT record FROM dispatches WHERE step=?", (dispatch.step,)).fetchone()
        if found is None:
            connection.execute("INSERT INTO dispatches VALUES (?,?)", (dispatch.step, text))
        elif found[0] != text:
            raise InvariantError(f"step {dispatch.step} was dispatched before as {found[0]}; now: {text}")


def extend_step(index: Index, extension: StepExtension) -> None:
    """Add trajectories of a query to an open step, durably."""
    text = encode_record(extension)
    with index.durable_transaction() as connection:
        plan = index.plan(extension.step)
        if plan is None or _is_committed(connection, extension.step):
            raise InvariantError(f"step {extension.step} is not open; it cannot be extended: {text}")
        if extension in plan.extensions:
            return
        num_so_far = plan.num_trajectories.get(extension.query)
        if num_so_far != extension.first_trajectory or extension.num_trajectories < 1:
            raise InvariantError(
                f"step {extension.step} has {num_so_far or 'no'} trajectories of query {extension.query}; it cannot be "
                f"extended by {text}"
            )
        values = (extension.step, len(plan.extensions), text)
        connection.execute("INSERT INTO extensions VALUES (?,?,?)", values)
    index.forget_plans()


def _is_committed(connection: sqlite3.Connection, step: int) -> bool:
    return connection.execute("SELECT 1 FROM commits WHERE step=?", (step,)).fetchone() is not None


def open_steps(index: Index) -> list[StoredStep]:
    """Return every step that was dispatched and not committed, in order."""
    found = index.connection.execute(
        "SELECT step FROM dispatches WHERE step NOT IN (SELECT step FROM commits) ORDER BY step"
    ).fetchall()
    steps = []
    for (step,) in found:
        plan = index.plan(step)
        assert plan is not None
        steps.append(
            StoredStep(
                dispatch=plan.dispatch,
                extensions=plan.extensions,
                trajectories=tuple(trajectories(index, step)),
                scored=_scored(index, step),
            )
        )
    return steps


def _scored(index: Index, step: int) -> dict[PolicyName, dict[TokenColumn, tuple[TokenValues, ...]]]:
    scored: dict[PolicyName, dict[TokenColumn, tuple[TokenValues, ...]]] = {}
    for policy, table in index.tables.items():
        for column in TokenColumn:
            if rows := table.scored(step, column):
                values = tuple(TokenValues(key=key, values=unpack_values(body)) for key, body in rows)
                scored.setdefault(policy, {})[column] = values
    return scored


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
        _check_all_ended(index, record.step)
        for policy in dict.fromkeys([*record.policies, *index.tables]):
            _check_trained(index, record, policy)
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
    # A resume from a checkpoint that is newer than the store leaves a gap, once.
    begins_at = read_meta(connection, "begins_at")
    if newest is not None and record.policy_version != max(newest, begins_at) + 1:
        raise InvariantError(f"commit of version {record.policy_version}: the newest committed version is {newest}")
    if connection.execute("SELECT 1 FROM dispatches WHERE step=?", (record.step,)).fetchone() is None:
        raise InvariantError(f"commit of step {record.step}: it was never dispatched")


def _check_all_ended(index: Index, step: int) -> None:
    """No trajectory that was dispatched is forgotten."""
    plan = index.plan(step)
    assert plan is not None
    ended = set(index.connection.execute("SELECT query, trajectory FROM outcomes WHERE step=?", (step,)))
    missing = [key for key in plan.trajectories() if (key.query, key.trajectory) not in ended]
    if missing:
        raise InvariantError(
            f"commit of step {step}: {len(missing)} of its trajectories have neither an outcome nor a failure record; "
            f"first {missing[0]}"
        )


def _check_trained(index: Index, record: CommitRecord, policy: PolicyName) -> None:
    """What is in the new weights, as the record says, is what leases and rows say."""
    part = record.policies.get(policy)
    recorded = () if part is None else part.micro_batches
    found = index.connection.execute(
        "SELECT micro_batch_id FROM leases WHERE policy=? AND step=? AND status IN ('acknowledged', 'sealed')",
        (policy, record.step),
    )
    trained = {micro_batch_id for (micro_batch_id,) in found}
    where = f"commit of step {record.step}, policy {policy!r}"
    if trained != set(recorded) or len(trained) != len(recorded):
        raise InvariantError(
            f"{where}: the record and the leases differ in micro-batches {sorted(trained ^ set(recorded))}; "
            f"trained {sorted(trained)}, recorded {sorted(recorded)}"
        )
    if part is None:
        return
    if sum(part.update_sizes) != len(recorded) or any(size < 1 for size in part.update_sizes):
        raise InvariantError(f"{where}: update_sizes {part.update_sizes} of {len(recorded)} micro-batches")
    table = index.tables.get(policy)
    if table is not None and (other := table.key_without_passes(record.step, part.num_passes)):
        raise InvariantError(f"{where}: {other[0]} was used {other[1]} times, not {part.num_passes}")


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


def commits_after(index: Index, policy_version: int) -> list[CommitRecord]:
    """Return the commit records of later versions, in order."""
    found = index.connection.execute(
        "SELECT record FROM commits WHERE policy_version>? ORDER BY policy_version", (policy_version,)
    )
    return [decode_record(CommitRecord, text) for (text,) in found]


def micro_batch(index: Index, policy: PolicyName, step: int, micro_batch_id: str) -> list[PackedSample]:
    """Return the samples of a committed micro-batch in the order in which they were trained."""
    found = index.connection.execute(
        "SELECT keys FROM leases WHERE policy=? AND step=? AND micro_batch_id=? AND status='committed'",
        (policy, step, micro_batch_id),
    ).fetchone()
    if found is None:
        raise InvariantError(f"micro-batch {micro_batch_id} of {policy!r}, step {step}, is in no commit")
    keys = decode_keys(step, found[0])
    samples = {sample.turn.key: sample for sample in index.tables[policy].committed_samples(keys)}
    return [samples[key] for key in keys]


def pruned_version(index: Index) -> int:
    """Return the newest version below which payloads have been pruned, or 0."""
    return max(index.payload.pruned.values(), default=0)


def prune(index: Index, policy_version: int) -> None:
    """Free the payloads of committed steps below `policy_version`, durably; the log goes on in a new segment."""
    found = index.connection.execute(
        "SELECT step FROM dispatches WHERE step<? AND step NOT IN (SELECT step FROM commits)", (policy_version,)
    ).fetchone()
    if found is not None:
        raise InvariantError(f"prune below version {policy_version}: step {found[0]} is not committed")
    index.payload.roll()
    segments = index.payload.below(policy_version)
    with index.durable_transaction() as connection:
        values = [(segment, policy_version) for segment in segments]
        connection.executemany("INSERT INTO pruned_segments VALUES (?,?)", values)
    # Only now: a file is deleted when no index on disk needs it any more.
    index.payload.prune(segments, policy_version)


def rewind(index: Index, policy_version: int) -> None:
    """Forget everything of steps at or after `policy_version`, durably."""
    with index.durable_transaction() as connection:
        forget_steps(index, connection, policy_version)
        write_meta(connection, "begins_at", policy_version)
    # Only now: a payload is dropped when no index on disk can point to it any more.
    index.payload.trim(load_segments(index))


def forget_steps(index: Index, connection: sqlite3.Connection, step: int) -> None:
    """Delete every record of this step and later ones, inside a durable transaction."""
    for table in index.tables.values():
        table.forget(step)
    for name in STEP_TABLES:
        connection.execute(f"DELETE FROM {name} WHERE step>=?", (step,))
    index.forget_plans()
    write_synced(index, connection, load_segments(index))


def load_segments(index: Index) -> dict[int, int]:
    """Return the offset behind the last record of each segment, and note in the log which steps each has."""
    ends: dict[int, int] = {}
    newest_steps: dict[int, int] = {}
    for table in index.tables.values():
        for segment, end, step in table.segments():
            if segment not in index.payload.pruned:
                ends[segment] = max(end, ends.get(segment, end))
                newest_steps[segment] = max(step, newest_steps.get(segment, step))
    index.payload.newest_steps = newest_steps
    return ends


def write_synced(index: Index, connection: sqlite3.Connection, ends: Mapping[int, int]) -> None:
    """Write how far the log is synced, once it has been trimmed to `ends`."""
    segment = index.payload.end.segment
    write_meta(connection, "payload_synced_segment", segment)
    write_meta(connection, "payload_synced_bytes", ends.get(segment, 0))
