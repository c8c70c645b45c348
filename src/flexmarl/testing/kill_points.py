"""The command line in a process that kills itself at a chosen point.

    python -m flexmarl.testing.kill_points POINT train CONFIG ...

POINT is `event:KIND:N`: as the N-th event of this kind (`*`: of any), counted from 1, is about to be logged;
`event:work_done/TEXT:N` counts only work whose name begins so. Or it is `AUDIT:TEXT:N`: as the N-th audit event `open`,
`os.rename`, `os.mkdir` or `shutil.rmtree` with TEXT in its first path is about to happen.
"""

import os
import signal
import sys

from flexmarl.cli.commands import app
from flexmarl.core.codec import kind_of
from flexmarl.telemetry import EventLog


class _Countdown:
    def __init__(self, count: int) -> None:
        self._left = count

    def tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class _KillingLog:
    """Wraps `EventLog.emit`."""

    def __init__(self, kind: str, countdown: _Countdown) -> None:
        self._kind, _, self._prefix = kind.partition("/")
        self._countdown = countdown
        self._emit = EventLog.emit

    def install(self) -> None:
        def emit(log: EventLog, record: object, *, source: str = "orchestrator") -> int:
            if self._kind in ("*", kind_of(record)) and str(getattr(record, "name", "")).startswith(self._prefix):
                self._countdown.tick()
            return self._emit(log, record, source=source)

        setattr(EventLog, "emit", emit)  # noqa: B010 (mypy refuses the plain assignment)


def _install_audit(event: str, text: str, countdown: _Countdown) -> None:
    def hook(name: str, arguments: tuple[object, ...]) -> None:
        if name == event and text in str(arguments[0]):
            countdown.tick()

    sys.addaudithook(hook)


def main(argv: list[str]) -> None:
    """Run `flexmarl argv[1:]` with a point to die at."""
    source, what, count = argv[0].split(":")
    countdown = _Countdown(int(count))
    if source == "event":
        _KillingLog(what, countdown).install()
    else:
        _install_audit(source, what, countdown)
    app(prog_name="flexmarl", args=argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
