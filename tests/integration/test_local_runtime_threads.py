"""Workers as threads: inline mode tells the same story as processes; episode workers and their watchdog."""

import asyncio
import inspect
import threading
import time
from pathlib import Path

import pytest

from flexmarl.core.messages import LoopBlocked, WorkerExited
from flexmarl.testing import workers
from flexmarl.testing.processes import local_runtime
from flexmarl.testing.workers import FactLog, Note, episode_spec, script_spec

pytestmark = pytest.mark.integration


def test_inline_gives_the_same_facts_as_processes(tmp_path: Path) -> None:
    async def story(*, inline: bool) -> dict[str, list[object]]:
        log = FactLog()
        async with local_runtime(tmp_path / str(inline), inline=inline, stop_timeout_s=0.3) as runtime:
            talker = runtime.start(script_spec("talker", pair=(1, 2)), log)
            for number in range(50):
                talker.send(Note(text="twice" if number % 3 else "echo", number=number, content=b"x" * number))
            runtime.start(script_spec("failing"), log).send(Note(text="fail"))
            runtime.start(script_spec("exiting"), log).send(Note(text="exit", number=4))
            runtime.start(script_spec("unbuilt", start_error="no model"), log)
            unclosed = runtime.start(script_spec("unclosed", close_error="stuck"), log)
            killed = runtime.start(script_spec("killed"), log)
            stuck = runtime.start(script_spec("stuck"), log)
            stuck.send(Note(text="send"))
            stuck.send(Note(text="sleep", number=1500))
            await log.wait_until_ready("killed")
            await log.wait_for("stuck", Note)
            await log.wait_for("talker", Note, count=83)
            killed.kill()
            await asyncio.sleep(0.1)
            await log.wait_until_ready("unclosed")
            for worker in (talker, stuck, unclosed):
                worker.stop()
            for name in ("talker", "failing", "exiting", "unbuilt", "unclosed", "killed", "stuck"):
                await log.wait_until_exited(name)
        names = ["talker", "failing", "exiting", "unbuilt", "unclosed", "killed", "stuck"]
        return {name: [fact for fact in log.of(name) if isinstance(fact, (Note, WorkerExited))] for name in names}

    inline = asyncio.run(story(inline=True))
    assert inline == asyncio.run(story(inline=False))
    assert {name: facts[-1] for name, facts in inline.items()} == {
        "talker": WorkerExited(reason="asked", is_expected=True),
        "failing": WorkerExited(reason="ValueError: asked to fail", is_expected=False),
        "exiting": WorkerExited(reason="exit code 4", is_expected=False),
        "unbuilt": WorkerExited(reason="ValueError: no model", is_expected=False),
        "unclosed": WorkerExited(reason="RuntimeError: stuck", is_expected=True),
        "killed": WorkerExited(reason="signal SIGKILL", is_expected=True),
        "stuck": WorkerExited(reason="asked; killed after 0.3 s", is_expected=True),
    }


def test_a_killed_thread_says_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, inline=True) as runtime:
            log = FactLog()
            worker = runtime.start(script_spec(cost_s=0.2), log)
            await log.wait_until_ready("worker")
            worker.send(Note(text="echo"))
            await asyncio.sleep(0.05)
            worker.kill()
            await log.wait_until_exited("worker")
            await asyncio.sleep(0.3)
            assert isinstance(log.of("worker")[-1], WorkerExited)
            assert not log.notes("worker")

    before = set(threading.enumerate())
    asyncio.run(scenario())
    assert set(threading.enumerate()) <= before


def test_an_episode_worker_runs_its_coroutines_side_by_side(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path) as runtime:
            log = FactLog()
            worker = runtime.start(episode_spec(), log)
            for number in (300, 200, 100):  # before its service is built
                worker.send(Note(text="wait", number=number))
            notes = await log.wait_for("episodes", Note, count=3)
            assert [note.number for note in notes] == [100, 200, 300]
            assert worker.pid is None
            worker.send(Note(text="wait", number=60_000))
            worker.stop()
            assert await log.wait_until_exited("episodes") == WorkerExited(reason="asked", is_expected=True)

    before = set(threading.enumerate())
    asyncio.run(scenario())
    assert set(threading.enumerate()) <= before


def test_an_episode_worker_reports_its_errors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, inline=True) as runtime:
            log = FactLog()
            runtime.start(episode_spec(), log).send(Note(text="fail"))
            assert (await log.wait_until_exited("episodes")).reason == "ValueError: asked to fail"
            runtime.start(episode_spec("unbuilt", start_error="no workflow"), log)
            assert (await log.wait_until_exited("unbuilt")).reason == "ValueError: no workflow"

    asyncio.run(scenario())


def test_g7_a_blocked_loop_is_reported_once_with_file_and_line(tmp_path: Path) -> None:
    source, first_line = inspect.getsourcelines(workers)
    line = next(number for number, text in enumerate(source, first_line or 1) if "the fault that the watchdog" in text)

    async def scenario() -> None:
        async with local_runtime(tmp_path, inline=True) as runtime:
            log = FactLog()
            worker = runtime.start(episode_spec(blocked_loop_s=0.2), log)
            await log.wait_until_ready("episodes")
            await asyncio.sleep(0.5)  # an idle loop is not a blocked one
            worker.send(Note(text="block", number=900))
            (blocked,) = await log.wait_for("episodes", LoopBlocked)
            assert not log.notes("episodes")  # reported while it lasts
            assert blocked.location == f"{workers.__file__}:{line}"
            assert 0.2 <= blocked.duration_s < 0.9
            await log.wait_for("episodes", Note)
            worker.send(Note(text="block", number=500))
            await log.wait_for("episodes", LoopBlocked, count=2)
            await log.wait_for("episodes", Note, count=2)
            assert sum(isinstance(fact, LoopBlocked) for fact in log.of("episodes")) == 2

    asyncio.run(scenario())


def test_modules_that_take_long_to_import_are_not_a_blocked_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, inline=True) as runtime:
            log = FactLog()
            runtime.start(episode_spec(blocked_loop_s=0.1, start_s=0.4), log)
            await log.wait_until_ready("episodes")
            await asyncio.sleep(0.2)
            assert not any(isinstance(fact, LoopBlocked) for fact in log.of("episodes"))

    asyncio.run(scenario())


def test_g7_a_blocked_episode_worker_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_runtime(tmp_path, inline=True, stop_timeout_s=0.3) as runtime:
            log = FactLog()
            worker = runtime.start(episode_spec(), log)
            await log.wait_until_ready("episodes")
            worker.send(Note(text="block", number=1500))
            await asyncio.sleep(0.1)
            began_s = time.monotonic()
            await runtime.close()
            assert time.monotonic() - began_s < 1.0
            exited = await log.wait_until_exited("episodes")
            assert exited == WorkerExited(reason="asked; killed after 0.3 s", is_expected=True)
            await asyncio.sleep(1.5)
            assert log.of("episodes")[-1] == exited

    asyncio.run(scenario())
