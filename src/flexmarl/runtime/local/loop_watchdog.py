"""Says where user code holds an event loop for too long, once per blockage."""

import asyncio
import logging
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flexmarl.core.messages import LoopBlocked
from flexmarl.runtime.service_host import WorkerKilled

logger = logging.getLogger(__name__)

_CHECKS_PER_BLOCKAGE = 4


class LoopWatchdog:
    """Reports when an event loop makes no tick for `blocked_loop_s`, and where its thread is then.

    Time is counted in the watchdog's own checks, so that a process that was stopped as a whole reports nothing.
    """

    def __init__(
        self,
        thread_id: int,
        loop: asyncio.AbstractEventLoop,
        blocked_loop_s: float,
        report: Callable[[LoopBlocked], None],
    ) -> None:
        """Watch `loop`, which runs in the thread `thread_id`; `report` is called in the watchdog's thread."""
        self._thread_id = thread_id
        self._loop = loop
        self._interval_s = blocked_loop_s / _CHECKS_PER_BLOCKAGE
        self._report = report
        self._num_ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)

    def start(self) -> None:
        """Begin; called on the loop."""
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        """End; called on the loop, also when it was never started."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()  # it waits for nothing else

    def _tick(self) -> None:
        if not self._stopped.is_set():
            self._num_ticks += 1
            self._loop.call_later(self._interval_s / 2, self._tick)

    def _watch(self) -> None:
        num_ticks_seen = 0
        num_silent_checks = 0
        while not self._stopped.wait(min(self._interval_s, threading.TIMEOUT_MAX)):
            if self._num_ticks != num_ticks_seen:
                num_ticks_seen = self._num_ticks
                num_silent_checks = 0
                continue
            num_silent_checks += 1
            if num_silent_checks == _CHECKS_PER_BLOCKAGE:
                self._report_blockage(num_silent_checks * self._interval_s)

    def _report_blockage(self, duration_s: float) -> None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        location = user_location(frame)
        logger.warning("the event loop of the workflows is blocked at %s", location)
        try:
            self._report(LoopBlocked(duration_s=duration_s, location=location))
        except WorkerKilled:
            self._stopped.set()


def user_location(frame: FrameType) -> str:
    """Return `file:line` of the innermost frame outside the standard library and installed packages, if there is one.

    A call that blocks usually sits some frames below the line that its author can change.
    """
    library_folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    candidate: FrameType | None = frame
    while candidate is not None:
        path = candidate.f_code.co_filename
        is_library = path.startswith("<") or any(Path(path).is_relative_to(folder) for folder in library_folders)
        if not is_library:
            return f"{path}:{candidate.f_lineno}"
        candidate = candidate.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
