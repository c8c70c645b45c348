"""Real processes in tests: open a runtime, look whether processes are gone."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flexmarl.config import RuntimeConfig
from flexmarl.runtime.local.process_control import start_time_ticks
from flexmarl.runtime.local.supervisor import LocalRuntime


@asynccontextmanager
async def local_runtime(run_dir: Path, *, preload: Sequence[str] = (), **settings: Any) -> AsyncIterator[LocalRuntime]:
    """Open a local runtime with `settings` of RuntimeConfig, and close it."""
    runtime = await LocalRuntime.open(run_dir, f"test-{uuid.uuid4().hex[:8]}", RuntimeConfig(**settings), preload)
    try:
        yield runtime
    finally:
        await runtime.close()


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return start_time_ticks(pid) is not None


async def wait_until_gone(pids: Iterable[int], *, timeout_s: float = 5.0) -> None:
    """Wait until none of the processes runs; fail with those that do."""
    deadline_s = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline_s:
            raise AssertionError(f"processes {left} still run after {timeout_s} s")
        await asyncio.sleep(0.02)
