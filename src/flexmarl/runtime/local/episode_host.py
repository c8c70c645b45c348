"""Hosting an `AsyncService`: what an episode worker does on its event loop, in a thread or in a process of its own.

User code runs on that loop. When it holds the loop for too long, a watchdog says where.
"""

import asyncio
import contextlib
import logging
import os
import threading
from typing import Protocol

from flexmarl.core.messages import WorkerReady
from flexmarl.core.protocols import AsyncService, WorkerContext, WorkerSpec
from flexmarl.runtime.local.loop_watchdog import LoopWatchdog
from flexmarl.runtime.service_host import WorkerKilled, build_service, error_reason

logger = logging.getLogger(__name__)

_DEFAULT_BLOCKED_LOOP_S = 1.0


class EpisodeHost:
    """The service and its end, on the worker's loop."""

    def __init__(self, service: AsyncService, loop: asyncio.AbstractEventLoop) -> None:
        """Serve until `stop`, or an error of the service."""
        self.loop = loop
        self._service = service
        self.end: asyncio.Future[str | None] = loop.create_future()
        """Done with the error that ended the service, or None."""

    def handle(self, message: object) -> None:
        """Take a command, on the loop."""
        if self.end.done():
            return
        try:
            self._service.handle(message)
        except Exception as error:
            logger.exception("an episode worker failed to handle a %s", type(message).__name__)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error, on the loop."""
        if not self.end.done():
            self.end.set_result(error_reason(error))

    def stop(self) -> None:
        """End, on the loop."""
        if not self.end.done():
            self.end.set_result(None)


class EpisodeChannel(Protocol):
    """Where the commands of an episode worker come from."""

    def open(self, host: EpisodeHost) -> None:
        """Pass commands on to `host`, first those that have come before; called on the loop."""
        ...

    def close(self) -> None:
        """Pass none on any more; called on the loop, also when it was never opened."""
        ...


def host_episodes(
    spec: WorkerSpec, context: WorkerContext, channel: EpisodeChannel, *, stop_timeout_s: float, closes_loop: bool
) -> str | None:
    """Build the service of `spec`, serve until asked to stop, close it. Returns the error that ended it, or None.

    Option `blocked_loop_s` says how long the loop may be held. Without `closes_loop` the caller ends the process:
    tasks and threads that user code has left behind are not waited for.
    """
    try:
        with contextlib.ExitStack() as stack:
            runner = asyncio.Runner()
            if closes_loop:
                stack.callback(runner.close)
            return runner.run(_serve(spec, context, channel, stop_timeout_s))
    except WorkerKilled:
        raise
    except BaseException as error:  # noqa: BLE001 (user code stopped the loop, or cancelled all that runs on it)
        reason = f"user code ended its event loop: {error_reason(error)}"
        logger.error("worker %s: %s", spec.worker_id, reason)
        return reason


async def _serve(
    spec: WorkerSpec, context: WorkerContext, channel: EpisodeChannel, stop_timeout_s: float
) -> str | None:
    loop = asyncio.get_running_loop()
    blocked_loop_s = float(spec.options.get("blocked_loop_s", _DEFAULT_BLOCKED_LOOP_S))
    watchdog = LoopWatchdog(threading.get_ident(), loop, blocked_loop_s, context.send)
    service: AsyncService | None = None
    reason = None
    try:
        service = build_service(spec, context)
        watchdog.start()  # not earlier: modules that take long to import hold up nothing yet
        context.send(WorkerReady(pid=os.getpid()))
        host = EpisodeHost(service, loop)
        channel.open(host)
        reason = await host.end
    except Exception as error:
        logger.exception("worker %s: its service failed", spec.worker_id)
        reason = error_reason(error)
    finally:
        watchdog.stop()
        channel.close()
        if service is not None:
            reason = await _close(service, spec, reason, stop_timeout_s)
    return reason


async def _close(service: AsyncService, spec: WorkerSpec, reason: str | None, timeout_s: float) -> str | None:
    try:
        async with asyncio.timeout(timeout_s):
            await service.close()
    except Exception as error:
        logger.exception("worker %s: its service failed to close", spec.worker_id)
        return reason or error_reason(error)
    return reason
