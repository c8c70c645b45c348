"""Notices that somebody has stopped giving signs of life.

Silence is counted in checks of this process, not in elapsed time: after it was itself stopped or blocked, what others
have sent meanwhile is still in their sockets, and nobody is to be taken for dead.
"""

import asyncio
from collections.abc import Callable

CHECKS_PER_TIMEOUT = 5


class SilenceWatch:
    """Calls back once, after `timeout_s` without a sign."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        has_spoken: Callable[[], bool],
        on_silent: Callable[[str], None],
    ) -> None:
        """Watch from now on; `has_spoken` says whether there was a sign since it was last asked."""
        self._loop = loop
        self._timeout_s = timeout_s
        self._has_spoken = has_spoken
        self._on_silent = on_silent
        self._num_silent_checks = 0
        self._schedule()

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._check)

    def _check(self) -> None:
        self._num_silent_checks = 0 if self._has_spoken() else self._num_silent_checks + 1
        # The first silent check covers a span that began with a sign of life, hence one more than the timeout holds.
        if self._num_silent_checks > CHECKS_PER_TIMEOUT:
            self._on_silent(f"no heartbeat for {self._timeout_s:g} s")
        else:
            self._schedule()
