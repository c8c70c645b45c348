"""What every started worker has in common, whatever hosts it and however time passes.

Invariants:
- Facts reach `on_fact` on the event loop, in order, never from inside a call of the handle.
- WorkerExited comes exactly once, last. Its reason is the first of: the error that ended the service, why the
  supervisor ended it, `asked` after a clean end that was asked for, how the process ended.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from flexmarl.config import RuntimeConfig
from flexmarl.core.ids import WorkerId
from flexmarl.core.messages import WorkerExited, WorkerReady
from flexmarl.core.protocols import WorkerSpec

logger = logging.getLogger(__name__)

KILLED = "signal SIGKILL"
CLEAN_END = "exit code 0"


class SupervisedWorker(ABC):
    """A started worker: its handle, its deadlines and its end."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        on_fact: Callable[[WorkerId, object], None],
        config: RuntimeConfig,
        loop: asyncio.AbstractEventLoop,
        on_over: Callable[["SupervisedWorker"], None],
    ) -> None:
        """Begin the time limit for WorkerReady. `on_over` is called after WorkerExited was delivered."""
        self.spec = spec
        self.config = config
        self.loop = loop
        self._on_fact = on_fact
        self._on_over = on_over
        self._is_asked = False
        self._is_over = False
        self._service_error: str | None = None
        self._forced_reason: str | None = None
        self._start_timer: asyncio.TimerHandle | None = loop.call_later(
            config.start_timeout_s, self.end_because, f"not ready within {config.start_timeout_s:g} s"
        )
        self._stop_timer: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = loop.create_future()
        """Done once WorkerExited was delivered."""

    @property
    def worker_id(self) -> WorkerId:
        """The id it was started with."""
        return self.spec.worker_id

    @property
    def pid(self) -> int | None:
        """Process id, once known; None for threads."""
        return None

    @property
    def is_over(self) -> bool:
        """Whether WorkerExited was delivered."""
        return self._is_over

    def send(self, message: object) -> None:
        """Send a command, in order, without waiting. To a worker that is gone it does nothing."""
        if not self._is_over:
            self._send(message)

    def stop(self) -> None:
        """Ask the worker to end; it is killed after `stop_timeout_s`."""
        if self._is_asked or self._is_over:
            return
        self._is_asked = True
        self._send_stop()
        timeout_s = self.config.stop_timeout_s
        self._stop_timer = self.loop.call_later(timeout_s, self.end_because, f"asked; killed after {timeout_s:g} s")

    def kill(self) -> None:
        """End the worker now."""
        self._is_asked = True
        self.end_because(KILLED)

    def end_because(self, reason: str) -> None:
        """End the worker now, for a reason that WorkerExited will give unless an earlier one stands."""
        if self._is_over:
            return
        if self._forced_reason is None:
            self._forced_reason = reason
            if not self._is_asked:
                logger.warning("worker %s: %s; ending it", self.worker_id, reason)
        self._end_now()

    def deliver(self, fact: object) -> None:
        """Pass a fact of the worker on."""
        if self._is_over:
            return
        if isinstance(fact, WorkerReady) and self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None
        self._on_fact(self.worker_id, fact)

    def note_error(self, reason: str) -> None:
        """Take the error that ended the service."""
        self._service_error = self._service_error or reason

    def finish(self, ending: str) -> None:
        """Deliver WorkerExited, once; `ending` says how the process or thread ended."""
        if self._is_over:
            return
        self._is_over = True
        for timer in (self._start_timer, self._stop_timer):
            if timer is not None:
                timer.cancel()
        if self._is_asked and ending == CLEAN_END:
            ending = "asked"
        reason = self._service_error or self._forced_reason or ending
        self._release()
        self._on_fact(self.worker_id, WorkerExited(reason=reason, is_expected=self._is_asked))
        self._on_over(self)
        self.over.set_result(None)

    @abstractmethod
    def _send(self, message: object) -> None: ...

    @abstractmethod
    def _send_stop(self) -> None: ...

    @abstractmethod
    def _end_now(self) -> None:
        """End the host; `finish` must follow, later and on the loop. May be called again."""

    @abstractmethod
    def _release(self) -> None:
        """Close what the handle holds of the connection."""
