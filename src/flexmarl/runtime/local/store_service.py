"""Lends the experience store of this process to other processes of the same user, over a socket in the store's folder.

Start with `StoreService`; the other end is `store_client.py`, what crosses is in `store_wire.py`. Invariants:

- requests of a connection reach the store in their order; each is answered once, under its number;
- a holder is one connection. It is fenced when that connection ends, or when nothing is heard of it for
  `holder_timeout_s`, and never for slow work: its heartbeats come from a thread that does nothing else;
- whatever a client sends or leaves out, the others are served.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from flexmarl.core.codec import to_plain
from flexmarl.core.errors import BackendError, ConfigError, FencedError, InvariantError, StoreError
from flexmarl.core.ids import HolderId, PolicyName
from flexmarl.core.protocols import ExperienceStore, Lease
from flexmarl.runtime.local.silence import SilenceWatch
from flexmarl.runtime.local.store_rows import decode_claim, decode_lease, decode_trajectories, encode_granted
from flexmarl.runtime.local.store_wire import (
    ACKNOWLEDGE,
    BEAT,
    CLAIM,
    HELLO,
    HOLDER_OPERATIONS,
    MAX_FRAME_BYTES,
    PUT_FINISHED,
    SOCKET_NAME,
    WIRE_VERSION,
    error_answer,
    frame_of,
    listen,
    operation,
    read_body,
    widen,
)
from flexmarl.runtime.local.wire import FrameCutter
from flexmarl.store import PackedBatch, PackedTrajectory

logger = logging.getLogger(__name__)

_MAX_OPEN_REQUESTS = 64
"""Of one connection; it is not read further while so many wait for their answer."""


class LendableStore(ExperienceStore, Protocol):
    """A store that takes and gives rows packed, so that its owner's process does not unpack what it only passes on."""

    def start_put(self, trajectories: Sequence[PackedTrajectory]) -> asyncio.Future[None]:
        """Do what `put_finished` does with what `pack_finished` has packed; it has its turn from now on."""
        ...

    def start_claim(
        self,
        policy: PolicyName,
        step: int,
        holder: HolderId,
        micro_batch_id: str,
        *,
        max_rows: int,
        acknowledging: Lease | None = None,
    ) -> asyncio.Future[tuple[Lease, PackedBatch] | None]:
        """Do what `claim` does, without waiting for rows; it has its turn from now on."""
        ...

    async def claim_packed(
        self, policy: PolicyName, step: int, holder: HolderId, micro_batch_id: str, *, max_rows: int, timeout_s: float
    ) -> tuple[Lease, PackedBatch] | None:
        """Do what `claim` does, and leave the rows packed."""
        ...

    def start_acknowledge(self, lease: Lease) -> asyncio.Future[None]:
        """Do what `acknowledge` does; it has its turn from now on."""
        ...


class StoreService:
    """Serves a store until `close`. The store stays its owner's, who may go on using it."""

    def __init__(self, store: LendableStore, folder: Path, *, holder_timeout_s: float, max_frame_bytes: int) -> None:
        """Prepare the service; use `open`."""
        self.path = folder / SOCKET_NAME
        self.store = store
        self.holder_timeout_s = holder_timeout_s
        self.max_frame_bytes = max_frame_bytes
        self._connections: set[_Connection] = set()
        self._holders: dict[HolderId, _Holder] = {}
        self._fencing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(
        cls,
        store: LendableStore,
        folder: Path,
        *,
        holder_timeout_s: float = 30.0,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> Self:
        """Listen on `<folder>/socket`. The folder must be this process's alone, as an opened store's folder is.

        Raises:
            StoreError: the socket cannot be made.
        """
        service = cls(store, folder, holder_timeout_s=holder_timeout_s, max_frame_bytes=max_frame_bytes)
        try:
            sock = listen(folder)
        except OSError as error:
            raise StoreError(f"{service.path}: cannot listen there: {error}") from error
        loop = asyncio.get_running_loop()
        service._server = await loop.create_unix_server(lambda: _Connection(service), sock=sock)
        return service

    async def close(self) -> None:
        """Stop listening, end every connection and fence its holder. A second call does nothing."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.abort()
        for holder in list(self._holders.values()):
            self._fence(holder, "the store's service was closed")
        if self._fencing:
            await asyncio.wait(self._fencing)

    # --- holders ------------------------------------------------------------------------------------------------------

    def add(self, connection: "_Connection") -> None:
        """Keep a new connection."""
        self._connections.add(connection)

    def forget(self, connection: "_Connection") -> None:
        """Let go of an ended connection: its holder is dead."""
        self._connections.discard(connection)
        holder = self._holders.get(connection.holder) if connection.holder is not None else None
        if holder is not None and holder.connection is connection:
            self._fence(holder, "its connection ended")

    def begin(self, name: HolderId, connection: "_Connection") -> None:
        """Make `connection` the holder `name` and watch its heartbeats.

        Raises:
            InvariantError: another connection is.
        """
        if name in self._holders:
            raise InvariantError(f"holder {name!r} is connected already: every incarnation needs a name of its own")
        self._holders[name] = _Holder(name, connection, self.holder_timeout_s, self._fence)

    def beat(self, name: HolderId) -> None:
        """Note that a holder lives.

        Raises:
            FencedError: it was taken for dead before, or never said hello.
        """
        holder = self._holders.get(name)
        if holder is None:
            raise FencedError(f"holder {name!r} is over: its connection ended, or its heartbeats came too late")
        holder.beat()

    def _fence(self, holder: "_Holder", reason: str) -> None:
        holder.stop()
        del self._holders[holder.name]
        task = asyncio.get_running_loop().create_task(self._fence_in_store(holder.name, reason))
        self._fencing.add(task)
        task.add_done_callback(self._fencing.discard)

    async def _fence_in_store(self, name: HolderId, reason: str) -> None:
        try:
            keys = await self.store.fence(name)
        except Exception:
            logger.exception("holder %s could not be fenced (%s)", name, reason)
            return
        logger.info("fenced holder %s: %s; %d rows are ready again", name, reason, len(keys))


class _Holder:
    """One that may hold leases, and the watch over its heartbeats."""

    def __init__(
        self, name: HolderId, connection: "_Connection", timeout_s: float, fence: Callable[["_Holder", str], None]
    ) -> None:
        self.name = name
        self.connection = connection
        self._is_heard = True
        self._watch = SilenceWatch(
            asyncio.get_running_loop(),
            timeout_s=timeout_s,
            has_spoken=self._was_heard,
            on_silent=lambda reason: fence(self, reason),
        )

    def beat(self) -> None:
        """It has given a sign of life."""
        self._is_heard = True

    def stop(self) -> None:
        """Watch no longer."""
        self._watch.stop()

    def _was_heard(self) -> bool:
        was_heard, self._is_heard = self._is_heard, False
        return was_heard


class _Connection(asyncio.Protocol):
    """One client's end."""

    def __init__(self, service: StoreService) -> None:
        self.holder: HolderId | None = None
        self._service = service
        self._cutter = FrameCutter(max_bytes=service.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._is_greeted = False
        self._is_full = False
        """The client does not take its answers."""
        self._open: dict[asyncio.Future[Any], _Request] = {}
        """Requests without an answer so far."""
        self._num_slow = 0
        """Those of them that are tasks."""

    # --- the socket ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        widen(transport.get_extra_info("socket"))
        self._service.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for work, request in list(self._open.items()):
            if request.name == CLAIM:
                work.cancel()  # nobody would take what it waits for
        self._service.forget(self)

    def abort(self) -> None:
        """End it from this side."""
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        self._is_full = True
        self._regulate()

    def resume_writing(self) -> None:
        self._is_full = False
        self._regulate()

    def _regulate(self) -> None:
        """Read on only while answers leave."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_full or len(self._open) >= _MAX_OPEN_REQUESTS:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._cutter.feed(data):
                self._take(read_body(body))
        except BackendError as error:
            self._refuse(None, error)

    def _refuse(self, number: object, error: Exception) -> None:
        """Say why, then hang up: what it holds must not stay with a client that cannot be told so."""
        logger.warning("a client of the store is disconnected: %s", error)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame_of(error_answer(number, StoreError(str(error)))))
            self._transport.close()

    def _send(self, answer: list[object]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write(frame_of(answer, max_bytes=self._service.max_frame_bytes))
        except StoreError as error:
            self._refuse(answer[0], error)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, request: Any) -> None:
        if not isinstance(request, list) or len(request) != 3 or not isinstance(request[1], str):
            raise StoreError("a request is [number, operation, arguments]")
        number, name, arguments = request
        try:
            if name in (HELLO, BEAT) or not self._is_greeted:
                self._send([number, None, self._take_sign(name, arguments)])
                return
            self._start(self._request(number, name, arguments))
        except Exception as error:  # noqa: BLE001 (the client's mistake is told to the client)
            self._send(error_answer(number, error))

    def _start(self, request: "_Request") -> None:
        """Have a request done, after those that came before it."""
        # A task first runs in the loop's next round, so that nothing may begin at once while there are tasks.
        work = asyncio.ensure_future(_awaited(request.begin) if self._num_slow else request.begin())
        if isinstance(work, asyncio.Task):
            self._num_slow += 1
        self._open[work] = request
        work.add_done_callback(self._answer)
        self._regulate()

    def _take_sign(self, name: str, arguments: Any) -> float | None:
        """Handle a hello or a heartbeat."""
        if name == BEAT and isinstance(arguments, list) and len(arguments) == 1:
            self._service.beat(HolderId(str(arguments[0])))
            return None
        if name != HELLO or self._is_greeted or not isinstance(arguments, list) or len(arguments) != 2:
            raise ConfigError(f"a connection begins with one {HELLO!r} of [version, holder], got {name!r:.80}")
        version, holder = arguments
        if version != WIRE_VERSION:
            raise ConfigError(
                f"the client speaks version {version} of the store's socket, its owner {WIRE_VERSION}: "
                "use one version of FlexMARL on both sides"
            )
        if holder is not None:
            self._service.begin(HolderId(str(holder)), self)
            self.holder = HolderId(str(holder))
        self._is_greeted = True
        return self._service.holder_timeout_s

    def _request(self, number: object, name: str, plain: Any) -> "_Request":
        """Return a request, its arguments read and checked."""
        store = self._service.store
        if name == PUT_FINISHED:
            return _Request(number, name, partial(store.start_put, decode_trajectories(plain)))
        if name == ACKNOWLEDGE:
            lease = decode_lease(plain)
            self._require_own(name, lease.holder)
            return _Request(number, name, partial(store.start_acknowledge, lease))
        if name == CLAIM:
            policy, step, holder, micro_batch_id, max_rows, timeout_s, acknowledging = decode_claim(plain)
            self._require_own(name, holder)
            if acknowledging is not None:
                self._require_own(ACKNOWLEDGE, acknowledging.holder)
            claimed = (policy, step, holder, micro_batch_id)
            begin = partial(store.start_claim, *claimed, max_rows=max_rows, acknowledging=acknowledging)
            wait = partial(store.claim_packed, *claimed, max_rows=max_rows, timeout_s=timeout_s)
            return _Request(number, name, begin, wait if timeout_s > 0 else None)
        called = operation(name)
        given = called.decode_arguments(plain)
        if name in HOLDER_OPERATIONS:
            self._require_own(name, given["holder"])
        keywords = {each: given.pop(each) for each in called.keyword_only}
        return _Request(number, name, partial(getattr(store, name), *given.values(), **keywords))

    def _require_own(self, name: str, holder: HolderId) -> None:
        if holder != self.holder:
            raise InvariantError(f"{name} for {holder!r} on the connection of {self.holder!r}")

    def _answer(self, work: asyncio.Future[Any]) -> None:
        request = self._open.pop(work)
        if isinstance(work, asyncio.Task):
            self._num_slow -= 1
        if work.cancelled():
            return
        if (error := work.exception()) is not None:
            assert isinstance(error, Exception)  # the loop itself ends with anything else
            if not isinstance(error, FencedError | ConfigError):
                logger.info("%s of a client failed: %s", request.name, error)
            self._send(error_answer(request.number, error))
        elif (result := work.result()) is None and request.wait is not None and self._transport is not None:
            self._start(_Request(request.number, request.name, request.wait))
        else:
            value = encode_granted(result) if request.name == CLAIM else to_plain(result)
            self._send([request.number, None, value])
        self._regulate()


@dataclass(frozen=True, slots=True)
class _Request:
    """What a client wants done."""

    number: object
    name: str
    begin: Callable[[], Awaitable[Any]]
    wait: Callable[[], Awaitable[Any]] | None = None
    """Done instead, when the result is None."""


async def _awaited(begin: Callable[[], Awaitable[Any]]) -> Any:
    return await begin()
