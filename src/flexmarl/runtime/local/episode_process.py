"""An episode worker in a process of its own: its socket as the source of commands of its event loop."""

import sys

from flexmarl.core.errors import BackendError
from flexmarl.runtime.local.episode_host import EpisodeHost
from flexmarl.runtime.local.process_control import end_process_group
from flexmarl.runtime.local.socket_channel import SocketChannel
from flexmarl.runtime.service_host import StopAsked, WorkerKilled


class SocketEpisodeChannel:
    """An `EpisodeChannel` that ends the process when the orchestrator has let go of the socket."""

    def __init__(self, channel: SocketChannel) -> None:
        """Read `channel` once a host is there; until then its commands wait in the socket."""
        self._channel = channel
        self._host: EpisodeHost | None = None

    def send(self, fact: object) -> None:
        """Send a fact. Usable from any thread.

        Raises:
            BackendError: the fact cannot be written; the worker ends with this error, for what it says is missing.
        """
        try:
            self._channel.send_fact(fact)
        except WorkerKilled:  # not raised in user code, which might catch it
            end_process_group()
        except BackendError as error:
            if self._host is not None:
                self._host.loop.call_soon_threadsafe(self._host.fail, error)
            raise

    def open(self, host: EpisodeHost) -> None:
        """Pass commands on to `host` as they come."""
        self._host = host
        host.loop.add_reader(self._channel.fileno(), self._take)
        self._take()  # what came with the spec is not in the socket any more

    def close(self) -> None:
        """Pass none on any more."""
        if self._host is not None:
            self._host.loop.remove_reader(self._channel.fileno())

    def _take(self) -> None:
        assert self._host is not None
        try:
            commands = self._channel.receive(is_waiting=False)
        except WorkerKilled:
            end_process_group()
        except Exception as error:  # noqa: BLE001 (a callback of the loop: it would be logged and forgotten)
            self._host.fail(error)
            return
        for command in commands:
            if isinstance(command, StopAsked):
                self._host.stop()
            else:
                self._host.handle(command)


def reseed_libraries() -> None:
    """Give user code random numbers of its own: every fork begins with the generators of the fork server.

    Python does so for its own.
    """
    for name in ("numpy.random", "torch"):
        library = sys.modules.get(name)
        if library is not None:
            library.seed()
