"""The one ordered inbox of a run."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from flexmarl.core.errors import FencedError
from flexmarl.core.messages import TimerFired, WorkDone
from flexmarl.core.protocols import EventSink, Timer

logger = logging.getLogger(__name__)

T = TypeVar("T")

ORCHESTRATOR = "orchestrator"


class OrderedInbox:
    """Implements `core.protocols.Inbox` on the running event loop.

    Facts are logged and handled in the order in which they were posted. `post` must be called on the loop.
    """

    def __init__(self, events: EventSink) -> None:
        """Log every handled fact to `events`."""
        self._events = events
        self._facts: deque[tuple[str, object, Callable[[], None]]] = deque()
        self._wake = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def post(self, source: str, fact: object, handler: Callable[[], None]) -> None:
        """Queue a fact; `handler` runs when its turn comes."""
        self._facts.append((source, fact, handler))
        self._wake.set()

    def start(
        self,
        name: str,
        work: Coroutine[Any, Any, T],
        then: Callable[[T], None],
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        """Run `work`; its end is a WorkDone fact whose handler is `then(result)`, after a FencedError `on_fenced`."""
        task = asyncio.get_running_loop().create_task(self._run(name, work, then, on_fenced or _nothing), name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        # A task that is cancelled before its first turn never awaits `work`, and Python would complain about it.
        task.add_done_callback(lambda _: work.close())

    async def _run(
        self, name: str, work: Coroutine[Any, Any, T], then: Callable[[T], None], on_fenced: Callable[[], None]
    ) -> None:
        try:
            result = await work
        except FencedError as error:
            logger.info("%s: %s", name, error)
            self.post(ORCHESTRATOR, WorkDone(name=name, error=str(error)), on_fenced)
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends the run through the dispatcher)
            caught = error
            self.post(ORCHESTRATOR, WorkDone(name=name, error=repr(error)), lambda: self.fail(caught))
        else:
            self.post(ORCHESTRATOR, WorkDone(name=name), lambda: then(result))

    def set_timer(self, name: str, delay_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` as the handler of a TimerFired fact after `delay_s`, unless cancelled before."""
        timer = _Timer()

        def fire() -> None:
            self.post(ORCHESTRATOR, TimerFired(name=name), lambda: None if timer.is_cancelled else handler())

        timer.handle = asyncio.get_running_loop().call_later(delay_s, fire)
        return timer

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one wins."""
        if self._error is None:
            self._error = error
        self._wake.set()

    async def run_until(self, is_done: Callable[[], bool]) -> None:
        """Handle facts until `is_done()` is true after one of them.

        Raises:
            BaseException: whatever `fail` was called with, or a handler raised.
        """
        while True:
            if self._error is not None:
                raise self._error
            if is_done():
                return
            if not self._facts:
                self._wake.clear()
                await self._wake.wait()
                continue
            source, fact, handler = self._facts.popleft()
            self._events.emit(fact, source=source)
            handler()

    async def close(self) -> None:
        """Cancel work that is still running and wait for it."""
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)


class _Timer:
    def __init__(self) -> None:
        self.handle: asyncio.TimerHandle | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.handle is not None:
            self.handle.cancel()


def _nothing() -> None:
    return None
