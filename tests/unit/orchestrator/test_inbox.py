"""The ordered inbox: one fact at a time, errors end the run, a cancelled timer does nothing."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import pytest

from flexmarl.core.errors import BackendError, FencedError
from flexmarl.core.messages import TimerFired, WorkDone, WorkerReady
from flexmarl.core.protocols import Timer
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.runtime.simulated import VirtualTimeLoop
from flexmarl.testing.events import RecordingSink

pytestmark = pytest.mark.unit


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def test_facts_are_logged_and_handled_in_the_order_of_posting() -> None:
    async def main() -> None:
        sink = RecordingSink()
        inbox = OrderedInbox(sink)
        handled: list[int] = []

        def handle(number: int) -> None:
            # The fact itself was logged before its handler runs, later ones were not.
            assert len(sink.events) == len(handled) + 1
            handled.append(number)
            if number == 1:
                inbox.post("w1", WorkerReady(pid=9), lambda: handle(9))

        for number in (1, 2):
            inbox.post(f"w{number}", WorkerReady(pid=number), lambda number=number: handle(number))  # type: ignore[misc]
        await inbox.run_until(lambda: len(handled) == 3)
        assert handled == [1, 2, 9]
        assert [(event.source, event.record) for event in sink.events] == [
            ("w1", WorkerReady(pid=1)),
            ("w2", WorkerReady(pid=2)),
            ("w1", WorkerReady(pid=9)),
        ]

    virtually(main)


def test_it_stops_at_the_fact_that_makes_it_done() -> None:
    async def main() -> None:
        inbox = OrderedInbox(RecordingSink())
        handled: list[int] = []
        for number in range(3):
            inbox.post("w", WorkerReady(pid=number), lambda number=number: handled.append(number))  # type: ignore[misc]
        await inbox.run_until(lambda: len(handled) == 2)
        assert handled == [0, 1]

    virtually(main)


def test_work_reports_as_a_fact_and_passes_its_result() -> None:
    async def main() -> None:
        sink = RecordingSink()
        inbox = OrderedInbox(sink)
        results: list[str] = []

        async def work(name: str, duration_s: float) -> str:
            await asyncio.sleep(duration_s)
            return name

        inbox.start("slow", work("slow", 2.0), results.append)
        inbox.start("fast", work("fast", 1.0), results.append)
        await inbox.run_until(lambda: len(results) == 2)
        assert results == ["fast", "slow"]
        assert sink.records == [WorkDone(name="fast"), WorkDone(name="slow")]

    virtually(main)


def test_g7_an_error_of_work_ends_the_run_in_its_turn() -> None:
    async def main() -> None:
        sink = RecordingSink()
        inbox = OrderedInbox(sink)
        handled: list[str] = []

        async def break_down() -> None:
            raise BackendError("disk full")

        inbox.start("write", break_down(), lambda _: handled.append("then"))
        inbox.post("w", WorkerReady(pid=1), lambda: handled.append("fact"))
        with pytest.raises(BackendError, match="disk full"):
            await inbox.run_until(lambda: False)
        assert handled == ["fact"]
        assert sink.records[-1] == WorkDone(name="write", error="BackendError('disk full')")

    virtually(main)


def test_fenced_work_is_dropped() -> None:
    async def main() -> None:
        sink = RecordingSink()
        inbox = OrderedInbox(sink)
        handled: list[str] = []

        async def fenced() -> None:
            raise FencedError("the lease has ended")

        inbox.start("acknowledge", fenced(), lambda _: handled.append("then"))
        inbox.set_timer("later", 1.0, lambda: handled.append("timer"))
        await inbox.run_until(lambda: bool(handled))
        assert handled == ["timer"]
        assert sink.records == [WorkDone(name="acknowledge", error="the lease has ended"), TimerFired(name="later")]

    virtually(main)


def test_an_error_of_a_handler_ends_the_run() -> None:
    async def main() -> None:
        inbox = OrderedInbox(RecordingSink())

        def broken() -> None:
            raise ZeroDivisionError("in a handler")

        inbox.post("w", WorkerReady(pid=1), broken)
        with pytest.raises(ZeroDivisionError, match="in a handler"):
            await inbox.run_until(lambda: False)

    virtually(main)


def test_the_first_failure_wins_and_wakes_the_dispatcher() -> None:
    async def main() -> None:
        inbox = OrderedInbox(RecordingSink())
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, inbox.fail, BackendError("first"))
        loop.call_later(1.0, inbox.fail, BackendError("second"))
        with pytest.raises(BackendError, match="first"):
            await inbox.run_until(lambda: False)
        assert loop.time() == 1.0

    virtually(main)


def test_timers_fire_as_facts() -> None:
    async def main() -> None:
        inbox = OrderedInbox(RecordingSink())
        fired: list[float] = []
        loop = asyncio.get_running_loop()
        inbox.set_timer("b", 2.0, lambda: fired.append(loop.time()))
        inbox.set_timer("a", 1.0, lambda: fired.append(loop.time()))
        cancelled = inbox.set_timer("c", 1.5, lambda: fired.append(-1.0))
        cancelled.cancel()
        cancelled.cancel()
        await inbox.run_until(lambda: len(fired) == 2)
        assert fired == [1.0, 2.0]

    virtually(main)


def test_a_timer_cancelled_after_it_fired_but_before_its_turn_does_nothing() -> None:
    async def main() -> None:
        sink = RecordingSink()
        inbox = OrderedInbox(sink)
        handled: list[str] = []
        timers: list[Timer] = []
        # Posted before the timer's fact and handled before it: the answer has come, the deadline is off.
        asyncio.get_running_loop().call_at(1.0, inbox.post, "w", WorkerReady(pid=1), lambda: timers[0].cancel())
        timers.append(inbox.set_timer("deadline", 1.0, lambda: handled.append("too late")))
        inbox.set_timer("end", 2.0, lambda: handled.append("end"))
        await inbox.run_until(lambda: "end" in handled)
        assert [type(record) for record in sink.records] == [WorkerReady, TimerFired, TimerFired]
        assert handled == ["end"]

    virtually(main)


def test_work_cancelled_before_it_began_is_closed() -> None:
    async def work() -> None:
        raise AssertionError("it never runs")

    begun = work()

    async def main() -> None:
        inbox = OrderedInbox(RecordingSink())
        inbox.start("work", begun, lambda _: None)
        await inbox.close()

    virtually(main)
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED


def test_close_cancels_work_and_waits_for_it() -> None:
    async def main() -> None:
        inbox = OrderedInbox(RecordingSink())
        ended: list[str] = []

        async def endless() -> None:
            try:
                await asyncio.sleep(1e9)
            finally:
                ended.append("cancelled")

        inbox.start("endless", endless(), lambda _: ended.append("then"))
        await asyncio.sleep(0)
        await inbox.close()
        assert ended == ["cancelled"]

    virtually(main)
