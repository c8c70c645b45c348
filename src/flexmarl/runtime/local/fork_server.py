"""The fork server: `python -m flexmarl.runtime.local.fork_server CONTROL_FD PARENT_PID`.

A fresh process that imports what workers need (seconds for torch) and then forks a worker per request (milliseconds).

Invariants:
- It runs one thread whenever it forks, and no compute: a fork copies neither threads nor what they hold locked.
- It reaps every child and reports its exit; before that it kills the rest of the child's process group.
- When the orchestrator ends, it kills every process of the run, removes the run's objects, and ends.

Requests and reports are single messages of a SOCK_SEQPACKET socket. A new worker's socket comes with its request.
"""

import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgpack

from flexmarl.objects import remove_run_folder
from flexmarl.runtime.local.process_control import kill_marked, set_process_name
from flexmarl.runtime.local.worker_process import run_worker_process

MAX_MESSAGE_BYTES = 128 * 1024
_END_WAIT_S = 5.0
_THREAD_END_S = 0.5
"""A joined thread is gone from the kernel within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    serial: int
    pid: int
    pidfd: int


class ForkServer:
    """The state of a fork server process."""

    def __init__(self, control: socket.socket, parent_pidfd: int, settings: dict[str, Any]) -> None:
        """Serve requests of `control` until it, or the process of `parent_pidfd`, ends."""
        self._control = control
        self._parent_pidfd = parent_pidfd
        self._settings = settings
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def preload(self) -> None:
        """Import the modules of the settings, and move everything out of the garbage collector's reach.

        Meanwhile a thread watches the orchestrator; it has ended before this returns.
        """
        with _Watch(self._control, self._parent_pidfd, self.end):
            for module in self._settings["preload"]:
                importlib.import_module(module)
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page it looks at

    def serve(self) -> None:
        """Handle requests and exits until the orchestrator is gone; never returns."""
        self._selector.register(self._control, selectors.EVENT_READ, self._take_request)
        self._selector.register(self._parent_pidfd, selectors.EVENT_READ, self.end)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def report(self, report: dict[str, object]) -> None:
        """Send a report; when nobody listens any more, the end follows by the selector."""
        try:
            self._control.sendall(msgpack.packb(report, unicode_errors="surrogatepass"))
        except (BrokenPipeError, ConnectionResetError):
            self.end()

    def _take_request(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        except ConnectionResetError:
            data = b""
        if not data:
            self.end()
        request = msgpack.unpackb(data, unicode_errors="surrogatepass")
        if request["op"] == "fork":
            self._fork(request, fds[0])
        elif request["serial"] in self._children:
            os.killpg(self._children[request["serial"]].pid, signal.SIGKILL)

    def _fork(self, request: dict[str, Any], channel_fd: int) -> None:
        serial = request["serial"]
        sys.stdout.flush()
        sys.stderr.flush()
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(channel_fd)
            self.report({"op": "exited", "serial": serial, "reason": f"cannot fork: {error}"})
            return
        if pid == 0:
            self._become_worker(request, channel_fd, server_pid)
        os.close(channel_fd)
        try:
            os.setpgid(
                pid, pid
            )  # the child does so too: whoever is first, the group exists before anybody relies on it
        except ProcessLookupError:
            sys.stderr.write(f"worker {request['name']} ended at once\n")
        child = _Child(serial=serial, pid=pid, pidfd=os.pidfd_open(pid))
        self._children[serial] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._reap(child))
        self.report({"op": "forked", "serial": serial, "pid": pid})

    def _become_worker(self, request: dict[str, Any], channel_fd: int, server_pid: int) -> None:
        """In the child: let go of what is the server's, and never come back."""
        try:
            self._control.close()
            self._selector.close()
            os.close(self._parent_pidfd)
            for child in self._children.values():
                os.close(child.pidfd)
            channel = socket.socket(fileno=channel_fd)
            run_worker_process(channel, name=request["name"], log_path=request["log_path"], parent_pid=server_pid)
        except BaseException:  # noqa: BLE001 (a boundary: a child must never run on as a second fork server)
            traceback.print_exc()  # into the fork server's log: the worker has not got as far as its own
        finally:
            os._exit(70)

    def _reap(self, child: _Child) -> None:
        # Its id cannot be reused before waitpid, so the group is its own.
        _kill_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.serial]
        self.report({"op": "exited", "serial": child.serial, "reason": _exit_reason(status)})

    def end(self) -> NoReturn:
        """The orchestrator is gone: leave nothing of the run, and end."""
        for child in self._children.values():
            _kill_group(child.pid)
        _clean_up(self._settings)
        os._exit(0)


class _Watch:
    """Watches the orchestrator in a thread while the main thread imports, and calls `on_gone` when it ends."""

    def __init__(self, control: socket.socket, parent_pidfd: int, on_gone: Callable[[], None]) -> None:
        self._poller = select.poll()
        self._poller.register(control, select.POLLRDHUP)
        self._poller.register(parent_pidfd, select.POLLIN)
        self._wake_read, self._wake_write = os.pipe()
        self._poller.register(self._wake_read, select.POLLIN)
        self._on_gone = on_gone
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        ready = {fd for fd, _ in self._poller.poll()}
        if self._wake_read not in ready:
            self._on_gone()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _clean_up(settings: dict[str, Any]) -> None:
    kill_marked(settings["mark"], wait_s=_END_WAIT_S)
    remove_run_folder(Path(settings["object_folder"]))
    # Last: while the record is there, a resumed run ends this process before it makes its own folder.
    Path(settings["record_path"]).unlink(missing_ok=True)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # not yet a group of its own, or a zombie: both take it


def _exit_reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _count_threads() -> int:
    """Return how many threads this process has, those of C libraries included, once ended ones have left the kernel."""
    deadline_s = time.monotonic() + _THREAD_END_S
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return count


def _open_parent(parent_pid: int) -> int | None:
    """Return a pidfd of the orchestrator, or None when it has ended already."""
    try:
        pidfd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return None
    if os.getppid() == parent_pid:
        return pidfd
    os.close(pidfd)
    return None


def main(argv: list[str]) -> None:
    """Run the fork server on an inherited socket."""
    control = socket.socket(fileno=int(argv[0]))
    parent_pid = int(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to answer
    set_process_name("fm:fork_server")
    data = control.recv(MAX_MESSAGE_BYTES)
    if not data:
        return  # the orchestrator ended before it said anything
    settings = msgpack.unpackb(data, unicode_errors="surrogatepass")
    parent_pidfd = _open_parent(parent_pid)
    if parent_pidfd is None:
        _clean_up(settings)
        return
    # Modules of the user see the orchestrator's; the working directory is inherited.
    sys.path[:] = settings["sys_path"]
    sys.argv[:] = settings["argv"]
    server = ForkServer(control, parent_pidfd, settings)
    try:
        server.preload()
    except Exception as error:
        server.report(
            {"op": "failed", "reason": f"cannot import the preloaded modules: {type(error).__name__}: {error}"}
        )
        raise
    server.report({"op": "ready", "num_threads": _count_threads()})
    server.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
