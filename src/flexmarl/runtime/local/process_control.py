"""What Linux offers to keep processes together: death signals, process marks, process start times.

A run marks the environment of its fork server; every descendant inherits the mark, whatever process group or session it
moves to, and a process id that was given to another program in the meantime does not carry it.
"""

import ctypes
import os
import select
import signal
import time
from pathlib import Path
from typing import NoReturn

MARK_VARIABLE = "FLEXMARL_WORKERS_OF"
"""Environment variable of all processes of a fork server: `<run token>/<number of the fork server>`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies; end at once when that has happened already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show; the kernel keeps 15 bytes."""
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode(errors="replace")[:15]), 0, 0, 0)


def end_process_group() -> NoReturn:
    """End this process and those that it started, now."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # not reached: this process is in the group


def start_time_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when there is no such process (or a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def kill_marked(mark: str, *, wait_s: float = 0.0) -> int:
    """SIGKILL every process marked `mark` or `mark/...`, except this one. Returns how many there were.

    Waits up to `wait_s` for their end.
    """
    pidfds = []
    try:
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                pidfd = _open_if_marked(int(entry.name), mark)
                if pidfd is not None:
                    pidfds.append(pidfd)
        for pidfd in pidfds:
            _signal_pidfd(pidfd)
        _wait_for_end(pidfds, wait_s)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
    return len(pidfds)


def _open_if_marked(pid: int, mark: str) -> int | None:
    """Return a pidfd of a marked process. It is opened before the look at the mark, so the id cannot change hands."""
    if not _is_marked(pid, mark):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if _is_marked(pid, mark):
        return pidfd
    os.close(pidfd)
    return None


def _is_marked(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # ended, or another user's
    name = f"{MARK_VARIABLE}=".encode()
    marks = [entry.removeprefix(name).decode() for entry in environment.split(b"\0") if entry.startswith(name)]
    return any(each == mark or each.startswith(f"{mark}/") for each in marks)


def _signal_pidfd(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait_for_end(pidfds: list[int], wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
