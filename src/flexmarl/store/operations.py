"""The order of a store's operations: one at a time, and those that wait for a turn are written together.

A process that does nothing but own a store runs them in its event loop's thread: handing each to another thread and
back costs more than most of them do.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flexmarl.core.errors import InvariantError
from flexmarl.store import steps
from flexmarl.store.faults import translated
from flexmarl.store.index import Index

T = TypeVar("T")


class BlockingCall(Protocol):
    """`Runtime.call`: runs a blocking function off the event loop, one at a time, in order."""

    async def __call__(self, function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
        """Return `function(*args)`."""
        ...


DURABLE_OPERATIONS = frozenset({steps.open_step, steps.extend_step, steps.commit, steps.rewind, steps.prune})
"""Those that survive power loss; each is written alone."""
MAX_BATCH = 256
"""Operations written together; bounds the time until the first of them is answered."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """One call that waits for its turn."""

    function: Callable[..., Any]
    args: tuple[object, ...]
    done: asyncio.Future[Any]

    def settle(self, error: Exception | None, result: Any) -> None:
        """Answer, unless nobody waits any more."""
        if self.done.cancelled():
            return
        if error is None:
            self.done.set_result(result)
        else:
            self.done.set_exception(error)


class OperationQueue:
    """Runs blocking functions of an index, one at a time in order (group commit)."""

    def __init__(self, index: Index, call: BlockingCall | None) -> None:
        """Work on an opened index through `call`; without one, in the event loop's thread, which it holds up."""
        self._index: Index | None = index
        self._call = call
        self._waiting: deque[_Operation] = deque()
        self._writer: asyncio.Task[None] | asyncio.Handle | None = None
        """Of the operations that wait."""

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Run an operation in its turn; those that wait together are written together (group commit)."""
        result: T = await self._start(function, *args)
        return result

    def _start(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Do the same; the operation has its turn from now on, whether or not somebody awaits the result."""
        loop = asyncio.get_running_loop()
        operation = _Operation(function, args, loop.create_future())
        self._waiting.append(operation)
        if self._writer is None:
            # Not at once: what arrives together is written together.
            self._writer = (
                loop.call_soon(self._write_here)
                if self._call is None
                else loop.create_task(self._write(self._call), name="store")
            )
        return operation.done

    async def _finish(self) -> None:
        """Return when nothing waits."""
        if isinstance(self._writer, asyncio.Task):
            await asyncio.wait([self._writer])
        while self._waiting:
            self._write_here()

    def _write_here(self) -> None:
        if self._waiting:
            batch = self._next_batch()
            self._settle(batch, self._run_batch(batch))
        self._writer = asyncio.get_running_loop().call_soon(self._write_here) if self._waiting else None

    def _settle(self, batch: list[_Operation], outcomes: list[tuple[Exception | None, Any]]) -> None:
        for operation, (error, result) in zip(batch, outcomes, strict=True):
            operation.settle(error, result)
        self._after_batch()

    async def _write(self, call: BlockingCall) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    outcomes = await call(self._run_batch, batch)
                except Exception as refused:  # noqa: BLE001 (the runtime is closed: tell who waits)
                    outcomes = [(refused, None)] * len(batch)
                self._settle(batch, outcomes)
        finally:
            self._writer = None

    def _next_batch(self) -> list[_Operation]:
        batch = [self._waiting.popleft()]
        while (
            self._waiting
            and len(batch) < MAX_BATCH
            and not {batch[-1].function, self._waiting[0].function} & DURABLE_OPERATIONS
        ):
            batch.append(self._waiting.popleft())
        return batch

    def _run_batch(self, batch: list[_Operation]) -> list[tuple[Exception | None, Any]]:
        """Return the error or the result of each operation; what fails alone does not undo the others."""
        index = self._index
        if index is None:
            return [(InvariantError(f"the store was closed before {each.function.__name__}"), None) for each in batch]
        try:
            if len(batch) == 1:
                with translated(index.database.name):
                    return [(None, batch[0].function(index, *batch[0].args))]
            with translated(index.database.name), index.database.group():
                return [self._run_grouped(index, operation) for operation in batch]
        except Exception as error:  # noqa: BLE001 (passed on to whoever waits for it)
            index.forget_unwritten_tables()
            return [(error, None)] * len(batch)

    def _run_grouped(self, index: Index, operation: _Operation) -> tuple[Exception | None, Any]:
        try:
            with translated(index.database.name):
                return None, operation.function(index, *operation.args)
        except Exception as error:
            if not index.connection.in_transaction:
                raise  # the whole group is gone
            return error, None

    def _after_batch(self) -> None:
        """Do what follows from operations that have just been written; none runs at this moment."""
