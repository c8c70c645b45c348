"""Hosting a `Service`: the loop that every real worker runs, as a process or as a thread.

Invariants (the simulated host keeps them too):
- Commands are handled in the order sent, all that have arrived before each step.
- A step's messages are sent in order after its cost has passed; commands that arrive meanwhile wait.
- WorkerReady is sent first, once the service is built.
- `close` is called once, also after an error; an error is reported as the reason of the worker's exit.
"""

import importlib
import logging
import os
from typing import Any, Protocol

from flexmarl.core.errors import ConfigError
from flexmarl.core.messages import WorkerReady
from flexmarl.core.protocols import Service, WorkerContext, WorkerSpec

logger = logging.getLogger(__name__)


class StopAsked:
    """Stands in the sequence of commands where the orchestrator asked the worker to end."""


STOP_ASKED = StopAsked()


class WorkerKilled(BaseException):
    """Unwinds the host of a worker that must act no more; not an Exception, so that no service swallows it."""


class HostChannel(Protocol):
    """The worker's end of its connection to the orchestrator. Every method may raise WorkerKilled."""

    def receive(self, *, is_waiting: bool) -> list[object]:
        """Return the commands that have arrived, in order; with `is_waiting`, at least one."""
        ...

    def send_fact(self, fact: object) -> None:
        """Send a fact. Usable from any thread of the worker."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Let modelled time pass."""
        ...


def build_service(spec: WorkerSpec, context: WorkerContext) -> Any:
    """Return what the factory of `spec` makes of the context and the options.

    Raises:
        ConfigError: the factory is not `module:function`, or the module has no such function.
    """
    module_name, colon, function_name = spec.factory.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"worker {spec.worker_id}: factory {spec.factory!r}: expected module:function")
    factory = getattr(importlib.import_module(module_name), function_name, None)
    if factory is None:
        raise ConfigError(f"worker {spec.worker_id}: module {module_name} has no function {function_name!r}")
    return factory(context, spec.options)


def error_reason(error: BaseException) -> str:
    """Return how an error is named in WorkerExited.reason: `TypeName: message`."""
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def host_service(spec: WorkerSpec, context: WorkerContext, channel: HostChannel) -> str | None:
    """Build the service of `spec`, serve until asked to stop, close it. Returns the error that ended it, or None."""
    service: Service | None = None
    reason = None
    try:
        service = build_service(spec, context)
        channel.send_fact(WorkerReady(pid=os.getpid()))
        serve(service, channel)
    except Exception as error:
        logger.exception("worker %s: its service failed", spec.worker_id)
        reason = error_reason(error)
    finally:
        if service is not None:
            reason = _close(service, spec, reason)
    return reason


def serve(service: Service, channel: HostChannel) -> None:
    """Handle and step until a StopAsked arrives."""
    is_idle = False
    while True:
        for command in channel.receive(is_waiting=is_idle):
            if isinstance(command, StopAsked):
                return
            service.handle(command)
        step = service.step()
        is_idle = step is None
        if step is None:
            continue
        if step.cost_s > 0:
            channel.sleep(step.cost_s)
        for message in step.messages:
            channel.send_fact(message)


def _close(service: Service, spec: WorkerSpec, reason: str | None) -> str | None:
    try:
        service.close()
    except Exception as error:
        logger.exception("worker %s: its service failed to close", spec.worker_id)
        return reason or error_reason(error)
    return reason
