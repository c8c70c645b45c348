"""Episode workers in processes of their own: the same facts as in a thread, whatever user code does to its process."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.messages import LoopBlocked, WorkerExited
from flexmarl.runtime.local.supervisor import LocalRuntime
from flexmarl.runtime.local.wire import FrameKind, encode_frame
from flexmarl.testing import workers
from flexmarl.testing.processes import is_running, local_runtime, wait_until_gone
from flexmarl.testing.workers import FactLog, Note, episode_spec

pytestmark = pytest.mark.integration

Scenario = Callable[[LocalRuntime, FactLog], Awaitable[None]]


def run(folder: Path, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        async with local_runtime(folder, **settings) as runtime:
            await scenario(runtime, FactLog())

    asyncio.run(main())


def log_of(folder: Path, worker: str = "episodes") -> str:
    return (folder / "logs" / f"{worker}.log").read_text()


def test_a_process_gives_the_same_facts_as_a_thread(tmp_path: Path) -> None:
    stories: list[dict[str, list[object]]] = []

    async def story(runtime: LocalRuntime, log: FactLog, *, is_process: bool) -> None:
        def start(name: str, **options: Any) -> Any:
            return runtime.start(episode_spec(name, is_process=is_process, **options), log)

        talker = start("talker")
        for number in (400, 200, 0):  # before its service is built
            talker.send(Note(text="wait", number=number, content=b"x" * number))
        start("failing").send(Note(text="fail"))
        start("unbuilt", start_error="no workflow")
        start("stopped").send(Note(text="stop_loop"))
        stuck = start("stuck")
        stuck.send(Note(text="block", number=1500))
        await log.wait_for("talker", Note, count=3)
        await log.wait_until_ready("stuck")
        await asyncio.sleep(0.1)
        for worker in (talker, stuck):
            worker.stop()
        names = ["talker", "failing", "unbuilt", "stopped", "stuck"]
        for name in names:
            await log.wait_until_exited(name)
        stories.append({name: [f for f in log.of(name) if isinstance(f, (Note, WorkerExited))] for name in names})

    for is_process in (True, False):

        async def scenario(runtime: LocalRuntime, log: FactLog, is_process: bool = is_process) -> None:
            await story(runtime, log, is_process=is_process)

        run(tmp_path / str(is_process), scenario, stop_timeout_s=0.5)
    assert stories[0] == stories[1]
    assert {name: facts[-1] for name, facts in stories[0].items()} == {
        "talker": WorkerExited(reason="asked", is_expected=True),
        "failing": WorkerExited(reason="ValueError: asked to fail", is_expected=False),
        "unbuilt": WorkerExited(reason="ValueError: no workflow", is_expected=False),
        "stopped": WorkerExited(
            reason="user code ended its event loop: RuntimeError: Event loop stopped before Future completed.",
            is_expected=False,
        ),
        "stuck": WorkerExited(reason="asked; killed after 0.5 s", is_expected=True),
    }


def test_inline_keeps_episode_workers_in_threads(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        assert (await log.wait_until_ready("episodes")).pid == os.getpid()
        assert worker.pid is None

    run(tmp_path, scenario, inline=True)


def test_user_code_sees_the_orchestrators_arguments_path_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", "--of-the-user"])
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        worker.send(Note(text="place"))
        (place,) = await log.wait_for("episodes", Note)
        argv, path, folder, pid = json.loads(place.text)
        assert (argv, path, folder) == (sys.argv, sys.path, str(tmp_path / "here"))
        assert pid == worker.pid != os.getpid()

    run(tmp_path, scenario)


def test_modules_of_the_user_are_imported_by_each_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_the_user.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        for name in ("one", "two"):
            worker = runtime.start(episode_spec(name, is_process=True), log)
            worker.send(Note(text="import", content=b"module_of_the_user"))
            (imported,) = await log.wait_for(name, Note)
            assert imported.number == worker.pid

    run(tmp_path, scenario)


def test_g7_a_blocked_loop_delays_no_heartbeat_and_is_reported_with_file_and_line(tmp_path: Path) -> None:
    source, first_line = inspect.getsourcelines(workers)
    line = next(number for number, text in enumerate(source, first_line or 1) if "the fault that the watchdog" in text)

    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True, blocked_loop_s=0.3), log)
        await log.wait_until_ready("episodes")
        worker.send(Note(text="block", number=2000))
        worker.send(Note(text="wait"))
        (blocked,) = await log.wait_for("episodes", LoopBlocked)
        assert not log.notes("episodes")  # reported while it lasts
        assert blocked.location == f"{workers.__file__}:{line}"
        assert 0.3 <= blocked.duration_s < 1.5
        await log.wait_for("episodes", Note, count=2)
        assert sum(isinstance(fact, LoopBlocked) for fact in log.of("episodes")) == 1

    run(tmp_path, scenario, heartbeat_timeout_s=0.6)


def test_g7_sigkill_of_an_episode_worker_is_a_fact_and_ends_what_it_forked(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        worker.send(Note(text="fork"))
        (forked,) = await log.wait_for("episodes", Note)
        worker.send(Note(text="wait", number=60_000))
        assert worker.pid is not None
        assert is_running(forked.number)
        began_s = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        assert await log.wait_until_exited("episodes") == WorkerExited(reason="signal SIGKILL", is_expected=False)
        assert time.monotonic() - began_s < 3.0  # the child that holds the socket delays nothing
        await wait_until_gone([worker.pid, forked.number])
        again = runtime.start(episode_spec(is_process=True), log)
        again.send(Note(text="wait"))
        await log.wait_for("episodes", Note, count=2)
        again.kill()
        assert (await log.wait_for("episodes", WorkerExited, count=2))[1].is_expected

    run(tmp_path, scenario)


_ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from flexmarl.testing.processes import local_runtime
from flexmarl.testing.workers import FactLog, Note, episode_spec

async def main():
    async with local_runtime(Path(sys.argv[1])) as runtime:
        log = FactLog()
        worker = runtime.start(episode_spec(is_process=True), log)
        worker.send(Note(text="fork"))
        (forked,) = await log.wait_for("episodes", Note)
        if sys.argv[2] == "blocked":
            worker.send(Note(text="block", number=60_000))
            await asyncio.sleep(0.5)
        print(runtime.fork_server_pid, worker.pid, forked.number, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "blocked"])
def test_g7_sigkill_of_the_orchestrator_ends_an_episode_worker(tmp_path: Path, state: str) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    command = [sys.executable, "-c", _ORCHESTRATOR, str(tmp_path / "run"), state]
    environment = {**os.environ, "TMPDIR": str(registry)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        server, worker, forked = (int(word) for word in process.stdout.readline().split())
        assert is_running(worker)
        process.kill()
        asyncio.run(wait_until_gone([worker, forked, server]))


def test_g7_a_stopped_episode_worker_is_killed_for_its_silence(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        ready = await log.wait_until_ready("episodes")
        await asyncio.sleep(1.0)  # alive for longer than the timeout
        os.kill(ready.pid, signal.SIGSTOP)
        exited = await log.wait_until_exited("episodes")
        assert exited == WorkerExited(reason="no heartbeat for 0.7 s", is_expected=False)
        assert worker.pid is not None
        await wait_until_gone([worker.pid])

    run(tmp_path, scenario, heartbeat_timeout_s=0.7)


def test_g7_user_code_that_ends_its_process_is_told_by_code(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        worker.send(Note(text="wait", number=7))
        await log.wait_for("episodes", Note)
        worker.send(Note(text="exit", number=5))
        assert await log.wait_until_exited("episodes") == WorkerExited(reason="exit code 5", is_expected=False)

    run(tmp_path, scenario)


def test_g7_threads_that_user_code_left_behind_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        worker.send(Note(text="thread", number=60_000))
        worker.send(Note(text="wait"))
        await log.wait_for("episodes", Note)
        began_s = time.monotonic()
        worker.stop()
        assert await log.wait_until_exited("episodes") == WorkerExited(reason="asked", is_expected=True)
        assert time.monotonic() - began_s < 3.0
        assert log_of(tmp_path).splitlines()[-1] == "closed"

    run(tmp_path, scenario)


def test_what_user_code_prints_is_in_its_log_and_blocks_nothing(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker = runtime.start(episode_spec(is_process=True), log)
        for _ in range(20):
            worker.send(Note(text="print", number=100_000))
        await log.wait_for("episodes", Note, count=20)
        worker.stop()
        await log.wait_until_exited("episodes")
        assert log_of(tmp_path).count("x" * 100_000) == 20

    run(tmp_path, scenario)


def test_g7_a_fact_that_cannot_be_written_ends_the_worker_by_name(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        runtime.start(episode_spec(is_process=True), log).send(Note(text="unwritable"))
        reason = (await log.wait_until_exited("episodes")).reason
        assert reason.startswith("BackendError: message test_note: cannot write a fact frame:")

    run(tmp_path, scenario)


def test_g7_a_command_that_cannot_be_read_ends_the_worker_by_name(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        worker: Any = runtime.start(episode_spec(is_process=True), log)
        await log.wait_until_ready("episodes")
        worker._frames.send(encode_frame(FrameKind.COMMAND, {"kind": "of another version"}))
        reason = (await log.wait_until_exited("episodes")).reason
        assert reason.startswith("ConfigError: ")

    run(tmp_path, scenario)


def test_random_numbers_of_user_code_differ_between_workers(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, log: FactLog) -> None:
        drawn = set()
        for name in ("one", "two"):
            runtime.start(episode_spec(name, is_process=True), log).send(Note(text="random"))
            (note,) = await log.wait_for(name, Note)
            drawn |= set(note.text.split())
        assert len(drawn) == 4

    run(tmp_path, scenario, preload=["numpy.random"])
