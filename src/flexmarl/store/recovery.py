"""Opening a store, whatever happened to the process that had it before.

After SIGKILL nothing that returned is missing: leases of the dead process are released, and bytes behind the last row's
payload (a turn that was being written) are cut off. After power loss the newest index may point to payloads that never
reached the disk. That can only be in steps without a commit, since a commit syncs all payloads before it: the store
goes back to the first step that lost a payload, and that step runs again.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from flexmarl.core.errors import StoreError
from flexmarl.store.database import Database, FolderLock
from flexmarl.store.faults import translated
from flexmarl.store.index import Index
from flexmarl.store.leases import release_leases
from flexmarl.store.payload import DiskBytes, MemoryBytes, PayloadLog
from flexmarl.store.schema import read_meta, write_meta
from flexmarl.store.steps import forget_steps, payload_end

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What opening a store had to mend; all zero after an orderly close."""

    num_released_rows: int = 0
    """Rows whose holder died with the previous process, ready again."""
    num_torn_bytes: int = 0
    """Bytes of the payload file that belonged to no row."""
    num_lost_rows: int = 0
    """Rows whose payload was lost with power."""
    rewound_to_step: int | None = None
    """The first step that was forgotten because of lost rows."""


def open_in_memory() -> Index:
    """Return an empty store that ends with the process."""
    return Index(Database(None), PayloadLog(MemoryBytes()))


def open_folder(folder: Path) -> tuple[Index, FolderLock, RecoveryReport]:
    """Open a store in `folder`, or create it, and mend what its last process left behind.

    Raises:
        StoreError: the folder is in use, not writable, damaged, or written by newer code.
    """
    with translated(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        index = _open_files(folder)
    except BaseException:
        lock.release()
        raise
    try:
        with translated(index.database.name):
            report = recover(index)
        _sync_folder(folder)
    except BaseException:
        index.close()
        lock.release()
        raise
    return index, lock, report


def _open_files(folder: Path) -> Index:
    database = Database(folder / "index.db")
    try:
        with translated(database.name):
            return Index(database, PayloadLog(DiskBytes(folder / "payload.bin")))
    except BaseException:
        database.close()
        raise


def _sync_folder(folder: Path) -> None:
    """Make the names of the files as durable as their content."""
    with translated(str(folder)):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def recover(index: Index) -> RecoveryReport:
    """Mend the store after its last process died, and say what was mended.

    Raises:
        StoreError: the payload file lost bytes that a commit had synced.
    """
    lost_steps = _lost_steps(index)
    rewound_to_step = min(lost_steps, default=None)
    with index.durable_transaction() as connection:
        if rewound_to_step is not None:
            forget_steps(index, connection, rewound_to_step)
        write_meta(connection, "payload_synced_bytes", payload_end(index))
        num_released_rows = len(release_leases(index, connection, None))
    report = RecoveryReport(
        num_released_rows=num_released_rows,
        num_torn_bytes=index.payload.truncate(payload_end(index)),
        num_lost_rows=len(lost_steps),
        rewound_to_step=rewound_to_step,
    )
    if report != RecoveryReport():
        level = logging.INFO if rewound_to_step is None else logging.WARNING
        logger.log(level, "%s: mended after its last process died: %s", index.database.name, report)
    return report


def _lost_steps(index: Index) -> list[int]:
    """Return the step of every row whose payload is not intact behind what was synced."""
    synced_bytes = read_meta(index.connection, "payload_synced_bytes")
    if index.payload.num_bytes < synced_bytes:
        raise StoreError(
            f"{index.payload.name} has {index.payload.num_bytes} bytes, its index had synced {synced_bytes}: "
            "restore the file, or choose another run.dir"
        )
    lost = [
        step
        for table in index.tables.values()
        for step, slot in table.slots_behind(synced_bytes)
        if not index.payload.is_intact(slot)
    ]
    newest = index.connection.execute("SELECT max(step) FROM commits").fetchone()[0]
    if lost and newest is not None and min(lost) <= newest:
        raise StoreError(
            f"{index.payload.name} has lost payloads of the committed step {min(lost)}: "
            "restore the file, or choose another run.dir"
        )
    return lost
