"""Who runs here: one record per live local runtime of this user, so that a later run can clean up after a dead one.

Normally a record is removed by its run, or by the run's fork server when the run was killed. What is left when both
were killed at once is reaped by the next run. A process is known by its mark, and an orchestrator by its id *and* start
time, so a reused process id is never killed. Records of another boot or process namespace are left alone: what runs
there cannot be seen from here.
"""

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from flexmarl.core.errors import BackendError
from flexmarl.objects import remove_run_folder
from flexmarl.runtime.local.process_control import kill_marked, start_time_ticks

logger = logging.getLogger(__name__)

_REAP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one live runtime owns."""

    run_id: str
    run_dir: str
    pid: int
    """Of the orchestrator."""
    start_ticks: int
    """When the orchestrator started, in ticks since boot."""
    scope: str
    """The boot and the process namespace in which `pid` means something."""
    mark: str
    """Of the run's processes."""
    object_folder: str


def current_scope() -> str:
    """Return the name of this boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def new_record(*, run_id: str, run_dir: Path, mark: str, object_folder: Path) -> RunRecord:
    """Return the record of a runtime of this process."""
    return RunRecord(
        run_id=run_id,
        run_dir=str(run_dir.resolve()),
        pid=os.getpid(),
        start_ticks=start_time_ticks(os.getpid()) or 0,
        scope=current_scope(),
        mark=mark,
        object_folder=str(object_folder),
    )


def registry_folder() -> Path:
    """Return this user's folder of records, made private to the user.

    Raises:
        BackendError: it belongs to somebody else, whose records must not be acted on.
    """
    folder = Path(tempfile.gettempdir()) / f"flexmarl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BackendError(f"{folder} must belong to you alone (mode 700): remove it, or set TMPDIR")
    return folder


def register(record: RunRecord) -> Path:
    """Write the record and return its file."""
    path = registry_folder() / f"{record.mark}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
    temporary.replace(path)
    return path


def reap_stale() -> list[str]:
    """Kill and remove what dead runs of this user left. Returns the ids of the runs that were cleaned up after."""
    reaped = []
    scope = current_scope()
    for path in sorted(registry_folder().glob("*.json")):
        record = _read(path)
        if record is None or record.scope != scope or start_time_ticks(record.pid) == record.start_ticks:
            continue
        num_killed = kill_marked(record.mark, wait_s=_REAP_WAIT_S)
        remove_run_folder(Path(record.object_folder))
        path.unlink(missing_ok=True)
        logger.warning("cleaned up after run %s: %d processes, %s", record.run_id, num_killed, record.object_folder)
        reaped.append(record.run_id)
    return reaped


def _read(path: Path) -> RunRecord | None:
    try:
        return RunRecord(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None  # its run has just ended
    except (ValueError, TypeError) as error:
        logger.warning("ignoring %s, which is not a run record: %s", path, error)
        return None
