"""An asyncio event loop whose time jumps to the next timer.

Invariants:
- Timers fire in the order of (time, insertion), exactly at their time; real time plays no part.
- When nothing can happen any more, the loop raises VirtualDeadlock instead of waiting for ever.

It serves no sockets, and threads cannot wake it: what blocks does not belong under virtual time.
"""

import asyncio
import contextvars
import math
import selectors
from collections.abc import Callable
from typing import Any, Self, TypeVarTuple, Unpack

from flexmarl.core.errors import InvariantError

Ts = TypeVarTuple("Ts")


class VirtualDeadlock(InvariantError):
    """Every task waits for something that no timer and no callback can bring about."""


class _Instant(float):
    """A time with the number of its timer, so that equal times keep the order of insertion in a heap."""

    __slots__ = ("number",)
    number: int

    def __new__(cls, time_s: float, number: int) -> Self:
        instant = super().__new__(cls, time_s)
        instant.number = number
        return instant

    def __lt__(self, other: float) -> bool:
        if isinstance(other, _Instant) and float.__eq__(self, other):
            return self.number < other.number
        return float.__lt__(self, other)


class _JumpingSelector(selectors.SelectSelector):
    """Lets the loop's time jump instead of waiting."""

    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock(self.loop.describe_deadlock())
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at time 0."""

    def __init__(self) -> None:
        """Make a loop that is its own clock."""
        self._now_s = 0.0
        self._num_timers = 0
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self._set_now(0.0)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback; among equal times the one scheduled first runs first."""
        self._num_timers += 1
        return super().call_at(_Instant(when, self._num_timers), callback, *args, context=context)

    def jump(self) -> None:
        """Move to the time of the next timer."""
        # The loop tells its selector a duration. Adding that to the present would round; the timer knows its time.
        self._set_now(float(self._scheduled[0].when()))  # type: ignore[attr-defined]

    def _set_now(self, now_s: float) -> None:
        self._now_s = now_s
        # The loop runs timers earlier than now + resolution: with the next float, those at `now_s` and none after it.
        self._clock_resolution = math.ulp(now_s)

    def describe_deadlock(self) -> str:
        """Return which tasks wait, and where."""
        waiting = sorted(f"{task.get_name()} at {_location(task)}" for task in asyncio.all_tasks(self))
        return (
            f"deadlock at virtual time {self._now_s:g} s: no timer is set and nothing is ready, but "
            f"{len(waiting)} tasks wait: {'; '.join(waiting)}"
        )


def _location(task: "asyncio.Task[Any]") -> str:
    """Return `file:line` of the innermost coroutine that the task waits in."""
    coroutine: Any = task.get_coro()
    while getattr(getattr(coroutine, "cr_await", None), "cr_frame", None) is not None:
        coroutine = coroutine.cr_await
    frame = getattr(coroutine, "cr_frame", None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its end"
