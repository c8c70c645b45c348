"""One SQLite connection, its transactions, and the lock that makes this process its only owner."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexmarl.core.errors import StoreError
from flexmarl.store.faults import translated

BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for a tool that looks into the file; the owner itself never competes."""


_PAGE_BYTES = 1024
"""Of a new file."""
_LOG_BYTES = 16 * 2**20
"""The write-ahead log is moved into the file when it is longer, which waits for the disk."""
_CACHE_BYTES = 16 * 2**20


class FolderLock:
    """Keeps a second process out of a store's folder; the system frees it when this process ends in any way."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            StoreError: another process has it.
        """
        path = folder / "lock"
        with translated(str(path)):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A POSIX record lock: unlike flock, a forked child does not keep it when its parent is killed.
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise StoreError(
                f"{folder} is in use by process {owner or 'unknown'}: end that run, or choose another run.dir"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next process in."""
        os.close(self._fd)


class Database:
    """A connection in WAL mode whose transactions survive SIGKILL, and power loss where asked for."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or create it; None keeps everything in memory.

        Raises:
            StoreError: it cannot be opened, or is no SQLite file.
        """
        self.name = ":memory:" if path is None else str(path)
        self._is_grouped = False
        with translated(self.name):
            # Calls come one at a time, though not always from the same thread.
            self.connection = sqlite3.connect(
                self.name, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S, cached_statements=256
            )
            try:
                # A transaction of one row touches few bytes of several pages, each of which is written whole.
                self.connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
                self.connection.execute("PRAGMA journal_mode=WAL")
                self.connection.execute(f"PRAGMA wal_autocheckpoint={_LOG_BYTES // _PAGE_BYTES}")
                self.connection.execute(f"PRAGMA cache_size=-{_CACHE_BYTES // 1024}")
                self.connection.execute("PRAGMA synchronous=NORMAL")
            except sqlite3.Error:
                self.connection.close()
                raise

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """All or nothing: an exception rolls back. `durable` syncs the write-ahead log before it returns.

        Inside `group` it is written when the group ends.
        """
        if self._is_grouped:
            with self._savepoint():
                yield self.connection
            return
        if durable:
            self.connection.execute("PRAGMA synchronous=FULL")
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        finally:
            # Still open here only after an exception; SQLite itself may already have rolled back (full disk).
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if durable:
                self.connection.execute("PRAGMA synchronous=NORMAL")

    @contextmanager
    def group(self) -> Iterator[None]:
        """Put the transactions within the block into one: each is still all or nothing, and all are written together.

        An exception that leaves the block undoes all of them.
        """
        with self.transaction():
            self._is_grouped = True
            try:
                yield
            finally:
                self._is_grouped = False

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        self.connection.execute("SAVEPOINT one")
        try:
            yield
        except BaseException:
            # SQLite may have rolled back the whole group already (full disk).
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK TO one")
                self.connection.execute("RELEASE one")
            raise
        self.connection.execute("RELEASE one")

    def close(self) -> None:
        """Move the write-ahead log into the file and release both."""
        with translated(self.name):
            self.connection.close()
