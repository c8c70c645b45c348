"""SQLite's and the system's errors, translated where they enter."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from flexmarl.core.errors import InvariantError, StoreError

_FREE_SPACE = "the disk is full; free space and resume the run"
_MAKE_WRITABLE = "it cannot be written; make the run folder writable, or choose another run.dir"
_IN_USE = "another process has locked it; end that process, or choose another run.dir"
_DAMAGED = "the file is damaged; restore it, or choose another run.dir"
_DISK_FAILED = "reading or writing failed; check the disk (system log), then resume the run"

_SQLITE_FIXES = {
    sqlite3.SQLITE_FULL: _FREE_SPACE,
    sqlite3.SQLITE_READONLY: _MAKE_WRITABLE,
    sqlite3.SQLITE_CANTOPEN: _MAKE_WRITABLE,
    sqlite3.SQLITE_BUSY: _IN_USE,
    sqlite3.SQLITE_LOCKED: _IN_USE,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_IOERR: _DISK_FAILED,
}

_SYSTEM_FIXES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.EROFS: _MAKE_WRITABLE,
}


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Raise errors of SQLite and of the system as StoreError, naming the file and the fix.

    Raises:
        StoreError: the file cannot be read or written.
        InvariantError: a statement of ours is wrong, or the store was closed before.
    """
    try:
        yield
    except sqlite3.Error as error:
        # The low byte is the primary code; the rest says more of the same.
        fix = _SQLITE_FIXES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        if fix is None:
            raise InvariantError(f"{name}: {type(error).__name__}: {error}") from error
        raise StoreError(f"{name}: {error}: {fix}") from error
    except OSError as error:
        fix = _SYSTEM_FIXES.get(error.errno or 0, _DISK_FAILED)
        raise StoreError(f"{name}: {error.strerror}: {fix}") from error
