"""The run-owned folder in which the objects of a run lie: made at its start, removed at its end or by the next run.

Standard library only: the fork server, which never imports torch, removes it when the orchestrator has died.
"""

import os
import re
import shutil
from pathlib import Path

from flexmarl.core.errors import ConfigError, StoreError

SHARED_MEMORY = Path("/dev/shm")
MARKER = "flexmarl-objects"
"""A file in every run folder: `remove_run_folder` deletes nothing that does not hold it."""
NEEDED_BYTES = 256 * 1024 * 1024


def create_run_folder(run_id: str, run_dir: Path, *, needed_bytes: int = NEEDED_BYTES) -> Path:
    """Make the folder for a run's objects and return it, readable by this user only.

    It lies in shared memory (`/dev/shm/flexmarl-<uid>-<run_id>`) where that can be written and has `needed_bytes` free,
    else it is `run_dir/objects`. The default is the smallest room in which a run of small models does not run dry.

    Raises:
        ConfigError: `run_id` has characters that do not belong into a file name.
        StoreError: the folder exists: a run with this id lives, or died without being cleaned up.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        raise ConfigError(f"run_id is {run_id!r}; expected letters, digits, dots, hyphens and underscores")
    folder = _shared_folder(run_id)
    if not _has_room(SHARED_MEMORY, needed_bytes):
        folder = run_dir / "objects"
        run_dir.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
        (folder / MARKER).touch(mode=0o600)
    except FileExistsError as error:
        raise StoreError(
            f"the object folder {folder} exists: another process of this run is alive, or one was killed; "
            "end it, or remove the folder"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot make the object folder {folder}: {error}") from error
    return folder


def remove_run_folder(folder: Path) -> None:
    """Delete a run's objects; who still maps one keeps it until it lets go. A folder that is gone is fine.

    Raises:
        StoreError: `folder` is not an object folder, or cannot be deleted.
    """
    if not folder.exists():
        return
    if not (folder / MARKER).exists():
        raise StoreError(f"{folder} is not removed: it holds no file {MARKER}, so no run has made it for its objects")
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        # Two removers met (the run's own end and a reaper): what one of them misses the other has deleted.
        shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"cannot remove the object folder {folder}: {error}") from error


def list_run_folders() -> list[Path]:
    """Return the object folders of this user in shared memory, by name: those of live runs, and leaks."""
    if not SHARED_MEMORY.is_dir():
        return []
    prefix = _shared_folder("").name
    return sorted(path for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefix) and path.is_dir())


def _shared_folder(run_id: str) -> Path:
    return SHARED_MEMORY / f"flexmarl-{os.getuid()}-{run_id}"


def _has_room(root: Path, needed_bytes: int) -> bool:
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        return False
    return free_bytes(root) >= needed_bytes


def free_bytes(folder: Path) -> int:
    """Return how much the user may still write in the file system of `folder`."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
