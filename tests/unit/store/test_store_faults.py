import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from flexmarl.core.errors import InvariantError, StoreError
from flexmarl.store.faults import translated

pytestmark = pytest.mark.unit


def _fill_disk(path: Path) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA max_page_count=2")
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    finally:
        connection.close()


def _write_read_only(path: Path) -> None:
    sqlite3.connect(path).close()
    path.touch()
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        connection.execute("CREATE TABLE t (x)")
    finally:
        connection.close()


def _read_garbage(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    connection = sqlite3.connect(path)
    try:
        connection.execute("SELECT * FROM t")
    finally:
        connection.close()


def _write_locked(path: Path) -> None:
    owner, other = sqlite3.connect(path), sqlite3.connect(path, timeout=0)
    try:
        owner.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
    finally:
        other.close()
        owner.close()


def _open_missing_folder(path: Path) -> None:
    sqlite3.connect(path / "nowhere" / "index.db")


@pytest.mark.parametrize(
    ("provoke", "fix"),
    [
        (_fill_disk, "free space and resume"),
        (_write_read_only, "make the run folder writable"),
        (_read_garbage, "the file is damaged"),
        (_write_locked, "another process has locked it"),
        (_open_missing_folder, "make the run folder writable"),
    ],
)
def test_real_errors_of_sqlite_become_store_errors_with_a_fix(
    tmp_path: Path, provoke: Callable[[Path], None], fix: str
) -> None:
    with pytest.raises(StoreError, match=rf"run/index\.db: .*{fix}") as caught, translated("run/index.db"):
        provoke(tmp_path / "index.db")
    assert isinstance(caught.value.__cause__, sqlite3.Error)


@pytest.mark.parametrize(
    ("code", "fix"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "make the run folder writable"), (errno.EIO, "check the disk")],
)
def test_errors_of_the_system_become_store_errors_with_a_fix(code: int, fix: str) -> None:
    with pytest.raises(StoreError, match=f"payload.bin: why: .*{fix}"), translated("payload.bin"):
        raise OSError(code, "why")


def test_a_wrong_statement_is_our_bug() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(InvariantError, match="no such table"), translated("index.db"):
        connection.execute("SELECT * FROM nowhere")
    connection.close()
