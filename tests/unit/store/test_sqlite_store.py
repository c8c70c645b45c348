import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from store_builders import (
    RED,
    acknowledge,
    commit_record,
    counts,
    dispatch,
    fail_the_rest,
    inline_call,
    key,
    make_ready,
    open_store,
    outcome,
    put_trajectory,
    run,
)

from flexmarl.core.errors import InvariantError, StoreError
from flexmarl.core.protocols import ExperienceStore
from flexmarl.core.records import StepExtension
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.unit

T = TypeVar("T")
EXTENSION = StepExtension(step=1, query=0, first_trajectory=1, num_trajectories=1)
DURABLE = ["fdatasync", "PRAGMA synchronous=FULL", "BEGIN IMMEDIATE", "COMMIT", "PRAGMA synchronous=NORMAL"]


def _log_durability(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each sync of the payload file and each statement that matters for durability."""
    log: list[str] = []
    monkeypatch.setattr("os.fdatasync", lambda fd: log.append("fdatasync"))

    def note(statement: str) -> None:
        if statement.startswith(("BEGIN", "COMMIT", "ROLLBACK", "PRAGMA")):
            log.append(statement)

    assert store._index is not None
    store._index.connection.set_trace_callback(note)
    return log


def test_it_is_an_experience_store() -> None:
    store: ExperienceStore = open_store()
    run(store.close())


def test_g4_dispatch_extension_commit_prune_and_rewind_are_synced_behind_their_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    log = _log_durability(store, monkeypatch)
    run(store.open_step(dispatch()))
    assert log == DURABLE
    make_ready(store, key())
    acknowledge(store, key())
    fail_the_rest(store)
    log.clear()
    run(store.commit(commit_record({"red": ["m0"]})))
    assert log == DURABLE
    for change in (store.prune(1), store.open_step(dispatch(step=1)), store.extend_step(EXTENSION), store.rewind(0)):
        log.clear()
        run(change)
        assert log[-len(DURABLE) :] == DURABLE
    run(store.close())


def test_g4_a_refused_commit_goes_back_to_the_faster_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [key()])
    log = _log_durability(store, monkeypatch)
    with pytest.raises(InvariantError, match="neither trained"):
        run(store.commit(commit_record({"red": []})))
    assert log == [*DURABLE[:3], "ROLLBACK", DURABLE[4]]
    run(store.close())


def test_every_other_call_is_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [key()])
    log = _log_durability(store, monkeypatch)
    run(store.record_outcome(outcome(key().trajectory_key, [key()])))
    assert log == ["BEGIN IMMEDIATE", "COMMIT"]
    run(store.close())


def test_a_call_that_returned_is_visible_to_any_tool(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch()))
    make_ready(store, key(query=3, turn=1))
    run(store.mask(RED, [key(query=3, turn=1)], "truncated"))
    tool = sqlite3.connect(tmp_path / "index.db")
    query = (
        "SELECT sample_id, status, reason, reward, advantage, num_tokens, has_turn, has_reward, has_advantage "
        "FROM rows_0_red"
    )
    assert tool.execute(query).fetchall() == [("3_1_0", "masked", "truncated", 1.0, 0.5, 5, 1, 1, 1)]
    tool.close()
    run(store.close())


def test_ready_and_leased_rows_are_found_by_the_partial_indexes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch()))
    make_ready(store, key())
    statements: list[str] = []
    assert store._index is not None
    connection = store._index.connection
    connection.set_trace_callback(statements.append)
    run(store.ready(RED, 0))
    acknowledge(store, key())
    connection.set_trace_callback(None)
    selected = [statement for statement in statements if "INDEXED BY" in statement]
    plans = [[row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")] for statement in selected]
    of_lease = ["SEARCH rows_0_red USING INDEX leased_0_red (lease_id=? AND step=?)"]
    assert plans[0] == ["SEARCH rows_0_red USING INDEX ready_0_red (step=?)"]
    assert [plan[:1] for plan in plans[1:]] == [of_lease, of_lease]
    run(store.close())


def test_calls_may_come_from_different_threads(tmp_path: Path) -> None:
    used: set[int] = set()

    async def call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
        results: list[T] = []

        def work() -> None:
            used.add(threading.get_ident())
            results.append(function(*args))

        thread = threading.Thread(target=work)
        threads.append(thread)
        thread.start()
        thread.join()
        return results[0]

    # Kept, so that the system gives no identity to two of them.
    threads: list[threading.Thread] = []

    async def scenario() -> None:
        store = await SqliteStore.open(tmp_path, call)
        await store.open_step(dispatch())
        assert await store.begin_attempt(key().trajectory_key) == 0
        assert await store.progress(0) == {}
        await store.close()

    asyncio.run(scenario())
    assert used.isdisjoint({threading.get_ident()})
    assert len(threads) == 5


def test_a_closed_store_says_so_and_closes_twice(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        store = open_store(folder)
        run(store.close())
        run(store.close())
        with pytest.raises(InvariantError, match="the store was closed before open_step"):
            run(store.open_step(dispatch()))


def test_a_full_disk_fails_the_call_and_the_store_goes_on_afterwards(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [key()])
    assert store._index is not None
    connection = store._index.connection
    num_pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={num_pages}")
    with pytest.raises(StoreError, match=r"index\.db: .*full: the disk is full; free space and resume the run"):
        put_trajectory(store, [key(query=1, turn=turn) for turn in range(100)])
    before = counts(store)
    connection.execute("PRAGMA max_page_count=100000")
    trajectory = key(query=0).trajectory_key
    run(store.record_outcome(outcome(trajectory, [key()])))
    assert counts(store) == before
    run(store.close())


def test_an_in_memory_store_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = run(SqliteStore.open(None, inline_call))
    run(store.open_step(dispatch()))
    make_ready(store, key())
    assert counts(store) == {"ready": 1}
    assert list(tmp_path.iterdir()) == []
    run(store.close())
