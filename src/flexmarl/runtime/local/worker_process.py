"""A worker process, from the fork on: isolation, its service, its pulse.

The pulse thread sends heartbeats and watches the socket's other end, so that the orchestrator knows that the process
lives, and the process ends with the orchestrator, also while it computes.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from flexmarl.core.codec import from_plain
from flexmarl.core.protocols import ServiceKind, WorkerContext, WorkerSpec
from flexmarl.objects import HostObjectPlane
from flexmarl.runtime.clock import MonotonicClock
from flexmarl.runtime.local.episode_host import host_episodes
from flexmarl.runtime.local.episode_process import SocketEpisodeChannel, reseed_libraries
from flexmarl.runtime.local.process_control import die_with_parent, end_process_group, set_process_name
from flexmarl.runtime.local.socket_channel import SocketChannel
from flexmarl.runtime.local.wire import FrameKind, encode_frame
from flexmarl.runtime.service_host import WorkerKilled, error_reason, host_service

logger = logging.getLogger(__name__)


def run_worker_process(sock: socket.socket, *, name: str, log_path: str, parent_pid: int) -> None:
    """Turn a fresh fork into a worker and serve; the process ends here."""
    os.setpgid(0, 0)
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name(f"fm:{name}")
    _redirect_output(log_path)
    channel = SocketChannel(sock)
    try:
        code = _serve(channel)
    except WorkerKilled:
        end_process_group()
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(channel: SocketChannel) -> int:
    first = channel.read_spec()
    if channel.wait_for_hang_up(0):
        raise WorkerKilled
    heartbeat_s = float(first["heartbeat_s"])
    threading.Thread(target=_pulse, args=(channel, heartbeat_s), name="pulse", daemon=True).start()
    try:
        spec = from_plain(WorkerSpec, first["spec"])
        objects = HostObjectPlane(Path(first["object_folder"]))
        reason = _host(spec, objects, channel, stop_timeout_s=float(first["stop_timeout_s"]))
    except Exception as error:
        logger.exception("the worker could not start")
        reason = error_reason(error)
    if reason is not None:
        channel.write(encode_frame(FrameKind.ERROR, reason))
    return 0 if reason is None else 1


def _host(spec: WorkerSpec, objects: HostObjectPlane, channel: SocketChannel, *, stop_timeout_s: float) -> str | None:
    clock = MonotonicClock()
    if spec.kind is not ServiceKind.EPISODE_WORKER:
        context = WorkerContext(worker_id=spec.worker_id, objects=objects, clock=clock, send=channel.send_fact)
        return host_service(spec, context, channel)
    reseed_libraries()
    episodes = SocketEpisodeChannel(channel)
    context = WorkerContext(worker_id=spec.worker_id, objects=objects, clock=clock, send=episodes.send)
    return host_episodes(spec, context, episodes, stop_timeout_s=stop_timeout_s, closes_loop=False)


def _pulse(channel: SocketChannel, heartbeat_s: float) -> None:
    heartbeat = encode_frame(FrameKind.HEARTBEAT)
    try:
        while not channel.wait_for_hang_up(heartbeat_s):
            channel.write(heartbeat)
    except WorkerKilled:
        logger.warning("the orchestrator is gone")
    end_process_group()


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    faulthandler.enable(sys.stderr)
