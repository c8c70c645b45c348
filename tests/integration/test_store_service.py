"""A store lent to other processes, some of which are killed, stopped, slow or malicious.

This file is also those processes: `python test_store_service.py ROLE FOLDER NAME` plays a client of the store in FOLDER
and prints what came of each call, one JSON list a line.
"""

import asyncio
import functools
import json
import os
import random
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgpack
import pytest

from flexmarl.core.codec import to_plain
from flexmarl.core.errors import CapacityError, ConfigError, FlexMARLError, InvariantError, StoreError
from flexmarl.core.ids import AgentName, HolderId, ObjectKey, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, PolicyColumns, PolicyProgress
from flexmarl.core.records import (
    CommitRecord,
    Denominators,
    DispatchRecord,
    FinishedTrajectory,
    FinishReason,
    OutcomeRecord,
    PolicyCommit,
    Seal,
    TokenColumn,
    TokenValues,
    TrajectoryFailure,
    TurnRow,
    VersionSpan,
)
from flexmarl.runtime.local.store_client import StoreClient
from flexmarl.runtime.local.store_rows import encode_trajectory
from flexmarl.runtime.local.store_service import StoreService
from flexmarl.runtime.local.store_wire import SOCKET_NAME, frame_of
from flexmarl.store import SqliteStore, pack_finished

pytestmark = pytest.mark.integration

T = TypeVar("T")
P = ParamSpec("P")

POLICY = PolicyName("red")
AGENTS = (AgentName("asker"), AgentName("solver"))
NUM_TRAJECTORIES = 40
TIMEOUT_S = 20.0
"""Of every wait of the tests."""


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **keywords: P.kwargs) -> None:
        asyncio.run(test(*args, **keywords))

    return run


async def inline_call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    return function(*args)


def dispatch(step: int = 0) -> DispatchRecord:
    return DispatchRecord(
        step=step, min_version=step, max_version=step, queries=(7,), num_trajectories=NUM_TRAJECTORIES
    )


def finished(number: int) -> FinishedTrajectory:
    """Return a trajectory of one turn per agent whose content depends on its number, long enough to be torn."""
    trajectory = TrajectoryKey(0, 7, number)
    rng = random.Random(number)
    turns = []
    for agent in AGENTS:
        tokens = tuple(rng.randrange(50_000) for _ in range(500))
        turns.append(
            TurnRow(
                key=SampleKey(0, 7, number, agent, 0, 0),
                attempt=0,
                policy=POLICY,
                policy_version=0,
                weights_version=0,
                prompt_tokens=tokens[:100],
                response_tokens=tokens[100:],
                logprobs=tuple(-rng.random() for _ in range(400)),
                temperature=0.7,
                finish_reason=FinishReason.LENGTH,
                version_spans=(VersionSpan(start=0, end=400, policy_version=0),),
            )
        )
    outcome = OutcomeRecord(
        trajectory=trajectory,
        attempt=0,
        rewards={agent: float(number % 2) for agent in AGENTS},
        turns=tuple(turn.key for turn in turns),
    )
    return FinishedTrajectory(outcome=outcome, turns=tuple(turns), advantages=(0.25, -0.25))


def all_keys(num_trajectories: int = NUM_TRAJECTORIES) -> list[SampleKey]:
    return [turn.key for number in range(num_trajectories) for turn in finished(number).turns]


def commit_of(micro_batches: list[str]) -> CommitRecord:
    part = PolicyCommit(
        weights_version=1,
        weights_digest="digest",
        denominators=Denominators(num_samples=len(all_keys())),
        micro_batches=tuple(micro_batches),
        update_sizes=(len(micro_batches),),
    )
    return CommitRecord(step=0, policy_version=1, policies={POLICY: part})


# --- the processes ----------------------------------------------------------------------------------------------------


def say(*fact: object) -> None:
    print(json.dumps(fact), flush=True)


def play_producer(client: StoreClient) -> None:
    """Put one trajectory after the other, in batches of 8."""
    for first in range(0, NUM_TRAJECTORIES, 8):
        client.put_finished([finished(number) for number in range(first, first + 8)])
        say("put", first)


def play_holder(client: StoreClient) -> None:
    """Claim rows and keep them until told to go on."""
    granted = client.claim(POLICY, 0, "held", max_rows=5, timeout_s=TIMEOUT_S)
    assert granted is not None
    say("claimed", len(granted[1]))
    sys.stdin.readline()
    for name in ("acknowledge", "claim"):
        try:
            if name == "acknowledge":
                client.acknowledge(granted[0])
            else:
                client.claim(POLICY, 0, "next", max_rows=5, timeout_s=0.0)
            say("done")
        except FlexMARLError as error:
            say(type(error).__name__, str(error))


def play_worker(client: StoreClient) -> None:
    """Train whatever is ready, then say what that was."""
    assert client.holder is not None
    rng = random.Random(client.holder)
    micro_batches: list[str] = []
    keys: list[str] = []
    while True:
        name = f"{client.holder}-{len(micro_batches)}"
        granted = client.claim(POLICY, 0, name, max_rows=rng.randrange(1, 5), timeout_s=0.3)
        if granted is None:
            break
        for sample in granted[1]:
            assert sample.turn in finished(sample.turn.key.trajectory).turns
        client.acknowledge(granted[0])
        micro_batches.append(name)
        keys += [str(key) for key in granted[0].keys]
    say("trained", micro_batches, keys)
    sys.stdin.readline()


def play_slow_worker(client: StoreClient) -> None:
    """Hold a lease over work that takes several times the time-out, without and with the interpreter lock."""
    granted = client.claim(POLICY, 0, "slow", max_rows=5, timeout_s=TIMEOUT_S)
    assert granted is not None
    time.sleep(2.0)
    end_s = time.monotonic() + 2.0
    while time.monotonic() < end_s:
        sum(range(1000))
    client.acknowledge(granted[0])
    say("done")


ROLES = {
    "producer": play_producer,
    "holder": play_holder,
    "worker": play_worker,
    "slow_worker": play_slow_worker,
}


# --- the owner --------------------------------------------------------------------------------------------------------


class Client:
    """A process that plays a role."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> list[Any]:
        """Return the next fact, or an empty list at its end."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), TIMEOUT_S)
        return json.loads(line) if line.endswith(b"\n") else []

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def end(self, signal_number: int | None = None) -> None:
        if signal_number is not None:
            self.process.send_signal(signal_number)
        await asyncio.wait_for(self.process.communicate(), TIMEOUT_S)


class Owner:
    """A store, lent."""

    def __init__(self, store: SqliteStore, service: StoreService, folder: Path) -> None:
        self.store = store
        self.service = service
        self.folder = folder
        self.clients: list[Client] = []

    async def start(self, role: str, name: str = "") -> Client:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            role,
            str(self.folder),
            name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.clients.append(Client(process))
        return self.clients[-1]

    async def fill(self) -> None:
        await self.store.open_step(dispatch())
        await self.store.put_finished([finished(number) for number in range(NUM_TRAJECTORIES)])

    async def counts(self) -> PolicyProgress:
        return (await self.store.progress(0)).get(POLICY, PolicyProgress())

    async def wait_until_ready(self, num_rows: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.counts()).num_ready != num_rows:
                await asyncio.sleep(0.02)

    async def call(self, function: Callable[..., T], *args: object, **keywords: object) -> T:
        """Run a call of a client of this process, whose other end is this loop."""
        return await asyncio.wait_for(asyncio.to_thread(function, *args, **keywords), TIMEOUT_S)


@asynccontextmanager
async def owner(
    folder: Path, *, holder_timeout_s: float = TIMEOUT_S, max_frame_bytes: int = 2**24, columns: Any = None
) -> AsyncIterator[Owner]:
    store = await SqliteStore.open(folder, inline_call, columns)
    service = await StoreService.open(store, folder, holder_timeout_s=holder_timeout_s, max_frame_bytes=max_frame_bytes)
    lent = Owner(store, service, folder)
    try:
        yield lent
    finally:
        for client in lent.clients:
            if client.process.returncode is None:
                client.process.kill()
                await client.process.communicate()
        await service.close()
        await store.close()


# --- death, stalls, slow work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_after", [0, 1, 3])
@on_a_loop
async def test_g2_a_producer_killed_in_a_put_leaves_nothing_by_half(tmp_path: Path, kill_after: int) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.store.open_step(dispatch())
        producer = await lent.start("producer")
        told = 0
        while told < kill_after:
            assert (await producer.hear())[0] == "put"
            told += 1
        if kill_after == 0:
            while not lent.service._connections:
                await asyncio.sleep(0.001)
        await producer.end(signal.SIGKILL)
        while lent.service._connections:
            await asyncio.sleep(0.01)
        num_trajectories = (await lent.counts()).num_ready // len(AGENTS)
        assert num_trajectories % 8 == 0
        assert num_trajectories >= 8 * told
        keys = [key for key, _ in await lent.store.ready(POLICY, 0)]
        assert keys == all_keys(num_trajectories)
        # Whoever plays the producer again may repeat what was already there.
        again = await lent.start("producer")
        while await again.hear():
            pass
        assert [key for key, _ in await lent.store.ready(POLICY, 0)] == all_keys()


@on_a_loop
async def test_requests_that_arrive_together_are_done_in_their_order(tmp_path: Path) -> None:
    packed = [encode_trajectory(pack_finished(finished(number))) for number in range(8)]
    requests = [
        ("open_step", [to_plain(dispatch())]),
        ("put_finished", [packed]),
        ("ready", [POLICY, 0]),
        ("put_finished", [packed]),
    ]
    frames = [frame_of([number, *request]) for number, request in enumerate(requests)]
    for call in (inline_call, None):
        folder = tmp_path / ("store" if call else "alone")
        store = await SqliteStore.open(folder, call)
        service = await StoreService.open(store, folder)
        answers = await asyncio.to_thread(exchange, folder, HELLO, b"".join(frames), num_answers=5)
        assert [answer[:2] for answer in answers[1:]] == [[number, None] for number in range(4)]
        assert len(answers[3][2]) == 8 * len(AGENTS)
        await service.close()
        await store.close()


@on_a_loop
async def test_g2_claims_sent_ahead_give_every_row_once(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        keys = await lent.call(claim_ahead, lent.folder)
        assert keys == all_keys()
        assert (await lent.counts()).num_acknowledged == 0  # its holder is gone
        await lent.wait_until_ready(len(keys))


def claim_ahead(folder: Path) -> list[SampleKey]:
    """Claim all rows, one claim ahead of the lease that is read, and return their keys."""
    keys: list[SampleKey] = []
    with StoreClient(folder, holder=HolderId("red#0")) as client:
        lease, sent = None, client.send_claim(POLICY, 0, "m0", max_rows=7, timeout_s=0.0)
        while granted := client.receive_claim(sent):
            sent = client.send_claim(POLICY, 0, f"m{len(keys) + 1}", max_rows=7, timeout_s=0.0, acknowledging=lease)
            lease, batch = granted
            assert batch.samples()[0].turn.response_tokens == tuple(batch.response_tokens(0))
            keys += lease.keys
        assert lease is not None
        client.acknowledge(lease)
        assert client._ask("progress", 0)[POLICY].num_acknowledged == len(keys)
    return keys


@on_a_loop
async def test_g2_half_a_put_is_no_put(tmp_path: Path) -> None:
    packed = [encode_trajectory(pack_finished(finished(number))) for number in range(8)]
    whole = frame_of([1, "put_finished", [packed]])
    async with owner(tmp_path / "store") as lent:
        await lent.store.open_step(dispatch())
        for part in (whole[: len(whole) // 2], whole[:-1]):
            with socket.socket(socket.AF_UNIX) as dying:
                dying.connect(str(lent.folder / SOCKET_NAME))
                await lent.call(dying.sendall, HELLO + part)
                while not lent.service._connections:
                    await asyncio.sleep(0.01)
            while lent.service._connections:
                await asyncio.sleep(0.01)
            assert await lent.store.progress(0) == {}
        await lent.call(exchange, lent.folder, HELLO, whole, num_answers=2)
        assert (await lent.counts()).num_ready == 8 * len(AGENTS)


@on_a_loop
async def test_g2_rows_of_a_consumer_killed_with_a_lease_are_trained_by_another_once(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        holder = await lent.start("holder", "red#0")
        assert await holder.hear() == ["claimed", 5]
        assert (await lent.counts()).num_leased == 5
        await holder.end(signal.SIGKILL)
        await lent.wait_until_ready(len(all_keys()))
        await train_rest_and_commit(lent, "red#1")


async def train_rest_and_commit(lent: Owner, name: str) -> None:
    worker = await lent.start("worker", name)
    _, micro_batches, keys = await worker.hear()
    assert sorted(keys) == sorted(map(str, all_keys()))
    await lent.store.commit(commit_of(micro_batches))
    assert await lent.store.trained_ids(0) == {POLICY: all_keys()}


@on_a_loop
async def test_g2_a_consumer_that_was_stopped_too_long_is_fenced_and_its_rows_train_once(tmp_path: Path) -> None:
    async with owner(tmp_path / "store", holder_timeout_s=1.0) as lent:
        await lent.fill()
        holder = await lent.start("holder", "red#0")
        assert await holder.hear() == ["claimed", 5]
        holder.process.send_signal(signal.SIGSTOP)
        await lent.wait_until_ready(len(all_keys()))
        worker = await lent.start("worker", "red#1")
        _, micro_batches, keys = await worker.hear()
        holder.go_on()
        holder.process.send_signal(signal.SIGCONT)
        for _ in range(2):  # acknowledge, then claim
            kind, message = await holder.hear()
            assert (kind, "red#0" in message) == ("FencedError", True)
        assert sorted(keys) == sorted(map(str, all_keys()))
        await lent.store.commit(commit_of(micro_batches))
        assert await lent.store.trained_ids(0) == {POLICY: all_keys()}


@on_a_loop
async def test_g2_slow_work_ends_no_lease(tmp_path: Path) -> None:
    async with owner(tmp_path / "store", holder_timeout_s=1.0) as lent:
        await lent.fill()
        worker = await lent.start("slow_worker", "red#0")
        assert await worker.hear() == ["done"]
        assert (await lent.counts()).num_acknowledged + (await lent.counts()).num_ready == len(all_keys())


@on_a_loop
async def test_g2_an_owner_that_was_stopped_itself_fences_nobody(tmp_path: Path) -> None:
    async with owner(tmp_path / "store", holder_timeout_s=1.0) as lent:
        await lent.fill()
        holder = await lent.start("holder", "red#0")
        assert await holder.hear() == ["claimed", 5]
        await asyncio.sleep(0.5)
        time.sleep(3.0)  # the owner's loop stands still, as it does while its machine sleeps
        await asyncio.sleep(0.3)
        holder.go_on()
        assert await holder.hear() == ["done"]


@on_a_loop
async def test_g2_two_consumers_never_share_a_row(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.store.open_step(dispatch())
        workers = [await lent.start("worker", f"red#{number}") for number in range(2)]
        await lent.start("producer")
        trained = [await worker.hear() for worker in workers]
        await lent.store.commit(commit_of([name for _, micro_batches, _ in trained for name in micro_batches]))
        assert sorted(trained[0][2] + trained[1][2]) == sorted(map(str, all_keys()))
        assert await lent.store.trained_ids(0) == {POLICY: all_keys()}


@on_a_loop
async def test_rows_of_a_consumer_that_ends_in_order_are_ready_again(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        worker = await lent.start("worker", "red#0")
        assert (await worker.hear())[0] == "trained"
        assert (await lent.counts()).num_acknowledged == len(all_keys())
        worker.go_on()
        await worker.end()
        await lent.wait_until_ready(len(all_keys()))


# --- one client -------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_every_call_crosses_the_socket(tmp_path: Path) -> None:
    columns = {POLICY: PolicyColumns(scalars={"level": "int"}, required=frozenset({TokenColumn.OLD_LOGPROBS}))}
    async with owner(tmp_path / "store", columns=columns) as lent:
        await lent.call(play_whole_step, lent.folder)
        assert await lent.store.last_commit() is not None


def play_whole_step(folder: Path) -> None:
    """Play a step in which every call has its place."""
    step = DispatchRecord(step=0, min_version=0, max_version=0, queries=(7,), num_trajectories=3)
    whole, other, failed = (finished(number) for number in range(3))
    with StoreClient(folder, holder=HolderId("red#0")) as client:
        client.open_step(step)
        assert [each.dispatch for each in client.open_steps()] == [step]
        client.put_finished([whole])
        assert client.begin_attempt(other.outcome.trajectory) == 0
        for turn in other.turns:
            client.put_turn(turn)
        client.record_outcome(other.outcome)
        assert client.begin_attempt(failed.outcome.trajectory) == 0
        client.record_failure(
            TrajectoryFailure(trajectory=failed.outcome.trajectory, attempt=0, kind="timeout", message="too late")
        )
        values = [AdvantageValue(key=turn.key, advantage=0.5, reward=1.0) for turn in other.turns]
        client.fill(POLICY, values)
        assert client.ready(POLICY, 0) == []
        keys = [turn.key for each in (whole, other) for turn in each.turns]
        old = [TokenValues(key=key, values=(-0.5,) * 400) for key in keys]
        client.fill_tokens(POLICY, TokenColumn.OLD_LOGPROBS, old)
        assert client.ready(POLICY, 0) == [(key, 500) for key in keys]
        client.mask(POLICY, keys[:1], "group_of_one")
        lease, samples = client.lease(POLICY, "m0", [keys[2], keys[1]])
        assert lease.keys == (keys[2], keys[1])
        assert [sample.turn for sample in samples] == [other.turns[0], whole.turns[1]]
        assert samples[0].token_columns == {TokenColumn.OLD_LOGPROBS: (-0.5,) * 400}
        client.acknowledge(lease)
        seal = Seal(
            policy=POLICY,
            step=0,
            object_key=ObjectKey("seal", POLICY, 1),
            predecessor=None,
            micro_batches=("m0",),
            denominators=Denominators(num_samples=2),
        )
        client.seal(seal)
        assert client.current_seal(POLICY, 0) == seal
        granted = client.claim(POLICY, 0, "m1", max_rows=9, timeout_s=TIMEOUT_S)
        assert granted is not None
        assert [sample.turn for sample in granted[1]] == [other.turns[1]]
        assert (granted[1][0].advantage, granted[1][0].reward) == (0.5, 1.0)
        client.acknowledge(granted[0])
        assert client.claim(POLICY, 0, "m2", max_rows=9, timeout_s=0.01) is None
        assert client.progress(0) == {POLICY: PolicyProgress(num_acknowledged=1, num_sealed=2, num_masked=1)}
        record = commit_of(["m0", "m1"])
        client.commit(record)
        assert client.last_commit() == record
        assert client.commits_after(0) == [record]
        assert client.pruned_version() == 0
        assert client.trained_ids(0) == {POLICY: keys[1:]}
        assert [sample.turn.key for sample in client.micro_batch(POLICY, 0, "m0")] == [keys[2], keys[1]]


@on_a_loop
async def test_errors_cross_as_the_same_class(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        await lent.call(provoke_errors, lent.folder)


def provoke_errors(folder: Path) -> None:
    keys = all_keys()
    with StoreClient(folder, holder=HolderId("red#0")) as client:
        lease, _ = client.lease(POLICY, "m0", keys[:2])
        with pytest.raises(CapacityError, match="m1.*not ready"):
            client.lease(POLICY, "m1", keys[1:3])
        others = "for 'red#0' on the connection of 'red#1'"
        with StoreClient(folder, holder=HolderId("red#1")) as other, pytest.raises(InvariantError, match=others):
            other.acknowledge(lease)
        with pytest.raises(InvariantError, match="connected already"):
            StoreClient(folder, holder=HolderId("red#0"))
        with StoreClient(folder) as nobody, pytest.raises(InvariantError, match="needs a holder"):
            nobody.claim(POLICY, 0, "m2", max_rows=1, timeout_s=0.0)
        changed = finished(0)
        changed = FinishedTrajectory(outcome=changed.outcome, turns=changed.turns, advantages=(9.0, 9.0))
        with pytest.raises(InvariantError):
            client.put_finished([changed])
        infinite = finished(1)
        outcome = OutcomeRecord(
            trajectory=infinite.outcome.trajectory,
            attempt=0,
            rewards=dict.fromkeys(AGENTS, float("inf")),
            turns=infinite.outcome.turns,
        )
        with pytest.raises(ConfigError, match="inf"):
            client.put_finished(
                [FinishedTrajectory(outcome=outcome, turns=infinite.turns, advantages=infinite.advantages)]
            )
        with pytest.raises(StoreError, match="out of range"):
            client.ready(POLICY, 2**70)
        client.acknowledge(lease)


@on_a_loop
async def test_g7_a_client_of_an_owner_that_is_gone_or_silent_says_so(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        client = await lent.call(StoreClient, lent.folder, holder=HolderId("red#0"))
        waiting = asyncio.create_task(lent.call(claim_and_catch, client))
        while not any(connection._open for connection in lent.service._connections):
            await asyncio.sleep(0.01)
        await lent.service.close()
        assert "gone" in str(await waiting)
        with pytest.raises(StoreError, match="closed"):
            client.ready(POLICY, 0)
        client.close()
        with pytest.raises(StoreError, match="start its owner first"):
            StoreClient(lent.folder)
        assert not (lent.folder / SOCKET_NAME).exists()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET_NAME))
        silent.listen()
        with pytest.raises(StoreError, match=r"did not answer for 0\.2 s"):
            StoreClient(tmp_path, call_timeout_s=0.2)


def claim_and_catch(client: StoreClient) -> StoreError:
    with pytest.raises(StoreError) as caught:
        client.claim(POLICY, 0, "m0", max_rows=1, timeout_s=TIMEOUT_S)
    return caught.value


@on_a_loop
async def test_the_socket_is_private_and_survives_a_long_path_and_a_dead_owner(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / "store"
    folder.mkdir(parents=True)
    assert len(os.fsencode(folder)) > 108
    (folder / SOCKET_NAME).touch()  # a dead owner's
    async with owner(folder) as lent:
        mode = (folder / SOCKET_NAME).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        await lent.fill()
        client = await lent.call(StoreClient, folder)
        assert len(await lent.call(client.ready, POLICY, 0)) == len(all_keys())
        client.close()


@on_a_loop
async def test_a_client_is_shared_by_threads(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        client = await lent.call(StoreClient, lent.folder)
        answers = await asyncio.gather(
            *(lent.call(client.ready, POLICY, step % 2) for step in range(20)),
        )
        assert [len(answer) for answer in answers] == [len(all_keys()), 0] * 10
        client.close()


# --- clients that send what they like ---------------------------------------------------------------------------------


def frame(content: object) -> bytes:
    body: bytes = msgpack.packb(content)
    return struct.pack(">I", len(body)) + body


HELLO = frame([0, "hello", [1, None]])

MALFORMED: dict[str, tuple[bytes, str]] = {
    "text": (b"GET / HTTP/1.1\r\n\r\n", "claims"),
    "oversized": (struct.pack(">I", 2**31), "over the limit"),
    "not msgpack": (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "not msgpack"),
    "trailing bytes": (struct.pack(">I", 2) + b"\x01\x02", "not msgpack"),
    "no request": (HELLO + frame("hello"), "a request is"),
    "nested": (struct.pack(">I", 5000) + b"\x91" * 4999 + b"\x01", "not msgpack"),
}
REFUSED: dict[str, tuple[object, str, str]] = {
    "unknown operation": ([1, "drop_everything", []], "ConfigError", "unknown operation"),
    "not lent": ([1, "rewind", [0]], "ConfigError", "unknown operation"),
    "private": ([1, "__init__", []], "ConfigError", "unknown operation"),
    "few arguments": ([1, "ready", []], "ConfigError", "policy, step"),
    "arguments by name": ([1, "ready", {"policy": "red"}], "ConfigError", "policy, step"),
    "wrong type": ([1, "ready", ["red", "zero"]], "ConfigError", "expected int"),
    "wrong record": ([1, "open_step", [{"step": 0}]], "ConfigError", "missing"),
    "no trajectories": ([1, "put_finished", [[[1, 2, 3]]]], "ConfigError", "trajectory"),
    "second hello": ([1, "hello", [1, None]], "ConfigError", "begins with one"),
    "beat of nobody": ([1, "beat", ["red#9"]], "FencedError", "is over"),
    "other's holder": ([1, "claim", ["red", 0, "red#9", "m", 1, 0.0, None]], "InvariantError", "red#9"),
}


def exchange(folder: Path, *frames: bytes, num_answers: int | None = None) -> list[Any]:
    """Send frames and return so many answers, or all until the other end hangs up."""
    answers: list[Any] = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(str(folder / SOCKET_NAME))
        sock.sendall(b"".join(frames))
        with sock.makefile("rb") as stream:
            while len(answers) != num_answers and (head := stream.read(4)):
                answers.append(msgpack.unpackb(stream.read(*struct.unpack(">I", head))))
    return answers


@pytest.mark.parametrize("name", MALFORMED)
@on_a_loop
async def test_g10_malformed_frames_are_answered_with_the_reason_and_hurt_nobody(tmp_path: Path, name: str) -> None:
    sent, reason = MALFORMED[name]
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        client = await lent.call(StoreClient, lent.folder)
        number, kind, message = (await lent.call(exchange, lent.folder, sent))[-1]
        assert (number, kind) == (None, "StoreError")
        assert reason in message
        assert len(await lent.call(client.ready, POLICY, 0)) == len(all_keys())
        client.close()


@pytest.mark.parametrize("name", REFUSED)
@on_a_loop
async def test_g10_bad_requests_are_refused_one_by_one(tmp_path: Path, name: str) -> None:
    request, kind, reason = REFUSED[name]
    async with owner(tmp_path / "store") as lent:
        good = frame([2, "ready", ["red", 0]])
        answers = await lent.call(exchange, lent.folder, HELLO, frame(request), good, num_answers=3)
        assert [answer[1] for answer in answers] == [None, kind, None]
        assert reason in answers[1][2]


@on_a_loop
async def test_a_version_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        sent = frame([1, "hello", [99, None]]), frame([2, "open_steps", []])
        answers = await lent.call(exchange, lent.folder, *sent, num_answers=2)
        assert [answer[1] for answer in answers] == ["ConfigError", "ConfigError"]
        assert "version 99" in answers[0][2]


@on_a_loop
async def test_a_lease_that_is_too_large_to_answer_goes_back(tmp_path: Path) -> None:
    async with owner(tmp_path / "store", max_frame_bytes=20_000) as lent:
        await lent.fill()
        client = await lent.call(StoreClient, lent.folder, holder=HolderId("red#0"))
        with pytest.raises(StoreError, match="fewer rows"):
            await lent.call(client.claim, POLICY, 0, "m0", max_rows=60, timeout_s=1.0)
        await lent.wait_until_ready(len(all_keys()))
        client.close()


@on_a_loop
async def test_a_client_that_takes_no_answers_holds_up_nobody(tmp_path: Path) -> None:
    async with owner(tmp_path / "store") as lent:
        await lent.fill()
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(lent.folder / SOCKET_NAME))
            deaf.setblocking(False)
            deaf.send(HELLO)
            request = frame([1, "ready", ["red", 0]])
            num_sent = num_refused = 0
            while num_sent < 20_000 and num_refused < 20:
                try:
                    deaf.send(request)
                    num_sent, num_refused = num_sent + 1, 0
                except BlockingIOError:
                    num_refused += 1
                    await asyncio.sleep(0.05)
            # Nobody reads on, so that neither side piles up what the other does not take.
            assert num_sent < 20_000
            client = await lent.call(StoreClient, lent.folder)
            assert len(await lent.call(client.ready, POLICY, 0)) == len(all_keys())
            client.close()


@on_a_loop
async def test_close_leaves_no_thread(tmp_path: Path) -> None:
    async with owner(tmp_path / "store", holder_timeout_s=0.2) as lent:
        client = await lent.call(StoreClient, lent.folder, holder=HolderId("red#0"))
        await asyncio.sleep(0.3)
        await lent.call(client.close)
        client.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("heartbeat")]


if __name__ == "__main__":
    role, path, holder_name = sys.argv[1:]
    with StoreClient(Path(path), holder=HolderId(holder_name) if holder_name else None) as lent_store:
        ROLES[role](lent_store)
