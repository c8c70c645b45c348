"""The local runtime with real processes: messages, errors, deadlines."""

import asyncio
import functools
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import ObjectKey, WorkerId
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.messages import WorkerExited, WorkerReady
from flexmarl.core.protocols import ServiceKind, WorkerSpec
from flexmarl.runtime.local import process_worker, wire
from flexmarl.testing.processes import is_running, local_runtime, wait_until_gone
from flexmarl.testing.workers import FactLog, Note, script_spec

pytestmark = pytest.mark.integration


def test_messages_come_back_complete_and_in_order_also_large_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            sent = [Note(text="echo", number=number, content=b"x" * (number % 7)) for number in range(1000)]
            sent[500] = Note(text="echo", number=500, content=os.urandom(5_000_000))
            for note in sent:  # queued before the process exists
                worker.send(note)
            await log.wait_for("worker", Note, count=1000)
            assert log.notes("worker") == sent
            first = log.of("worker")[0]
            assert isinstance(first, WorkerReady)
            assert first.pid == worker.pid != os.getpid()

    asyncio.run(scenario())


def test_a_flood_in_both_directions_blocks_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            content = os.urandom(1_000_000)
            for number in range(30):
                worker.send(Note(text="twice", number=number, content=content))
            notes = await log.wait_for("worker", Note, count=60)
            assert [note.number for note in notes] == [number // 2 for number in range(60)]
            assert all(note.content == content for note in notes)

    asyncio.run(scenario())


def test_text_that_is_not_valid_unicode_survives(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(start_error="file \udcff"), log)
            assert (await log.wait_until_exited("worker")).reason == "ValueError: file \udcff"
            worker.send(Note(text="echo"))  # to a worker that is gone: nothing

    asyncio.run(scenario())


def test_a_message_over_the_frame_limit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "encode_record", functools.partial(wire.encode_record, max_bytes=1000))

    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            with pytest.raises(
                BackendError, match="message test_note: a command frame of 20.. bytes is over the limit"
            ):
                worker.send(Note(text="echo", content=b"x" * 2000))
            worker.send(Note(text="echo"))
            await log.wait_for("worker", Note)

    asyncio.run(scenario())


def test_service_error_becomes_the_reason_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec("solver#0"), log)
            worker.send(Note(text="echo", number=1))
            worker.send(Note(text="fail"))
            exited = await log.wait_until_exited("solver#0")
            assert exited == WorkerExited(reason="ValueError: asked to fail", is_expected=False)
            assert log.of("solver#0")[1:] == [Note(text="echo", number=1), exited]
            text = (tmp_path / "logs" / "solver#0.log").read_text()
            assert "Traceback" in text
            assert text.rstrip().endswith("closed")  # also after an error

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (script_spec(start_error="no model"), "ValueError: no model"),
        (
            WorkerSpec(worker_id=WorkerId("worker"), kind=ServiceKind.INSTANCE, factory="no_such_module_x:make"),
            "ModuleNotFoundError: No module named 'no_such_module_x'",
        ),
        (
            WorkerSpec(worker_id=WorkerId("worker"), kind=ServiceKind.INSTANCE, factory="flexmarl.testing.workers:nix"),
            "ConfigError: worker worker: module flexmarl.testing.workers has no function 'nix'",
        ),
    ],
)
def test_a_service_that_cannot_be_built_exits_without_being_ready(
    tmp_path: Path, spec: WorkerSpec, reason: str
) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            runtime.start(spec, log)
            exited = await log.wait_until_exited("worker")
            assert log.of("worker") == [exited]
            assert exited == WorkerExited(reason=reason, is_expected=False)

    asyncio.run(scenario())


def test_exits_are_told_by_code(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            runtime.start(script_spec(), log).send(Note(text="exit", number=3))
            assert await log.wait_until_exited("worker") == WorkerExited(reason="exit code 3", is_expected=False)

    asyncio.run(scenario())


def test_stop_is_asked_and_the_id_is_free_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            with pytest.raises(InvariantError, match="worker worker started while one of this id runs"):
                runtime.start(script_spec(), log)
            await log.wait_until_ready("worker")
            worker.stop()
            worker.stop()
            assert await log.wait_until_exited("worker") == WorkerExited(reason="asked", is_expected=True)
            second = runtime.start(script_spec(), log)
            await log.wait_for("worker", WorkerReady, count=2)
            second.kill()
            assert (await log.wait_for("worker", WorkerExited, count=2))[1].reason == "signal SIGKILL"

    asyncio.run(scenario())


def test_g7_a_worker_that_does_not_stop_is_killed_after_the_timeout(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, stop_timeout_s=0.3) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            worker.send(Note(text="compute"))
            ready = await log.wait_until_ready("worker")
            await log.wait_for("worker", Note)
            began_s = time.monotonic()
            worker.stop()
            exited = await log.wait_until_exited("worker")
            assert exited == WorkerExited(reason="asked; killed after 0.3 s", is_expected=True)
            assert 0.3 <= time.monotonic() - began_s < 2.0
            await wait_until_gone([ready.pid])

    asyncio.run(scenario())


def test_g7_a_worker_that_does_not_become_ready_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, start_timeout_s=1.0) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(start_s=60.0), log)
            exited = await log.wait_until_exited("worker")
            assert exited == WorkerExited(reason="not ready within 1 s", is_expected=False)
            assert worker.pid is not None
            await wait_until_gone([worker.pid])

    asyncio.run(scenario())


def test_work_that_takes_longer_than_the_heartbeat_timeout_is_not_silence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, heartbeat_timeout_s=0.4) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            worker.send(Note(text="sleep", number=1500))
            worker.send(Note(text="echo"))
            await log.wait_for("worker", Note)

    asyncio.run(scenario())


def test_g7_a_blocked_orchestrator_loop_kills_no_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, heartbeat_timeout_s=0.4) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            await log.wait_until_ready("worker")
            time.sleep(1.2)
            await asyncio.sleep(0.5)
            worker.send(Note(text="echo"))
            await log.wait_for("worker", Note)
            assert not [fact for fact in log.of("worker") if isinstance(fact, WorkerExited)]

    asyncio.run(scenario())


def test_cost_delays_a_step_and_commands_wait_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(cost_s=0.3), log)
            await log.wait_until_ready("worker")
            began_s = time.monotonic()
            worker.send(Note(text="queued"))
            await asyncio.sleep(0.1)
            worker.send(Note(text="queued"))
            worker.send(Note(text="queued"))
            notes = await log.wait_for("worker", Note, count=3)
            assert [note.number for note in notes] == [0, 1, 0]
            assert log.times_s[1] - began_s >= 0.3

    asyncio.run(scenario())


def test_calls_run_in_order_in_one_thread_and_raise_what_they_raise(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, inline=True) as runtime:
            seen: list[tuple[int, int]] = []

            def note(number: int) -> int:
                time.sleep(0.01 if number == 0 else 0.0)
                seen.append((number, threading.get_ident()))
                if number == 2:
                    raise ValueError("two")
                return number

            unheard = asyncio.ensure_future(runtime.call(note, 9))
            results = asyncio.gather(*(runtime.call(note, number) for number in range(4)), return_exceptions=True)
            await asyncio.sleep(0)
            unheard.cancel()  # an accepted call runs all the same
            assert [str(each) for each in await results] == ["0", "1", "two", "3"]
            assert [number for number, _ in seen] == [9, 0, 1, 2, 3]
            assert len({thread for _, thread in seen}) == 1 != threading.get_ident()

    asyncio.run(scenario())


def test_objects_and_thread_settings_reach_the_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, threads_per_process=2) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            worker.send(Note(text="environment", content=b"OMP_NUM_THREADS"))
            worker.send(Note(text="environment", content=b"FLEXMARL_WORKERS_OF"))
            threads, mark = await log.wait_for("worker", Note, count=2)
            assert threads.text == "2"
            assert mark.text.endswith("/1")
            packed = PackedObject(layout=plan_layout([("a", "uint8", (3,), 3)]), buffer=memoryview(b"abc" + bytes(61)))
            key = ObjectKey(kind="weights", owner="solver", version=1)
            runtime.objects.set(key, packed).result(5.0)
            worker.send(Note(text="object", content=b"weights/solver/1"))
            assert (await log.wait_for("worker", Note, count=3))[2].content == b"abc"

    asyncio.run(scenario())


def test_g7_close_ends_everything_within_a_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, stop_timeout_s=0.3) as runtime:
            log = FactLog()
            for name in ("busy", "idle"):
                runtime.start(script_spec(name), log)
            busy, idle = await log.wait_until_ready("busy"), await log.wait_until_ready("idle")
            server_pid = runtime.fork_server_pid
            assert server_pid is not None
            runtime.start(script_spec("late"), log).send(Note(text="compute"))
            late = await log.wait_until_ready("late")
            await log.wait_for("late", Note)
            began_s = time.monotonic()
            await asyncio.gather(runtime.close(), runtime.close())
            assert time.monotonic() - began_s < 3.0
            for name in ("busy", "idle", "late"):
                assert [type(fact) for fact in log.of(name)][-1:] == [WorkerExited]
                assert sum(isinstance(fact, WorkerExited) for fact in log.of(name)) == 1
            assert not [pid for pid in (busy.pid, idle.pid, late.pid, server_pid) if is_running(pid)]
            with pytest.raises(InvariantError, match="closed runtime"):
                runtime.start(script_spec(), log)
            with pytest.raises(InvariantError, match="closed runtime"):
                await runtime.call(int)

    before = set(threading.enumerate())
    asyncio.run(scenario())
    assert set(threading.enumerate()) <= before


def test_a_wrong_preload_names_the_module(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, preload=["no_such_module_y"]) as runtime:
            log = FactLog()
            runtime.start(script_spec(), log)
            exited = await log.wait_until_exited("worker")
            assert exited.reason == (
                "its fork server ended: cannot import the preloaded modules: "
                "ModuleNotFoundError: No module named 'no_such_module_y'"
            )

    asyncio.run(scenario())


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_sigint_is_for_the_orchestrator_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            ready = await log.wait_until_ready("worker")
            assert runtime.fork_server_pid is not None
            os.kill(ready.pid, signal.SIGINT)
            os.kill(runtime.fork_server_pid, signal.SIGINT)
            worker.send(Note(text="echo"))
            await log.wait_for("worker", Note)
            assert os.getpgid(ready.pid) == ready.pid
            assert name_of(ready.pid) == "fm:worker"

    asyncio.run(scenario())


def test_preloaded_torch_computes_in_the_fork(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, preload=["torch"]) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            worker.send(Note(text="torch"))
            (note,) = await log.wait_for("worker", Note, timeout_s=90.0)
            assert note.content == b"262144.0 1"

    asyncio.run(scenario())
