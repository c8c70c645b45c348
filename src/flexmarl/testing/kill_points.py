"""The command line in a process that disturbs itself, or one of its workers, at a chosen point.

    python -m flexmarl.testing.kill_points PLAN train CONFIG ...

PLAN is a sequence of WHENs and ACTIONs, joined by ` then `, that begins with a WHEN. Each WHEN is counted from the
moment at which the one before it was reached; the ACTIONs behind it follow at once. Without any it is
`kill orchestrator`.

| WHEN                  | is reached as                                                                     |
| --------------------- | --------------------------------------------------------------------------------- |
| `event:KIND/TEXT:N`   | the N-th event of this kind (`*`: of any), counted from 1, is about to be logged  |
| `send:KIND/TEXT:N`    | the N-th command of this kind has been sent to a worker                           |
| `AUDIT:TEXT:N`        | the N-th audit event `open`, `os.rename`, `os.mkdir` or `shutil.rmtree` with TEXT |
|                       | in its first path is about to happen                                              |

`/TEXT` may be missing; it must be in the worker's id, a space, and the record as `repr` shows it.

| ACTION              | does                                   |
| ------------------- | -------------------------------------- |
| `kill ROLE`         | SIGKILL                                |
| `stop ROLE SECONDS` | SIGSTOP, and SIGCONT so much later     |

ROLE is `orchestrator`, `fork_server`, what a worker's id begins with (`trainer-wr`), `sender` (the worker of the event
or command), or `writer` (the worker that wrote the newest object). Each action says on stderr what it did.
"""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from flexmarl.cli.commands import app
from flexmarl.core.codec import kind_of
from flexmarl.core.messages import CacheSealed, StatePublished, UpdateApplied
from flexmarl.runtime.supervised import SupervisedWorker
from flexmarl.telemetry import EventLog

_SOURCES = ("event", "send", "open", "os.rename", "os.mkdir", "shutil.rmtree")


@dataclass(slots=True)
class When:
    """One point of a plan."""

    source: str
    kind: str
    """Of a record; empty for audit events."""
    text: str
    num_left: int

    @classmethod
    def parse(cls, part: str) -> "When":
        """Read `SOURCE:WHAT:N`."""
        source, what, count = part.split(":")
        if source not in _SOURCES:
            raise ValueError(f"{part!r}: expected one of {', '.join(_SOURCES)} before the first colon")
        kind, _, text = what.partition("/") if source in ("event", "send") else ("", "", what)
        return cls(source=source, kind=kind, text=text, num_left=int(count))

    def is_reached_by(self, source: str, kind: str, text: str) -> bool:
        """Count a happening when it is of this sort; say whether it is the last one."""
        if source != self.source or (self.kind not in ("*", kind)) or self.text not in text:
            return False
        self.num_left -= 1
        return self.num_left == 0


class Plan:
    """Waits for its points, one after the other, and acts at those that have actions."""

    def __init__(self, text: str) -> None:
        """Read a plan; see the module."""
        parts = text.split(" then ")
        if all(":" in part for part in parts):
            parts.append("kill orchestrator")
        self._points: list[tuple[When, list[list[str]]]] = []
        for part in parts:
            if ":" in part:
                self._points.append((When.parse(part), []))
            else:
                self._points[-1][1].append(part.split())
        self._writer = ""
        self._lock = threading.RLock()

    def install(self) -> None:
        """Watch what is logged, sent and opened in this process from now on."""
        emit, send = EventLog.emit, SupervisedWorker.send

        def watched_emit(log: EventLog, record: object, *, source: str = "orchestrator") -> int:
            self._see("event", record, source)
            if isinstance(record, StatePublished | CacheSealed | UpdateApplied):
                self._writer = source
            return emit(log, record, source=source)

        def watched_send(worker: SupervisedWorker, message: object) -> None:
            send(worker, message)
            self._see("send", message, worker.worker_id)

        def watch_audit(name: str, arguments: tuple[object, ...]) -> None:
            if self._is_next(name):
                self._happened(name, "", str(arguments[0]), "")

        setattr(EventLog, "emit", watched_emit)  # noqa: B010 (mypy refuses the plain assignment)
        setattr(SupervisedWorker, "send", watched_send)  # noqa: B010
        sys.addaudithook(watch_audit)

    def _see(self, source: str, record: object, worker: str) -> None:
        if self._is_next(source):
            self._happened(source, kind_of(record), f"{worker} {record}", worker)

    def _is_next(self, source: str) -> bool:
        return bool(self._points) and self._points[0][0].source == source

    def _happened(self, source: str, kind: str, text: str, worker: str) -> None:
        with self._lock:
            if not (self._points and self._points[0][0].is_reached_by(source, kind, text)):
                return
            _, actions = self._points.pop(0)
            for action, role, *delay_s in actions:
                self._act(action, {"sender": worker, "writer": self._writer}.get(role, role), *delay_s)

    @staticmethod
    def _act(action: str, name: str, delay_s: str = "") -> None:
        pid = os.getpid() if name == "orchestrator" else worker_pid(name)
        if pid is None:
            sys.stderr.write(f"kill point: there is no process {name!r}\n")
            return
        sys.stderr.write(f"kill point: {action} {name} ({pid})\n")
        sys.stderr.flush()
        if action == "stop":
            # In a process of its own: this one may be what is stopped.
            subprocess.Popen(["/bin/sh", "-c", f"sleep {delay_s}; kill -CONT {pid}"], stderr=subprocess.DEVNULL)
        os.kill(pid, signal.SIGSTOP if action == "stop" else signal.SIGKILL)


def worker_pid(name: str) -> int | None:
    """Return the id of a live descendant of this process that is named `fm:NAME...`; the youngest of several."""
    start = f"fm:{name}"[:15]  # the kernel cuts names
    processes = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    found = [pid for pid, (comm, _, _) in processes.items() if comm.startswith(start) and _descends(pid, processes)]
    return max(found, key=lambda pid: processes[pid][2], default=None)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return name, parent and start time of a process, or None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return None if fields[0] in ("Z", "X") else (head.partition("(")[2], int(fields[1]), int(fields[19]))


def _descends(pid: int, processes: dict[int, tuple[str, int, int]]) -> bool:
    while pid in processes and pid != os.getpid():
        pid = processes[pid][1]
    return pid == os.getpid()


def main(argv: list[str]) -> None:
    """Run `flexmarl argv[1:]` with a plan."""
    Plan(argv[0]).install()
    app(prog_name="flexmarl", args=argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
