"""Processes of the local runtime are killed or stopped: nothing waits for ever, nothing is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexmarl.core.messages import WorkerExited, WorkerReady
from flexmarl.runtime.local import frame_socket, process_worker, registry
from flexmarl.testing.processes import is_running, local_runtime, wait_until_gone
from flexmarl.testing.workers import FactLog, Note, script_spec

pytestmark = pytest.mark.crash


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the records of these tests apart from those of other runs of this user."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# --- a worker ---------------------------------------------------------------------------------------------------------


def test_g7_sigkill_of_a_worker_is_a_fact_after_all_it_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            other = runtime.start(script_spec("other"), log)
            for number in range(20):
                worker.send(Note(text="twice", number=number, content=b"x" * 20_000))
            worker.send(Note(text="spawn"))
            worker.send(Note(text="compute"))
            ready = await log.wait_until_ready("worker")
            helper = (await log.wait_for("worker", Note, count=42))[40].number
            assert is_running(helper)
            os.kill(ready.pid, signal.SIGKILL)
            worker.send(Note(text="echo"))
            exited = await log.wait_until_exited("worker")
            assert exited == WorkerExited(reason="signal SIGKILL", is_expected=False)
            assert log.of("worker")[-1] == exited
            await wait_until_gone([ready.pid, helper])
            other.send(Note(text="echo"))
            await log.wait_for("other", Note)

    asyncio.run(scenario())


def test_an_exit_is_not_told_before_what_is_still_in_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_socket, "_READ_BYTES", 1000)

    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            await log.wait_until_ready("worker")
            worker.send(Note(text="echo", content=b"x" * 100_000))
            worker.send(Note(text="exit"))
            time.sleep(0.3)
            assert (await log.wait_until_exited("worker")).reason == "exit code 0"
            assert [type(fact) for fact in log.of("worker")] == [WorkerReady, Note, WorkerExited]

    asyncio.run(scenario())


def test_g7_a_stopped_worker_is_killed_for_its_silence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, heartbeat_timeout_s=0.5) as runtime:
            log = FactLog()
            runtime.start(script_spec(), log)
            ready = await log.wait_until_ready("worker")
            await asyncio.sleep(0.8)  # alive for longer than the timeout
            began_s = time.monotonic()
            os.kill(ready.pid, signal.SIGSTOP)
            exited = await log.wait_until_exited("worker")
            assert exited == WorkerExited(reason="no heartbeat for 0.5 s", is_expected=False)
            assert 0.3 < time.monotonic() - began_s < 2.0
            await wait_until_gone([ready.pid])

    asyncio.run(scenario())


def test_g7_what_a_worker_started_elsewhere_is_gone_with_the_run(tmp_path: Path) -> None:
    async def scenario() -> int:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            worker.send(Note(text="spawn", number=1))
            (note,) = await log.wait_for("worker", Note)
            worker.kill()
            await log.wait_until_exited("worker")
            assert is_running(note.number)  # in a session of its own
            return note.number

    helper = asyncio.run(scenario())
    asyncio.run(wait_until_gone([helper]))


# --- the fork server --------------------------------------------------------------------------------------------------


def test_g7_sigkill_of_the_fork_server_ends_its_workers_and_the_next_start_has_a_new_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            computing = runtime.start(script_spec("computing"), log)
            runtime.start(script_spec("idle"), log)
            computing.send(Note(text="spawn", number=1))
            computing.send(Note(text="compute"))
            pids = [(await log.wait_until_ready(name)).pid for name in ("computing", "idle")]
            helper = (await log.wait_for("computing", Note, count=2))[0].number
            old_server = runtime.fork_server_pid
            assert old_server is not None
            os.kill(old_server, signal.SIGKILL)
            queued = runtime.start(script_spec("queued"), log)  # before its death is known
            queued.send(Note(text="echo"))
            for name in ("computing", "idle", "queued"):
                exited = await log.wait_until_exited(name)
                assert exited == WorkerExited(reason="its fork server ended: signal SIGKILL", is_expected=False)
                assert log.of(name)[-1] == exited
            await wait_until_gone([*pids, helper, old_server])
            runtime.start(script_spec("idle"), log).send(Note(text="echo"))
            await log.wait_for("idle", WorkerReady, count=2)
            await log.wait_for("idle", Note)
            assert runtime.fork_server_pid != old_server

    asyncio.run(scenario())


def test_g7_a_fork_server_that_hangs_is_killed_with_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "KILL_GRACE_S", 0.5)

    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(), log)
            ready = await log.wait_until_ready("worker")
            assert runtime.fork_server_pid is not None
            os.kill(runtime.fork_server_pid, signal.SIGSTOP)
            worker.kill()
            assert await log.wait_until_exited("worker") == WorkerExited(reason="signal SIGKILL", is_expected=True)
            await wait_until_gone([ready.pid])

    asyncio.run(scenario())


# --- the orchestrator -------------------------------------------------------------------------------------------------

_ORCHESTRATOR = """
import asyncio, json, sys
from pathlib import Path
from flexmarl.testing.processes import local_runtime
from flexmarl.testing.workers import FactLog, Note, script_spec

async def main():
    async with local_runtime(Path(sys.argv[1]), heartbeat_timeout_s=0.6, preload=sys.argv[2:]) as runtime:
        folder = str(runtime.object_folder)
        if sys.argv[2:]:
            print(json.dumps({"server": runtime.fork_server_pid, "folder": folder}), flush=True)
        log = FactLog()
        pids = []
        for name in ("computing", "idle"):
            worker = runtime.start(script_spec(name), log)
            pids.append((await log.wait_until_ready(name)).pid)
        runtime_worker = runtime.start(script_spec("parent"), log)
        pids.append((await log.wait_until_ready("parent")).pid)
        for session in (0, 1):
            runtime_worker.send(Note(text="spawn", number=session))
        helpers = [note.number for note in await log.wait_for("parent", Note, count=2)]
        runtime_worker.send(Note(text="compute"))
        print(json.dumps({"server": runtime.fork_server_pid, "workers": pids, "helpers": helpers, "folder": folder}),
              flush=True)
        while True:
            await asyncio.sleep(0.1)
            print(json.dumps(log.of("idle")[1:], default=str), flush=True)

asyncio.run(main())
"""


@dataclass
class _Run:
    process: subprocess.Popen[str]
    server: int
    workers: list[int]
    helpers: list[int]
    folder: Path

    @property
    def pids(self) -> list[int]:
        return [self.server, *self.workers, *self.helpers]


@pytest.fixture
def orchestrator(tmp_path: Path) -> Iterator[_Run]:
    """An orchestrator in a process of its own, with a computing worker and helpers."""
    run_dir = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", _ORCHESTRATOR, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            started = json.loads(process.stdout.readline())
            run = _Run(process=process, **{**started, "folder": Path(started["folder"])})
            assert run.folder.is_dir()
            assert all(is_running(pid) for pid in run.pids)
            yield run
        finally:
            process.kill()
            process.wait()
            registry.reap_stale()


def test_g7_sigkill_of_the_orchestrator_leaves_no_process_and_no_objects(
    orchestrator: _Run, own_registry: Path
) -> None:
    assert list(own_registry.rglob("*.json"))
    orchestrator.process.kill()
    asyncio.run(wait_until_gone(orchestrator.pids))
    assert not orchestrator.folder.exists()
    assert not list(own_registry.rglob("*.json"))


def test_g7_what_survives_the_orchestrator_and_its_fork_server_is_reaped_by_the_next_run(
    orchestrator: _Run, tmp_path: Path
) -> None:
    session_helper = orchestrator.helpers[1]
    os.kill(orchestrator.server, signal.SIGSTOP)  # it cannot act any more
    orchestrator.process.kill()
    asyncio.run(wait_until_gone(orchestrator.workers))  # also the computing one: it watches its socket
    os.kill(orchestrator.server, signal.SIGKILL)
    asyncio.run(wait_until_gone([orchestrator.server]))
    assert orchestrator.folder.is_dir()
    assert is_running(session_helper)
    orchestrator.process.wait()

    async def next_run() -> None:
        async with local_runtime(tmp_path / "next", inline=True):
            await wait_until_gone(orchestrator.pids, timeout_s=0.5)
            assert not orchestrator.folder.exists()

    asyncio.run(next_run())


def test_g7_workers_die_with_their_fork_server_while_the_orchestrator_cannot_act(orchestrator: _Run) -> None:
    os.kill(orchestrator.process.pid, signal.SIGSTOP)
    os.kill(orchestrator.server, signal.SIGKILL)
    asyncio.run(wait_until_gone(orchestrator.workers))


def test_a_live_run_is_not_reaped(orchestrator: _Run) -> None:
    assert registry.reap_stale() == []
    assert orchestrator.folder.is_dir()
    assert all(is_running(pid) for pid in orchestrator.pids)


def test_g7_a_stopped_and_continued_orchestrator_keeps_its_workers(orchestrator: _Run) -> None:
    os.kill(orchestrator.process.pid, signal.SIGSTOP)
    time.sleep(1.5)  # more than twice the heartbeat timeout
    os.kill(orchestrator.process.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert all(is_running(pid) for pid in orchestrator.pids)


@pytest.mark.parametrize("is_importing", [True, False])
def test_g7_sigkill_of_the_orchestrator_while_the_fork_server_starts(tmp_path: Path, *, is_importing: bool) -> None:
    mark = tmp_path / "importing"
    (tmp_path / "slow_module.py").write_text(
        f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", _ORCHESTRATOR, str(tmp_path / "run"), "slow_module"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert process.stdout is not None
    with process:
        started = json.loads(process.stdout.readline())
        while is_importing and not mark.exists():
            time.sleep(0.01)
        process.kill()
        asyncio.run(wait_until_gone([started["server"]]))
    assert not Path(started["folder"]).exists()


def test_a_reused_process_id_is_never_killed(tmp_path: Path) -> None:
    """A record whose orchestrator's id now belongs to another process is stale; that process is not touched."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        folder = tmp_path / "objects"
        folder.mkdir()
        (folder / "flexmarl-objects").touch()
        mine = registry.new_record(run_id="old", run_dir=tmp_path, mark="0" * 32, object_folder=folder)
        record = registry.RunRecord(
            run_id="old",
            run_dir=mine.run_dir,
            pid=stranger.pid,
            start_ticks=mine.start_ticks - 1,
            scope=mine.scope,
            mark=mine.mark,
            object_folder=mine.object_folder,
        )
        path = registry.register(record)
        assert registry.reap_stale() == ["old"]
        assert not folder.exists()
        assert not path.exists()
        assert stranger.poll() is None
        stranger.kill()


def test_records_of_another_boot_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    mine = registry.new_record(run_id="far", run_dir=tmp_path, mark="1" * 32, object_folder=folder)
    path = registry.register(
        registry.RunRecord(
            run_id="far",
            run_dir=mine.run_dir,
            pid=1,
            start_ticks=1,
            scope="another boot/pid:[1]",
            mark=mine.mark,
            object_folder=mine.object_folder,
        )
    )
    assert registry.reap_stale() == []
    assert folder.exists()
    assert path.exists()
