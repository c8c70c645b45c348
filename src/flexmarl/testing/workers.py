"""Small services for tests of the runtimes, and a recorder of their facts.

Every factory runs the same under `local` processes, inline threads and virtual time.
"""

import asyncio
import importlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flexmarl.core.codec import tagged
from flexmarl.core.ids import ObjectKey, WorkerId
from flexmarl.core.messages import WorkerExited, WorkerReady
from flexmarl.core.protocols import ServiceKind, ServiceStep, WorkerContext, WorkerSpec

F = TypeVar("F")


@tagged("test_note")
@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A message with a text, a number and content."""

    text: str
    number: int = 0
    content: bytes = b""


class FactLog:
    """An `on_fact` that keeps what arrives and lets a test wait for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Stamp each fact with `clock`."""
        self._clock = clock
        self.facts: list[tuple[WorkerId, object]] = []
        self.times_s: list[float] = []
        self._changed = asyncio.Event()

    def __call__(self, worker_id: WorkerId, fact: object) -> None:
        """Take a fact."""
        self.facts.append((worker_id, fact))
        self.times_s.append(self._clock())
        self._changed.set()

    def of(self, worker_id: str) -> list[object]:
        """Return the facts of one worker, in order."""
        return [fact for source, fact in self.facts if source == worker_id]

    def notes(self, worker_id: str) -> list[Note]:
        """Return the notes of one worker, in order."""
        return [fact for fact in self.of(worker_id) if isinstance(fact, Note)]

    async def wait_for(self, worker_id: str, kind: type[F], *, count: int = 1, timeout_s: float = 15.0) -> list[F]:
        """Wait until a worker has sent `count` facts of a kind and return them; fail with what came instead."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(found := [fact for fact in self.of(worker_id) if isinstance(fact, kind)]) < count:
                    self._changed.clear()
                    await self._changed.wait()
                return found
        except TimeoutError:
            came = [type(fact).__name__ for fact in self.of(worker_id)]
            raise AssertionError(f"{worker_id}: no {count} {kind.__name__} within {timeout_s} s, but {came}") from None

    async def wait_until_ready(self, worker_id: str) -> WorkerReady:
        """Wait for WorkerReady."""
        return (await self.wait_for(worker_id, WorkerReady))[0]

    async def wait_until_exited(self, worker_id: str, *, timeout_s: float = 15.0) -> WorkerExited:
        """Wait for WorkerExited."""
        return (await self.wait_for(worker_id, WorkerExited, timeout_s=timeout_s))[0]


def script_spec(worker_id: str = "worker", **options: Any) -> WorkerSpec:
    """Return the spec of a `ScriptService`."""
    return WorkerSpec(
        worker_id=WorkerId(worker_id),
        kind=ServiceKind.INSTANCE,
        factory="flexmarl.testing.workers:make_script_service",
        options=options,
    )


def episode_spec(worker_id: str = "episodes", *, is_process: bool = False, **options: Any) -> WorkerSpec:
    """Return the spec of a `ScriptEpisodeService`."""
    return WorkerSpec(
        worker_id=WorkerId(worker_id),
        kind=ServiceKind.EPISODE_WORKER,
        factory="flexmarl.testing.workers:make_episode_service",
        options=options,
        is_process=is_process,
    )


def make_script_service(context: WorkerContext, options: Mapping[str, Any]) -> "ScriptService":
    """Build a `ScriptService`; options `start_s` and `start_error` delay or fail it, `cost_s` costs each answer."""
    time.sleep(options.get("start_s", 0.0))
    if "start_error" in options:
        raise ValueError(options["start_error"])
    return ScriptService(context, cost_s=options.get("cost_s", 0.0), close_error=options.get("close_error"))


class ScriptService:
    """Does what notes say, one per step. `echo` is answered with the same note, others in `_act`."""

    def __init__(self, context: WorkerContext, *, cost_s: float, close_error: str | None) -> None:
        """Start with nothing to do."""
        self._context = context
        self._cost_s = cost_s
        self._close_error = close_error
        self._notes: deque[Note] = deque()

    def handle(self, message: object) -> None:
        """Queue a note."""
        assert isinstance(message, Note)
        self._notes.append(message)

    def step(self) -> ServiceStep | None:
        """Act on the oldest note."""
        if not self._notes:
            return None
        note = self._notes.popleft()
        return ServiceStep(messages=self._act(note), cost_s=self._cost_s)

    def _act(self, note: Note) -> tuple[Note, ...]:
        match note.text:
            case "echo":
                return (note,)
            case "twice":
                return (note, note)
            case "queued":
                return (Note(text="queued", number=len(self._notes)),)
            case "fail":
                raise ValueError("asked to fail")
            case "exit":
                raise SystemExit(note.number)
            case "sleep":
                time.sleep(note.number / 1000)
            case "compute":
                self._context.send(Note(text="computing"))
                _compute_for_ever()
            case "send":
                self._context.send(note)
            case "spawn":
                return (Note(text="spawned", number=_spawn_helper(own_session=bool(note.number))),)
            case "environment":
                return (Note(text=os.environ.get(note.content.decode(), "")),)
            case "threads":
                return (Note(text="threads", number=threading.active_count()),)
            case "object":
                kind, owner, version = note.content.decode().split("/")
                packed = self._context.objects.packed(ObjectKey(kind=kind, owner=owner, version=int(version)))
                return (Note(text="object", content=bytes(packed.bytes_of("a"))),)
            case "torch":
                return (Note(text="torch", content=_torch_sum().encode()),)
            case other:
                raise AssertionError(f"no such note: {other}")
        return ()

    def close(self) -> None:
        """Say so in the log; fail when told to."""
        print("closed", flush=True)  # noqa: T201 (a worker's output is its log)
        if self._close_error is not None:
            raise RuntimeError(self._close_error)


def _compute_for_ever() -> None:
    number = 0
    while True:
        number += 1


def _spawn_helper(*, own_session: bool) -> int:
    """Start a process that outlives its parent unless somebody ends it."""
    return subprocess.Popen(["sleep", "600"], start_new_session=own_session).pid


def _fork_sleeper() -> int:
    """Fork without an exec, as multiprocessing does: the child holds whatever this process has open."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def _torch_sum() -> str:
    import torch

    return f"{float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum())} {torch.get_num_threads()}"


def make_episode_service(context: WorkerContext, options: Mapping[str, Any]) -> "ScriptEpisodeService":
    """Build a `ScriptEpisodeService`; options `start_s` and `start_error` delay or fail it."""
    time.sleep(options.get("start_s", 0.0))
    if "start_error" in options:
        raise ValueError(options["start_error"])
    return ScriptEpisodeService(context)


class ScriptEpisodeService:
    """An async service that does what notes say, each in a task of its own."""

    def __init__(self, context: WorkerContext) -> None:
        """Start with nothing to do."""
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, message: object) -> None:
        """Start a note's task."""
        assert isinstance(message, Note)
        if message.text == "fail":
            raise ValueError("asked to fail")
        task = asyncio.get_running_loop().create_task(self._act(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _act(self, note: Note) -> None:
        match note.text:
            case "wait":
                await asyncio.sleep(note.number / 1000)
            case "block":
                time.sleep(note.number / 1000)  # noqa: ASYNC251 (the fault that the watchdog reports)
            case "thread":
                await asyncio.to_thread(time.sleep, note.number / 1000)
            case "exit":
                os._exit(note.number)
            case "stop_loop":
                asyncio.get_running_loop().stop()
            case "fork":
                note = Note(text="forked", number=_fork_sleeper())
            case "print":
                print("x" * note.number)  # noqa: T201 (a worker's output is its log)
            case "import":
                note = Note(text="import", number=importlib.import_module(note.content.decode()).PID)
            case "place":
                note = Note(text=json.dumps([sys.argv, sys.path, str(Path.cwd()), os.getpid()]))
            case "random":
                import numpy as np

                note = Note(text=f"{np.random.random()} {random.random()}")  # noqa: S311 (what users write)
            case "unwritable":
                note = Note(text="unwritable", number=2**70)
        self._context.send(note)

    async def close(self) -> None:
        """Say so in the log; cancel what runs."""
        print("closed", flush=True)  # noqa: T201
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
