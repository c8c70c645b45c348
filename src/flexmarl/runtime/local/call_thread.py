"""One thread that runs blocking calls in order."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from flexmarl.core.errors import InvariantError

T = TypeVar("T")


class CallThread:
    """Runs what it is given, one at a time, in the order given.

    A call that was accepted always runs, also when its caller no longer waits: a write that is half told must not
    depend on who listens. The thread is a daemon, so that a call that never returns cannot keep the process alive.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="runtime calls", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function(*args)` returns, or raise what it raises."""
        if self._is_closed:
            raise InvariantError(f"call of {function!r} on a closed runtime")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(error: BaseException | None, result: Any) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def job() -> None:
            error: BaseException | None = None
            result: Any = None
            try:
                result = function(*args)
            except Exception as raised:  # noqa: BLE001 (passed on to the caller)
                error = raised
            # The loop may be gone by now, and with it whoever wanted to know.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, error, result)

        self._jobs.put(job)
        return await done

    async def close(self, timeout_s: float) -> bool:
        """Run what was accepted, then end the thread. Returns whether it ended in time."""
        if self._is_closed:
            return not self._thread.is_alive()
        loop = asyncio.get_running_loop()
        drained = loop.create_future()
        self._is_closed = True
        self._jobs.put(lambda: _set_from_thread(loop, drained))
        self._jobs.put(None)
        await asyncio.wait([drained], timeout=timeout_s)
        if drained.done():
            self._thread.join()  # it has only to leave its loop
        return drained.done()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _set_from_thread(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]") -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(future.set_result, None)
