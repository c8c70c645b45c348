import dataclasses
from collections.abc import Iterator

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    commit_record,
    counts,
    dispatch,
    key,
    lease_of,
    make_ready,
    open_store,
    put_trajectory,
    ready_keys,
    run,
    seal_record,
    turn_row,
)

from flexmarl.core.errors import InvariantError
from flexmarl.core.records import TrajectoryFailure
from flexmarl.store import SqliteStore
from flexmarl.store.rows import PolicyTable

pytestmark = pytest.mark.unit

SOLVER, CHECKER = key(agent="solver"), key(agent="checker")


@pytest.fixture
def store() -> Iterator[SqliteStore]:
    """One trajectory with a ready row in each policy."""
    opened = open_store()
    run(opened.open_step(dispatch()))
    make_ready(opened, SOLVER, CHECKER)
    yield opened
    run(opened.close())


def _train_both(store: SqliteStore) -> None:
    acknowledge(store, SOLVER, micro_batch_id="m0")
    acknowledge(store, CHECKER, micro_batch_id="m0")


def test_a_step_is_dispatched_once(store: SqliteStore) -> None:
    run(store.open_step(dispatch()))
    with pytest.raises(InvariantError, match="step 0 was dispatched before as"):
        run(store.open_step(dispatch(num_queries=5)))


def test_a_commit_takes_acknowledged_and_sealed_rows_and_leaves_the_rest(store: SqliteStore) -> None:
    sealed, masked, failed = key(query=1), key(query=2), key(query=3)
    make_ready(store, sealed)
    make_ready(store, masked)
    run(store.mask(RED, [masked], "truncated"))
    put_trajectory(store, [failed])
    put_trajectory(store, [failed])
    failure = TrajectoryFailure(trajectory=failed.trajectory_key, attempt=1, kind="timeout", message="60 s")
    run(store.record_failure(failure))
    acknowledge(store, sealed, micro_batch_id="m1")
    run(store.seal(HOLDER, seal_record(1, ["m1"])))
    _train_both(store)
    record = commit_record({"red": ["m1", "m0"], "blue": ["m0"]})
    run(store.commit(record))
    assert run(store.last_commit()) == record
    assert run(store.trained_ids(0)) == {RED: [SOLVER, sealed], BLUE: [CHECKER]}
    assert counts(store) == {"committed": 2, "masked": 1, "failed": 1, "superseded": 1}
    assert run(store.release(HOLDER)) == []


def test_repeating_a_commit_changes_nothing_and_another_record_is_refused(store: SqliteStore) -> None:
    _train_both(store)
    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    run(store.commit(record))
    run(store.commit(record))
    assert run(store.last_commit()) == record
    with pytest.raises(InvariantError, match="step 0 was committed before as"):
        run(store.commit(commit_record({"red": ["m0"], "blue": []})))


@pytest.mark.parametrize("state", ["partial", "ready", "leased"])
def test_g2_a_commit_that_would_lose_a_sample_is_refused_and_names_it(store: SqliteStore, state: str) -> None:
    acknowledge(store, SOLVER, micro_batch_id="m0")
    if state == "leased":
        lease_of(store, CHECKER, micro_batch_id="m0")
    if state == "partial":
        acknowledge(store, CHECKER, micro_batch_id="m0")
        put_trajectory(store, [key(query=1, agent="checker")])
    message = (
        rf"commit of step 0: 1 rows of policy 'blue' are neither .*; first s0/q./t0/checker/b0/n0: .*{state.upper()}"
    )
    with pytest.raises(InvariantError, match=message):
        run(store.commit(commit_record({"red": ["m0"], "blue": ["m0"]})))


def test_g4_a_commit_that_one_policy_blocks_commits_no_policy(store: SqliteStore) -> None:
    acknowledge(store, SOLVER, micro_batch_id="m0")
    with pytest.raises(InvariantError, match="policy 'blue'"):
        run(store.commit(commit_record({"red": ["m0"], "blue": []})))
    assert run(store.last_commit()) is None
    assert run(store.trained_ids(0)) == {}
    assert counts(store, RED) == {"acknowledged": 1}


def test_g4_a_commit_that_breaks_between_two_policies_leaves_no_trace(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train_both(store)
    commit = PolicyTable.commit

    def break_at_blue(table: PolicyTable, step: int) -> int:
        if table.policy == BLUE:
            raise KeyboardInterrupt
        return commit(table, step)

    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTable, "commit", break_at_blue)
        with pytest.raises(KeyboardInterrupt):
            run(store.commit(record))
    assert (counts(store, RED), counts(store, BLUE)) == ({"acknowledged": 1}, {"acknowledged": 1})
    assert run(store.last_commit()) is None
    run(store.commit(record))
    assert run(store.trained_ids(0)) == {RED: [SOLVER], BLUE: [CHECKER]}


@pytest.mark.parametrize("micro_batches", [{"red": ["m0"]}, {"red": ["m0", "m1"], "blue": ["m0"]}])
def test_g2_a_commit_record_that_is_not_what_was_trained_is_refused(
    store: SqliteStore, micro_batches: dict[str, list[str]]
) -> None:
    _train_both(store)
    with pytest.raises(InvariantError, match=r"the record and the rows differ in micro-batches \['m.'\]"):
        run(store.commit(commit_record(micro_batches)))
    assert run(store.trained_ids(0)) == {}


def test_versions_rise_by_one(store: SqliteStore) -> None:
    _train_both(store)
    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    with pytest.raises(InvariantError, match="commit of step 0 makes version 3, not one more"):
        run(store.commit(dataclasses.replace(record, policy_version=3)))
    run(store.commit(record))
    run(store.open_step(dispatch(step=2)))
    with pytest.raises(InvariantError, match="commit of version 3: the newest committed version is 1"):
        run(store.commit(commit_record({}, step=2)))
    with pytest.raises(InvariantError, match="commit of step 1: it was never dispatched"):
        run(store.commit(commit_record({}, step=1)))


def test_a_policy_that_did_not_act_is_committed_without_rows(store: SqliteStore) -> None:
    _train_both(store)
    record = commit_record({"red": ["m0"], "blue": ["m0"], "green": []})
    run(store.commit(record))
    assert run(store.last_commit()) == record


def test_rewind_forgets_from_a_step_on_and_keeps_what_is_before(store: SqliteStore) -> None:
    _train_both(store)
    first = commit_record({"red": ["m0"], "blue": ["m0"]})
    run(store.commit(first))
    later = key(step=1)
    run(store.open_step(dispatch(step=1)))
    make_ready(store, later)
    acknowledge(store, later)
    run(store.seal(HOLDER, dataclasses.replace(seal_record(1, ["m0"]), step=1)))
    run(store.commit(commit_record({"red": ["m0"]}, step=1)))
    run(store.open_step(dispatch(step=2)))
    put_trajectory(store, [key(step=2)])

    run(store.rewind(1))
    assert run(store.last_commit()) == first
    assert run(store.trained_ids(0)) == {RED: [SOLVER], BLUE: [CHECKER]}
    assert run(store.progress(1)) == {}
    assert run(store.progress(2)) == {}
    assert run(store.current_seal(RED, 1)) is None

    run(store.open_step(dispatch(step=1, num_queries=2)))
    assert run(store.begin_attempt(later.trajectory_key)) == 0
    run(store.put_turn(turn_row(later, tokens=(3,))))
    assert run(store.release(HOLDER)) == []
    assert ready_keys(store, step=1) == []


def test_policies_that_differ_in_case_or_have_odd_names_have_their_own_tables() -> None:
    store = open_store()
    run(store.open_step(dispatch()))
    run(store.begin_attempt(SOLVER.trajectory_key))
    names = ["red", "Red", 'a "b"; DROP TABLE meta', "rows_0_red"]
    for turn, name in enumerate(names):
        row = dataclasses.replace(turn_row(key(turn=turn)), policy=name)  # type: ignore[arg-type]
        run(store.put_turn(row))
    assert {policy: part.num_partial for policy, part in run(store.progress(0)).items()} == dict.fromkeys(names, 1)
    run(store.close())
