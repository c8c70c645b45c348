"""The run folder: where everything that a run writes lies.

    config.yaml  metrics.jsonl  events.jsonl  trajectories.jsonl  summary.json  store/  checkpoints/  export/  run.lock

Invariant: one live run per folder. The lock is held by the open file, so it ends with the process, however that ends.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.telemetry.jsonl import write_atomically

LOCK_NAME = "run.lock"
_ORPHANS_END_S = 10.0
"""A dead run's workers hold its lock through inherited files; they end with it, but not in the same instant."""


def default_run_dir(name: str, *, now: time.struct_time | None = None) -> Path:
    """Return `runs/<name>-<time>`, with a number added when that exists."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', now or time.localtime())}"
    path = base
    number = 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


class RunFolder:
    """A locked run folder. Use `open`; close it when the run has ended."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        """Take over a locked folder; `open` makes one."""
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def open(
        cls, path: str | Path, *, name: str, resume: bool = False, sleep: Callable[[float], None] = time.sleep
    ) -> Self:
        """Create the folder, or with `resume` open that of an earlier run, and lock it.

        Raises:
            ConfigError: the folder is in use by a live run, holds other things, holds a run and `resume` is false, or
                holds none and `resume` is true.
            StoreError: it cannot be created or locked.
        """
        folder = Path(path).absolute()
        if not (folder / LOCK_NAME).exists():
            _check_content(folder, resume=resume)  # before anything is created in a folder that is not ours
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot create the run folder {folder}: {error}; choose another run.dir") from error
        try:
            _lock(lock_fd, folder, sleep)
            # Only now, so that a live run is named as such, and one that began a moment ago is seen.
            _check_content(folder, resume=resume)
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, json.dumps({"name": name, "pid": os.getpid()}).encode(), 0)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(folder, lock_fd)

    @property
    def events_path(self) -> Path:
        """The inbox and every decision."""
        return self.path / "events.jsonl"

    @property
    def metrics_path(self) -> Path:
        """A row per step."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories_path(self) -> Path:
        """Sampled trajectories."""
        return self.path / "trajectories.jsonl"

    @property
    def store_path(self) -> Path:
        """Folder of the experience store."""
        return self.path / "store"

    @property
    def checkpoints_path(self) -> Path:
        """Folder of `step_N` folders."""
        return self.path / "checkpoints"

    @property
    def export_path(self) -> Path:
        """Folder of one model folder per policy."""
        return self.path / "export"

    def write_config(self, resolved_yaml: str) -> None:
        """Write the resolved configuration, atomically."""
        write_atomically(self.path / "config.yaml", resolved_yaml)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, atomically; readers take a dot in a key's name for a nested object."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Give the folder free; a second call does nothing."""
        if self._lock_fd >= 0:
            # Workers may still hold the inherited file: unlock, do not only close.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        """Return the folder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the folder free."""
        self.close()


def _check_content(folder: Path, *, resume: bool) -> None:
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise ConfigError(f"run.dir={folder} is not a folder that can be read: {error}; choose another") from error
    is_run = LOCK_NAME in names and "config.yaml" in names
    if resume and not is_run:
        raise ConfigError(f"--resume: {folder} holds no run; set run.dir to the folder of a run, or drop --resume")
    if not resume and is_run:
        raise ConfigError(f"{folder} already holds a run: add --resume to go on with it, or choose another run.dir")
    if others := names - {LOCK_NAME} if not is_run else set():
        raise ConfigError(
            f"run.dir={folder} is not empty and not a run folder (it holds {min(others)}): choose another run.dir"
        )


def _lock(lock_fd: int, folder: Path, sleep: Callable[[float], None]) -> None:
    waited_s = 0.0
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreError(f"cannot lock the run folder {folder}: {error}; choose another run.dir") from error
        name, pid = _holder(lock_fd)
        if pid is None or _is_alive(pid) or waited_s >= _ORPHANS_END_S:
            if pid is None or _is_alive(pid):
                whose = f"run {name} (pid {pid or 'unknown'}): wait for it, stop it"
            else:
                left = ", ".join(map(str, _pids_with_open(folder / LOCK_NAME))) or "unknown"
                whose = f"processes that run {name} (pid {pid}, ended) left behind (pids {left}): end them"
            raise ConfigError(f"{folder} is in use by {whose}, or choose another run.dir")
        sleep(0.1)
        waited_s += 0.1


def _holder(lock_fd: int) -> tuple[str, int | None]:
    try:
        plain = json.loads(os.pread(lock_fd, 4096, 0))
        return str(plain["name"]), int(plain["pid"])
    except (ValueError, KeyError, TypeError):
        return "unknown", None


def _pids_with_open(path: Path) -> list[int]:
    """Return the processes that hold a file open: what a workflow forks inherits the lock."""
    pids = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(path):
                pids.add(int(link.parts[2]))
        except OSError:  # ended, or not ours
            continue
    return sorted(pids - {os.getpid()})


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
