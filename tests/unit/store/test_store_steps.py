import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    commit,
    commit_record,
    counts,
    dispatch,
    fail_the_rest,
    key,
    lease_of,
    make_ready,
    open_store,
    outcome,
    put_trajectory,
    ready_keys,
    run,
    seal_record,
    turn_row,
)

from flexmarl.core.errors import InvariantError, StoreError
from flexmarl.core.records import Sample, StepExtension, TrajectoryFailure
from flexmarl.store import RecoveryReport, SqliteStore
from flexmarl.store.payload import PayloadLog
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
    commit(store, record)
    assert run(store.last_commit()) == record
    assert run(store.trained_ids(0)) == {RED: [SOLVER, sealed], BLUE: [CHECKER]}
    assert counts(store) == {"committed": 2, "masked": 1, "failed": 1, "superseded": 1}
    assert run(store.release(HOLDER)) == []


def test_repeating_a_commit_changes_nothing_and_another_record_is_refused(store: SqliteStore) -> None:
    _train_both(store)
    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    commit(store, record)
    commit(store, record)
    assert run(store.last_commit()) == record
    with pytest.raises(InvariantError, match="step 0 was committed before as"):
        commit(store, commit_record({"red": ["m0"], "blue": []}))


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
        commit(store, commit_record({"red": ["m0"], "blue": ["m0"]}))


def test_g4_a_commit_that_one_policy_blocks_commits_no_policy(store: SqliteStore) -> None:
    acknowledge(store, SOLVER, micro_batch_id="m0")
    with pytest.raises(InvariantError, match="policy 'blue'"):
        commit(store, commit_record({"red": ["m0"], "blue": []}))
    assert run(store.last_commit()) is None
    assert run(store.trained_ids(0)) == {}
    assert counts(store, RED) == {"acknowledged": 1}


def test_g4_a_commit_that_breaks_between_two_policies_leaves_no_trace(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train_both(store)
    commit_rows = PolicyTable.commit

    def break_at_blue(table: PolicyTable, step: int) -> int:
        if table.policy == BLUE:
            raise KeyboardInterrupt
        return commit_rows(table, step)

    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTable, "commit", break_at_blue)
        with pytest.raises(KeyboardInterrupt):
            commit(store, record)
    assert (counts(store, RED), counts(store, BLUE)) == ({"acknowledged": 1}, {"acknowledged": 1})
    assert run(store.last_commit()) is None
    commit(store, record)
    assert run(store.trained_ids(0)) == {RED: [SOLVER], BLUE: [CHECKER]}


@pytest.mark.parametrize("micro_batches", [{"red": ["m0"]}, {"red": ["m0", "m1"], "blue": ["m0"]}])
def test_g2_a_commit_record_that_is_not_what_was_trained_is_refused(
    store: SqliteStore, micro_batches: dict[str, list[str]]
) -> None:
    _train_both(store)
    with pytest.raises(InvariantError, match=r"the record and the leases differ in micro-batches \['m.'\]"):
        commit(store, commit_record(micro_batches))
    assert run(store.trained_ids(0)) == {}


def test_versions_rise_by_one(store: SqliteStore) -> None:
    _train_both(store)
    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    with pytest.raises(InvariantError, match="commit of step 0 makes version 3, not one more"):
        commit(store, dataclasses.replace(record, policy_version=3))
    commit(store, record)
    run(store.open_step(dispatch(step=2)))
    with pytest.raises(InvariantError, match="commit of version 3: the newest committed version is 1"):
        commit(store, commit_record({}, step=2))
    with pytest.raises(InvariantError, match="commit of step 1: it was never dispatched"):
        commit(store, commit_record({}, step=1))


def test_a_policy_that_did_not_act_is_committed_without_rows(store: SqliteStore) -> None:
    _train_both(store)
    record = commit_record({"red": ["m0"], "blue": ["m0"], "green": []})
    commit(store, record)
    assert run(store.last_commit()) == record


def test_rewind_forgets_from_a_step_on_and_keeps_what_is_before(store: SqliteStore) -> None:
    _train_both(store)
    first = commit_record({"red": ["m0"], "blue": ["m0"]})
    commit(store, first)
    later = key(step=1)
    run(store.open_step(dispatch(step=1)))
    make_ready(store, later)
    acknowledge(store, later)
    run(store.seal(HOLDER, dataclasses.replace(seal_record(1, ["m0"]), step=1)))
    commit(store, commit_record({"red": ["m0"]}, step=1))
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


# --- extensions, resume and replay ------------------------------------------------------------------------------------


def extension(query: int = 0, first: int = 1, number: int = 2, step: int = 0) -> StepExtension:
    return StepExtension(step=step, query=query, first_trajectory=first, num_trajectories=number)


def test_an_open_step_is_extended_where_its_trajectories_end(store: SqliteStore) -> None:
    added = key(trajectory=2)
    with pytest.raises(InvariantError, match="s0/q0/t2: was not dispatched: step 0 has 1 trajectories of query 0"):
        run(store.begin_attempt(added.trajectory_key))
    run(store.extend_step(extension()))
    run(store.extend_step(extension()))
    run(store.extend_step(extension(first=3, number=1)))
    assert run(store.begin_attempt(added.trajectory_key)) == 0
    (stored,) = run(store.open_steps())
    assert stored.extensions == (extension(), extension(first=3, number=1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (extension(first=2), "step 0 has 1 trajectories of query 0; it cannot be extended by"),
        (extension(first=0), "step 0 has 1 trajectories of query 0"),
        (extension(query=9), "step 0 has no trajectories of query 9"),
        (extension(number=0), "step 0 has 1 trajectories of query 0"),
        (extension(step=3), "step 3 is not open; it cannot be extended"),
    ],
)
def test_a_wrong_extension_is_refused(store: SqliteStore, wrong: StepExtension, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        run(store.extend_step(wrong))


def test_a_committed_step_is_not_extended(store: SqliteStore) -> None:
    _train_both(store)
    commit(store, commit_record({"red": ["m0"], "blue": ["m0"]}))
    with pytest.raises(InvariantError, match="step 0 is not open"):
        run(store.extend_step(extension()))


def test_g2_a_commit_without_a_trajectory_that_was_dispatched_is_refused_and_names_it(store: SqliteStore) -> None:
    _train_both(store)
    fail_the_rest(store)
    run(store.extend_step(extension(query=2)))
    record = commit_record({"red": ["m0"], "blue": ["m0"]})
    for first in ("s0/q2/t1", "s0/q2/t2"):
        message = f"of its trajectories have neither an outcome nor a failure record; first {first}"
        with pytest.raises(InvariantError, match=message):
            run(store.commit(record))
        trajectory = key(query=2, trajectory=int(first[-1])).trajectory_key
        run(store.begin_attempt(trajectory))
        with pytest.raises(InvariantError, match=message):
            run(store.commit(record))
        run(store.record_failure(TrajectoryFailure(trajectory=trajectory, attempt=0, kind="timeout", message="")))
    run(store.commit(record))


def test_a_resumed_run_finds_its_open_steps_with_every_trajectory_that_had_begun(store: SqliteStore) -> None:
    failed = key(query=1)
    put_trajectory(store, [failed])
    failure = TrajectoryFailure(trajectory=failed.trajectory_key, attempt=0, kind="timeout", message="60 s")
    run(store.record_failure(failure))
    in_flight = [key(query=2), key(query=2, turn=1), key(query=2, agent="checker")]
    put_trajectory(store, in_flight[:1])
    put_trajectory(store, in_flight)
    run(store.open_step(dispatch(step=1)))
    first, second = run(store.open_steps())
    assert (first.dispatch, second.dispatch) == (dispatch(), dispatch(step=1))
    assert second.trajectories == ()
    ended, lost, open_ = first.trajectories
    assert (ended.key, ended.attempt, ended.failure) == (SOLVER.trajectory_key, 0, None)
    assert ended.outcome == outcome(SOLVER.trajectory_key, [SOLVER, CHECKER])
    assert (lost.failure, lost.outcome, lost.turns) == (failure, None, (turn_row(failed),))
    assert (open_.attempt, open_.outcome, open_.failure) == (1, None, None)
    assert open_.turns == tuple(turn_row(sample, attempt=1) for sample in sorted(in_flight))


def test_committed_steps_are_read_again_in_the_order_in_which_they_were_trained(store: SqliteStore) -> None:
    others = [key(query=1), key(query=2)]
    for sample in others:
        make_ready(store, sample)
    acknowledge(store, others[1], SOLVER, micro_batch_id="m0")
    acknowledge(store, others[0], micro_batch_id="m1")
    acknowledge(store, CHECKER, micro_batch_id="m0")
    record = commit_record({"red": ["m1", "m0"], "blue": ["m0"]})
    with pytest.raises(InvariantError, match="micro-batch m0 of 'red', step 0, is in no commit"):
        run(store.micro_batch(RED, 0, "m0"))
    commit(store, record)
    assert run(store.commits_after(0)) == [record]
    assert run(store.commits_after(1)) == []
    assert run(store.micro_batch(RED, 0, "m0")) == [
        Sample(turn=turn_row(sample), advantage=0.5, reward=1.0) for sample in (others[1], SOLVER)
    ]


def test_g3_a_step_is_dispatched_for_versions_that_are_there() -> None:
    store = open_store()
    for low, high in ((2, 2), (1, 0)):
        wrong = dataclasses.replace(dispatch(step=1), min_version=low, max_version=high)
        with pytest.raises(InvariantError, match="step 1 dispatched for versions that do not fit it"):
            run(store.open_step(wrong))
    run(store.close())


# --- pruning ----------------------------------------------------------------------------------------------------------


def committed(store: SqliteStore, step: int) -> None:
    sample = key(step=step)
    run(store.open_step(dispatch(step=step)))
    make_ready(store, sample)
    acknowledge(store, sample)
    commit(store, commit_record({"red": ["m0"]}, step=step))


def test_payloads_below_a_checkpoint_go_and_everything_else_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step in range(4):
        committed(store, step)
        run(store.prune(max(step - 1, 0)))
    assert sorted(path.name for path in tmp_path.glob("payload-*")) == [f"payload-{n}.bin" for n in (3, 4, 5)]
    assert run(store.pruned_version()) == 2
    for step in (0, 1):
        message = f"tokens of segment {step + 1} have been deleted: the checkpoint of version {step + 1} covers"
        with pytest.raises(StoreError, match=message):
            run(store.micro_batch(RED, step, "m0"))
        assert run(store.trained_ids(step)) == {RED: [key(step=step)]}
    assert [sample.turn for sample in run(store.micro_batch(RED, 2, "m0"))] == [turn_row(key(step=2))]
    run(store.close())
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="have been deleted"):
        run(store.micro_batch(RED, 1, "m0"))
    assert [sample.turn for sample in run(store.micro_batch(RED, 3, "m0"))] == [turn_row(key(step=3))]
    assert run(store.pruned_version()) == 2
    run(store.close())


def test_a_step_that_is_not_committed_is_not_pruned(store: SqliteStore) -> None:
    with pytest.raises(InvariantError, match="prune below version 1: step 0 is not committed"):
        run(store.prune(1))
    run(store.prune(0))
    lease_of(store, SOLVER)


def test_a_kill_between_pruning_and_deleting_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    committed(store, 0)
    run(store.prune(0))
    committed(store, 1)

    def killed(log: PayloadLog, segments: object, policy_version: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PayloadLog, "prune", killed)
        with pytest.raises(KeyboardInterrupt):
            run(store.prune(1))
    assert (tmp_path / "payload-1.bin").exists()
    run(store.close())
    store = open_store(tmp_path)
    assert not (tmp_path / "payload-1.bin").exists()
    assert store.recovery == RecoveryReport()
    assert [sample.turn for sample in run(store.micro_batch(RED, 1, "m0"))] == [turn_row(key(step=1))]
    run(store.rewind(1))
    committed(store, 1)
    run(store.close())
