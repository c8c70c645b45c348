"""`LocalRuntime`: the orchestrator here, instances, process groups and episode workers in processes of their own.

Episode workers may be threads instead; under `runtime.inline` all are.

What keeps a run from leaving anything behind (promise G7):
- a worker dies with its fork server (death signal) and with the orchestrator (its socket's other end);
- the fork server outlives a killed orchestrator just long enough to kill the run's processes and remove its objects;
- whatever survives both is found by the next run through the registry.
"""

import asyncio
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from flexmarl.config import RuntimeConfig
from flexmarl.core.codec import to_plain
from flexmarl.core.errors import ConfigError, InvariantError
from flexmarl.core.ids import WorkerId
from flexmarl.core.protocols import ServiceKind, WorkerSpec
from flexmarl.objects import HostObjectPlane, create_run_folder, remove_run_folder
from flexmarl.runtime.clock import MonotonicClock
from flexmarl.runtime.local import registry
from flexmarl.runtime.local.call_thread import CallThread
from flexmarl.runtime.local.episode_thread import EpisodeThread
from flexmarl.runtime.local.fork_client import ForkServerClient, ForkServerSettings
from flexmarl.runtime.local.process_control import kill_marked
from flexmarl.runtime.local.process_worker import KILL_GRACE_S, ProcessWorker
from flexmarl.runtime.local.thread_worker import ThreadWorker
from flexmarl.runtime.supervised import SupervisedWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALLS_TIMEOUT_S = 30.0
"""Accepted calls (writes of the store) may take this long when the runtime closes."""
_THREADS_TIMEOUT_S = 0.5
"""Threads of ended workers have only their last lines to run; one that user code blocks is left, as a daemon."""


class LocalRuntime:
    """The supervisor of one run; use it on the event loop that opened it, and close it."""

    def __init__(
        self,
        *,
        run_dir: Path,
        config: RuntimeConfig,
        preload: Sequence[str],
        mark: str,
        object_folder: Path,
        record_path: Path,
        calls: CallThread,
    ) -> None:
        """Take over what `open` has prepared."""
        self._run_dir = run_dir
        self._config = config
        self._preload = tuple(preload)
        self._mark = mark
        self._object_folder = object_folder
        self._record_path = record_path
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._clock = MonotonicClock()
        self._objects = HostObjectPlane(object_folder)
        self._workers: dict[WorkerId, SupervisedWorker] = {}
        self._threads: list[threading.Thread] = []
        self._server: ForkServerClient | None = None
        self._num_servers = 0
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, run_dir: Path, run_id: str, config: RuntimeConfig, preload: Sequence[str] = ()) -> Self:
        """Clean up after dead runs, make the run's object folder, and start the fork server.

        The fork server imports the modules `preload` while this process goes on; workers may be started at once.

        Raises:
            ConfigError: this system cannot run worker processes.
        """
        if not config.inline and not hasattr(os, "pidfd_open"):
            raise ConfigError("runtime.kind=local needs Linux 5.4 or later for its processes: set runtime.inline=true")
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        calls = CallThread()
        await calls.call(registry.reap_stale)
        mark = uuid.uuid4().hex
        object_folder = create_run_folder(run_id, run_dir)
        record = registry.new_record(run_id=run_id, run_dir=run_dir, mark=mark, object_folder=object_folder)
        runtime = cls(
            run_dir=run_dir,
            config=config,
            preload=preload,
            mark=mark,
            object_folder=object_folder,
            record_path=registry.register(record),
            calls=calls,
        )
        if not config.inline:
            runtime._start_server()
        return runtime

    @property
    def clock(self) -> MonotonicClock:
        """Real time."""
        return self._clock

    @property
    def objects(self) -> HostObjectPlane:
        """The run's object plane."""
        return self._objects

    @property
    def object_folder(self) -> Path:
        """Where the run's objects lie, until `close`."""
        return self._object_folder

    @property
    def fork_server_pid(self) -> int | None:
        """Process id of the running fork server."""
        return self._server.pid if self._server is not None else None

    async def call(self, function: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        """Run blocking `function(*args)` in the runtime's call thread; `cost_s` is for virtual time only."""
        return await self._calls.call(function, *args)

    def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> SupervisedWorker:
        """Start a worker.

        Raises:
            InvariantError: a worker of this id still runs, the runtime is closed, or the options are not plain data.
        """
        if self._closing is not None:
            raise InvariantError(f"worker {spec.worker_id} started on a closed runtime")
        if spec.worker_id in self._workers:
            raise InvariantError(f"worker {spec.worker_id} started while one of this id runs")
        spec = replace(spec, options=to_plain(spec.options))
        worker = self._host(spec, on_fact)
        self._workers[spec.worker_id] = worker
        return worker

    def _host(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> SupervisedWorker:
        is_episode_thread = spec.kind is ServiceKind.EPISODE_WORKER and not spec.is_process
        if is_episode_thread or self._config.inline:
            host = EpisodeThread if spec.kind is ServiceKind.EPISODE_WORKER else ThreadWorker
            worker = host(
                spec=spec,
                on_fact=on_fact,
                config=self._config,
                loop=self._loop,
                on_over=self._forget,
                objects=self._objects,
            )
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), worker.thread]
            return worker
        return ProcessWorker(
            spec=spec,
            on_fact=on_fact,
            config=self._config,
            loop=self._loop,
            on_over=self._forget,
            server=self._server or self._start_server(),
            log_path=self._log_path(spec.worker_id),
            object_folder=self._object_folder,
        )

    def _log_path(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{re.sub(r'[^A-Za-z0-9._#-]', '_', name)}.log"

    def _forget(self, worker: SupervisedWorker) -> None:
        del self._workers[worker.worker_id]

    def _start_server(self) -> ForkServerClient:
        self._num_servers += 1
        settings = ForkServerSettings(
            preload=self._preload,
            threads_per_process=self._config.threads_per_process,
            mark=f"{self._mark}/{self._num_servers}",
            run_mark=self._mark,
            log_path=self._log_path("fork_server"),
            object_folder=self._object_folder,
            record_path=self._record_path,
        )
        self._server = ForkServerClient(settings, self._loop, self._take_server_end)
        return self._server

    def _take_server_end(self, server: ForkServerClient) -> None:
        if self._server is server:
            self._server = None

    async def close(self) -> None:
        """Stop every worker, kill those that do not, run the accepted calls, end the fork server, free the objects.

        Takes at most the stop time-out and fixed grace periods. Every worker's WorkerExited has been delivered then.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            worker.stop()
        if workers:
            timeout_s = self._config.stop_timeout_s + 2 * KILL_GRACE_S
            await asyncio.wait([worker.over for worker in workers], timeout=timeout_s)
        server = self._server
        if server is not None:
            await server.close()
        for worker in list(self._workers.values()):
            worker.finish("did not end")
        if not await self._calls.close(_CALLS_TIMEOUT_S):
            logger.error("a call of the runtime did not return within %g s", _CALLS_TIMEOUT_S)
        self._join_threads()
        kill_marked(self._mark)
        remove_run_folder(self._object_folder)
        self._record_path.unlink(missing_ok=True)

    def _join_threads(self) -> None:
        deadline_s = time.monotonic() + _THREADS_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %r does not end; it is left as a daemon", thread.name)
