"""Operations that wait for the same turn are written together; each still succeeds or fails alone."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from store_builders import BLUE, RED, dispatch, inline_call, key, turn_row

from flexmarl.core.errors import FencedError, InvariantError, StoreError
from flexmarl.core.ids import TrajectoryKey
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.unit

T = TypeVar("T")


async def opened(folder: Path | None, statements: list[str]) -> SqliteStore:
    store = await SqliteStore.open(folder, inline_call)
    assert store._index is not None
    await store.open_step(dispatch())
    store._index.connection.set_trace_callback(statements.append)
    return store


def test_operations_that_wait_together_are_one_transaction(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        statements: list[str] = []
        store = await opened(tmp_path, statements)
        attempts = await asyncio.gather(*(store.begin_attempt(TrajectoryKey(0, q, 0)) for q in range(4)))
        await asyncio.gather(*(store.put_turn(turn_row(key(query=q))) for q in range(4)))
        assert attempts == [0, 0, 0, 0]
        progress = await store.progress(0)
        assert progress[RED].num_partial == 4
        await store.close()
        return statements

    statements = asyncio.run(scenario())

    # One for the attempts, one for the turns.
    assert sum(statement.startswith("COMMIT") for statement in statements) == 2


def test_without_a_call_operations_are_grouped_too_and_close_finishes_them(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        store = await SqliteStore.open(tmp_path, None)
        assert store._index is not None
        await store.open_step(dispatch())
        statements: list[str] = []
        store._index.connection.set_trace_callback(statements.append)
        begun = [asyncio.ensure_future(store.begin_attempt(TrajectoryKey(0, query, 0))) for query in range(3)]
        undispatched = asyncio.ensure_future(store.begin_attempt(TrajectoryKey(0, 9, 0)))
        await asyncio.sleep(0)  # they wait for their turn
        await store.close()
        assert await asyncio.gather(*begun) == [0, 0, 0]
        with pytest.raises(InvariantError, match="was not dispatched"):
            await undispatched
        with pytest.raises(InvariantError, match="was closed before"):
            await store.last_commit()
        return statements

    statements = asyncio.run(scenario())

    assert sum(statement.startswith("COMMIT") for statement in statements) == 1


def test_an_operation_that_fails_leaves_the_others_of_its_group(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path, [])
        for query in (0, 1, 2, 2):
            await store.begin_attempt(TrajectoryKey(0, query, 0))
        results = await asyncio.gather(
            store.put_turn(turn_row(key(query=0))),
            store.put_turn(turn_row(key(query=2), attempt=0)),  # superseded by attempt 1
            store.put_turn(turn_row(key(query=0), tokens=(1, 2))),  # other content
            store.put_turn(turn_row(key(query=1, agent="checker"))),  # makes the table of another policy
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), FencedError, InvariantError, type(None)]
        await store.close()

        again = await SqliteStore.open(tmp_path, inline_call)
        progress = await again.progress(0)
        assert {policy: each.num_partial for policy, each in progress.items()} == {RED: 1, BLUE: 1}
        await again.close()

    asyncio.run(scenario())


def test_a_group_that_cannot_be_written_fails_whole_and_the_store_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path, [])
        for query in range(2):
            await store.begin_attempt(TrajectoryKey(0, query, 0))
        index: Any = store._index
        commit_once = _FullDisk(index.database.connection)
        index.database.connection = commit_once
        results = await asyncio.gather(
            *(store.put_turn(turn_row(key(query=query))) for query in range(2)), return_exceptions=True
        )
        assert [type(result) for result in results] == [StoreError, StoreError]
        index.database.connection = commit_once.connection
        assert await store.progress(0) == {}
        await asyncio.gather(*(store.put_turn(turn_row(key(query=query))) for query in range(2)))
        assert (await store.progress(0))[RED].num_partial == 2
        await store.close()

    asyncio.run(scenario())


def test_a_closed_runtime_is_told_to_all_who_wait() -> None:
    is_closed = False

    async def call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
        if is_closed:
            raise InvariantError("closed")
        return function(*args)

    async def scenario() -> list[Any]:
        nonlocal is_closed
        store = await SqliteStore.open(None, call)
        is_closed = True
        return list(await asyncio.gather(store.last_commit(), store.progress(0), return_exceptions=True))

    assert [str(result) for result in asyncio.run(scenario())] == ["closed", "closed"]


class _FullDisk:
    """A connection whose commit finds the disk full."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        return self.connection.execute(statement, *args)
