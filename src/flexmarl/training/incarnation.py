"""One incarnation after another of a policy's process group, busy with one thing at a time.

Invariant: at most one command or store operation is in flight; what was begun for an incarnation that has died since is
dropped when it ends.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import HolderId, PolicyName, WorkerId
from flexmarl.core.protocols import Timer, WorkerHandle, WorkerSpec
from flexmarl.training.state import TrainingSeams

T = TypeVar("T")


class Incarnation:
    """The process of a policy, or none; its identity, and what it is busy with."""

    def __init__(self, policy: PolicyName, seams: TrainingSeams, on_free: Callable[[], None]) -> None:
        """Start nothing yet; `on_free` is called when a store operation has ended."""
        self._policy = policy
        self._seams = seams
        self._on_free = on_free
        self._handle: WorkerHandle | None = None
        self._timer: Timer | None = None
        self.number = 0
        self.busy_with: str | None = None
        """The command or store operation in flight."""

    @property
    def worker_id(self) -> WorkerId:
        """Id of the process."""
        return WorkerId(f"trainer-{self._policy}.{self.number}")

    @property
    def holder(self) -> HolderId:
        """Who holds its leases."""
        return HolderId(f"{self._policy}#{self.number}")

    def start(self, make_spec: Callable[[WorkerId], WorkerSpec], on_fact: Callable[[WorkerId, object], None]) -> None:
        """Start the process."""
        self._handle = self._seams.runtime.start(make_spec(self.worker_id), on_fact)

    def stop(self) -> None:
        """Ask the process to end."""
        if self._handle is None:
            raise InvariantError(f"{self.worker_id} is asked to stop, but does not run")
        self._handle.stop()

    def ended(self) -> None:
        """The process is gone; the next one has another number."""
        self._handle = None
        self.number += 1

    def command(self, command: object) -> None:
        """Send a command; the process is killed when it takes longer than `training.micro_batch_timeout_s`."""
        if self._handle is None or self.busy_with is not None:
            raise InvariantError(f"{self.worker_id} is busy with {self.busy_with}, cannot take {command!r:.80}")
        name = type(command).__name__
        self.busy_with = name
        timeout_s = self._seams.config.micro_batch_timeout_s
        self._timer = self._seams.inbox.set_timer(f"{name} {self.worker_id}", timeout_s, self._handle.kill)
        self._handle.send(command)

    def end_command(self) -> str | None:
        """A fact has come, so nothing is in flight any more; return what was."""
        command, self.busy_with = self.busy_with, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return command

    def store_work(self, name: str, work: Coroutine[Any, Any, T], then: Callable[[T], None]) -> None:
        """Run a store operation and call `then` with its result, unless the incarnation it was for has died.

        An incarnation that the store has fenced while it lives is killed: nothing that it does counts any more.
        """
        self.busy_with = f"store.{name}"
        number, handle = self.number, self._handle

        def done(result: T) -> None:
            if self.number == number:
                self.busy_with = None
                then(result)
                self._on_free()

        def fenced() -> None:
            if self.number == number and handle is not None:
                handle.kill()

        self._seams.inbox.start(f"store.{name}", work, done, fenced)
