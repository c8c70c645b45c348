"""Opening a store, whatever happened to the process that had it before.

After SIGKILL nothing that returned is missing: leases of the dead process are released, sealed rows of steps without a
commit are ready again (their sealed caches were in its memory), and bytes behind the last row's payload (a turn that
was being written) are cut off. After power loss the newest index may point to payloads that never reached the disk.
That can only be in steps without a commit, since a commit syncs all payloads before it: the store goes back to the
first step that lost a payload, and that step runs again.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import PolicyName
from flexmarl.core.protocols import PolicyColumns
from flexmarl.store.bytes_file import DiskSegments, MemorySegments
from flexmarl.store.database import Database, FolderLock
from flexmarl.store.faults import translated
from flexmarl.store.index import Index
from flexmarl.store.leases import release_all
from flexmarl.store.payload import PayloadEnd
from flexmarl.store.schema import read_meta
from flexmarl.store.steps import forget_steps, load_segments, write_synced

Columns = Mapping[PolicyName, PolicyColumns] | None
"""What is declared per policy; None takes what the store has."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What opening a store had to mend; all zero after an orderly close."""

    num_released_rows: int = 0
    """Rows whose holder died with the previous process, ready again."""
    num_unsealed_rows: int = 0
    """Rows of seals that were in the memory of the previous process, ready again."""
    num_torn_bytes: int = 0
    """Bytes of payload files that belonged to no row."""
    num_lost_rows: int = 0
    """Rows whose payload was lost with power."""
    rewound_to_step: int | None = None
    """The first step that was forgotten because of lost rows."""


def open_in_memory(columns: Columns = None) -> Index:
    """Return an empty store that ends with the process."""
    return Index(Database(None), MemorySegments(), columns)


def open_folder(folder: Path, columns: Columns = None) -> tuple[Index, FolderLock, RecoveryReport]:
    """Open a store in `folder`, or create it, and mend what its last process left behind.

    Raises:
        StoreError: the folder is in use, not writable, damaged, written by other code, or has other columns.
    """
    with translated(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        index = _open_files(folder, columns)
    except BaseException:
        lock.release()
        raise
    try:
        with translated(index.database.name):
            report = recover(index)
        DiskSegments(folder).sync_names()
    except BaseException:
        index.close()
        lock.release()
        raise
    return index, lock, report


def _open_files(folder: Path, columns: Columns) -> Index:
    database = Database(folder / "index.db")
    try:
        with translated(database.name):
            return Index(database, DiskSegments(folder), columns)
    except BaseException:
        database.close()
        raise


def recover(index: Index) -> RecoveryReport:
    """Mend the store after its last process died, and say what was mended.

    Raises:
        StoreError: a payload file lost bytes that a commit had synced.
    """
    lost_steps = _lost_steps(index)
    rewound_to_step = min(lost_steps, default=None)
    with index.durable_transaction() as connection:
        if rewound_to_step is not None:
            forget_steps(index, connection, rewound_to_step)
        ends = load_segments(index)
        write_synced(index, connection, ends)
        num_released_rows, num_unsealed_rows = release_all(index, connection)
    report = RecoveryReport(
        num_released_rows=num_released_rows,
        num_unsealed_rows=num_unsealed_rows,
        num_torn_bytes=index.payload.trim(ends),
        num_lost_rows=len(lost_steps),
        rewound_to_step=rewound_to_step,
    )
    if report != RecoveryReport():
        level = logging.INFO if rewound_to_step is None else logging.WARNING
        logger.log(level, "%s: mended after its last process died: %s", index.database.name, report)
    return report


def _lost_steps(index: Index) -> list[int]:
    """Return the step of every record that is not intact behind what was synced."""
    payload = index.payload
    synced = PayloadEnd(
        read_meta(index.connection, "payload_synced_segment"), read_meta(index.connection, "payload_synced_bytes")
    )
    ends = {segment: end for segment, end in load_segments(index).items() if segment < synced.segment}
    for segment, end in {**ends, synced.segment: synced.num_bytes}.items():
        if payload.size_bytes(segment) < end:
            raise StoreError(
                f"{payload.segment_name(segment)} has {payload.size_bytes(segment)} bytes, its index had synced {end}: "
                "restore the file, or choose another run.dir"
            )
    lost = [
        step
        for table in index.tables.values()
        for step, slot in table.slots_behind(synced)
        if not payload.is_intact(slot)
    ]
    newest = index.connection.execute("SELECT max(step) FROM commits").fetchone()[0]
    if lost and newest is not None and min(lost) <= newest:
        raise StoreError(
            f"{payload.name} has lost payloads of the committed step {min(lost)}: "
            "restore the file, or choose another run.dir"
        )
    return lost
