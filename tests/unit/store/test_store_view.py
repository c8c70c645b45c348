"""A look into a store: live, closed, on a read-only disk, or damaged."""

import sqlite3
from pathlib import Path

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    advantage,
    commit,
    commit_record,
    dispatch,
    inline_call,
    key,
    lease_of,
    make_ready,
    open_store,
    outcome,
    put_trajectory,
    run,
    seal_record,
    turn_row,
)

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import HolderId, TrajectoryKey
from flexmarl.core.protocols import PolicyColumns
from flexmarl.core.records import OutcomeRecord, StepExtension, TokenColumn, TokenValues, TrajectoryFailure, TurnColumns
from flexmarl.store import SqliteStore
from flexmarl.store.lifecycle import LeaseStatus, RowStatus
from flexmarl.store.schema import FORMAT_VERSION
from flexmarl.store.view import StoreView
from flexmarl.store.view_records import LeaseView, RewardSummary, RowCounts, SealView

pytestmark = pytest.mark.unit

EXTENSION = StepExtension(step=1, query=0, first_trajectory=1, num_trajectories=1)
COLUMNS = {RED: PolicyColumns(scalars={"is_hard": "bool", "level": "int"}), BLUE: PolicyColumns()}
FAILURE = TrajectoryFailure(trajectory=TrajectoryKey(1, 1, 0), attempt=0, kind="timeout", message="60 s")


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    """Step 0 is committed; step 1 is under way: an extended query, a failure, a replayed trajectory, seals, leases."""
    opened = run(SqliteStore.open(tmp_path, inline_call, COLUMNS))
    run(opened.open_step(dispatch(num_queries=1)))
    make_ready(opened, key())
    acknowledge(opened, key())
    commit(opened, commit_record({"red": ["m0"]}))
    run(opened.open_step(dispatch(step=1)))
    run(opened.extend_step(EXTENSION))
    put_trajectory(opened, [key(step=1), key(step=1, agent="checker")])
    again = key(step=1), key(step=1, agent="checker")
    put_trajectory(opened, again)
    ending = outcome(again[0].trajectory_key, again, attempt=1)
    columns = (TurnColumns(key=again[0], values={"is_hard": True}),)
    ending = OutcomeRecord(
        trajectory=ending.trajectory, attempt=1, rewards=ending.rewards, turns=ending.turns, turn_columns=columns
    )
    run(opened.record_outcome(ending))
    run(opened.fill(RED, [advantage(again[0])]))
    run(opened.mask(BLUE, [again[1]], "group_of_one"))
    scores = TokenValues(key=again[0], values=(-1.0, -2.0, -3.0))
    run(opened.fill_tokens(RED, TokenColumn.REFERENCE_LOGPROBS, [scores]))
    put_trajectory(opened, [key(step=1, query=1)])
    run(opened.record_failure(FAILURE))
    make_ready(opened, key(step=1, trajectory=1))
    acknowledge(opened, again[0], micro_batch_id="m0")
    lease_of(opened, key(step=1, trajectory=1), micro_batch_id="m1", holder=HolderId("red#1"))
    run(opened.fence(HolderId("red#9")))
    return opened


def test_a_live_store_is_seen_as_it_is_at_the_moment(store: SqliteStore, tmp_path: Path) -> None:
    with StoreView.open(tmp_path) as view:
        summary = view.summary()
        assert (summary.format_version, summary.fenced, summary.pruned_version) == (
            FORMAT_VERSION,
            (HolderId("red#9"),),
            0,
        )
        assert summary.columns == COLUMNS
        assert {"index.db", "payload-1.bin"} <= summary.file_bytes.keys()
        assert summary.file_bytes["payload-1.bin"] == (tmp_path / "payload-1.bin").stat().st_size
        first, second = view.steps()
        assert first.commit == commit_record({"red": ["m0"]})
        assert view.commits() == [first.commit]
        assert first.rows == {RED: RowCounts(by_status={RowStatus.COMMITTED: 1}, by_reason={})}
        assert (second.dispatch, second.extensions, second.commit) == (dispatch(step=1), (EXTENSION,), None)
        assert (second.num_trajectories, second.num_outcomes, second.num_failures) == (5, 2, 1)
        superseded, masked, failed = RowStatus.SUPERSEDED, RowStatus.MASKED, RowStatus.FAILED
        assert second.rows == {
            RED: RowCounts(
                by_status={superseded: 1, failed: 1, RowStatus.ACKNOWLEDGED: 1, RowStatus.LEASED: 1},
                by_reason={(superseded, "attempt 1"): 1, (failed, "timeout"): 1},
            ),
            BLUE: RowCounts(
                by_status={superseded: 1, masked: 1},
                by_reason={(superseded, "attempt 1"): 1, (masked, "group_of_one"): 1},
            ),
        }
        lease = run(store.claim(RED, 1, HOLDER, "m2", max_rows=1, timeout_s=0.0))
        assert lease is None
        run(store.release(HolderId("red#1")))
        assert view.step(1).rows[RED].by_status[RowStatus.READY] == 1
    run(store.close())


def test_groups_have_the_rewards_of_their_rows(store: SqliteStore, tmp_path: Path) -> None:
    with StoreView.open(tmp_path) as view:
        checked, solved, lost = view.groups(1)
    assert (checked.query, checked.policy, checked.rewards) == (0, BLUE, None)
    assert (solved.query, solved.policy, solved.num_trajectories, solved.num_outcomes) == (0, RED, 2, 2)
    assert (solved.num_rows, solved.rewards) == (2, RewardSummary(num_rows=2, mean=1.0, lowest=1.0, highest=1.0))
    assert (lost.query, lost.num_failures, lost.by_status) == (1, 1, {RowStatus.FAILED: 1})
    run(store.close())


def test_leases_and_seals_are_shown_with_their_holders(store: SqliteStore, tmp_path: Path) -> None:
    seal = seal_record(1, ["m0"], step=1)
    run(store.seal(HOLDER, seal))
    with StoreView.open(tmp_path) as view:
        assert view.leases(1) == [
            LeaseView(
                lease_id=number, policy=RED, holder=HolderId(holder), micro_batch_id=name, num_rows=1, status=status
            )
            for number, holder, name, status in [
                (2, "red#0", "m0", LeaseStatus.SEALED),
                (3, "red#1", "m1", LeaseStatus.ACTIVE),
            ]
        ]
        assert view.seals(1) == [SealView(number=1, holder=HOLDER, seal=seal)]
        assert view.seals(0) == []
    run(store.close())


def test_a_trajectory_is_shown_with_all_its_attempts_and_turns(store: SqliteStore, tmp_path: Path) -> None:
    with StoreView.open(tmp_path) as view:
        shown = view.trajectory(TrajectoryKey(1, 0, 0))
        assert [attempt.attempt for attempt in shown.attempts] == [0, 1]
        old, new = shown.attempts
        assert (old.outcome, old.failure, {turn.status for turn in old.turns}) == (None, None, {RowStatus.SUPERSEDED})
        assert new.outcome is not None
        checker, solver = new.turns
        assert (checker.policy, checker.status, checker.reason) == (BLUE, RowStatus.MASKED, "group_of_one")
        assert (solver.reward, solver.advantage, solver.num_passes, solver.lease_id) == (1.0, 0.5, 1, 2)
        assert (solver.num_prompt_tokens, solver.num_response_tokens) == (2, 3)
        assert (solver.columns, solver.scored) == ({"is_hard": True}, (TokenColumn.REFERENCE_LOGPROBS,))
        assert view.trajectory(FAILURE.trajectory).attempts[0].failure == FAILURE
        assert view.turn_rows(0) == [turn_row(key())]
        assert [row.attempt for row in view.turn_rows(1)] == [1, 1, 0, 0]
    run(store.close())


def test_a_look_changes_nothing(store: SqliteStore, tmp_path: Path) -> None:
    run(store.close())
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    with StoreView.open(tmp_path) as view:
        assert len(view.steps()) == 2
        assert len(view.turn_rows(0)) == 1
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()} == before


def test_what_a_dead_run_left_is_shown_with_its_leases(store: SqliteStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in list(tmp_path.iterdir()):
        if path.is_file() and path.name != "index.db-shm":
            (copy / path.name).write_bytes(path.read_bytes())
    with StoreView.open(copy) as view:
        assert [lease.status for lease in view.leases(1)] == [LeaseStatus.ACKNOWLEDGED, LeaseStatus.ACTIVE]
    run(store.close())


def test_g10_what_cannot_be_shown_names_the_folder_and_the_reason(store: SqliteStore, tmp_path: Path) -> None:
    with StoreView.open(tmp_path) as view:
        with pytest.raises(StoreError, match="has no step 7; the newest is 1"):
            view.step(7)
        with pytest.raises(StoreError, match="has no step 7"):
            view.groups(7)
        with pytest.raises(StoreError, match="trajectory s1/q3/t0 has not begun"):
            view.trajectory(TrajectoryKey(1, 3, 0))
    run(store.close())
    with pytest.raises(StoreError, match="nowhere has no experience store .*: give the folder of a run that has begun"):
        StoreView.open(tmp_path / "nowhere")
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("UPDATE meta SET value=value+1 WHERE name='format_version'")
    connection.close()
    with pytest.raises(
        StoreError, match=f"format_version {FORMAT_VERSION + 1}, this version of FlexMARL reads {FORMAT_VERSION}"
    ):
        StoreView.open(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with sqlite3.connect(other / "index.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(StoreError, match="is a database of something else"):
        StoreView.open(other)
    (other / "index.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match=r"index\.db: .*the file is damaged"):
        StoreView.open(other)


def test_pruned_tokens_are_said_to_be_pruned(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch(num_queries=1)))
    make_ready(store, key())
    acknowledge(store, key())
    run(store.commit(commit_record({"red": ["m0"]})))
    run(store.prune(1))
    with StoreView.open(tmp_path) as view:
        assert view.summary().pruned_version == 1
        with pytest.raises(StoreError, match="the checkpoint of version 1 covers their step"):
            view.turn_rows(0)
        assert view.trajectory(TrajectoryKey(0, 0, 0)).attempts[0].turns[0].status is RowStatus.COMMITTED
    run(store.close())
