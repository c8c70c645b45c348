"""Virtual time: the order of events follows (time, insertion), never the wall clock."""

import asyncio
import heapq
import time
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.messages import WorkerExited
from flexmarl.runtime.simulated import SimulatedRuntime, VirtualDeadlock, VirtualTimeLoop, run_virtual
from flexmarl.testing.workers import FactLog, Note, script_spec

pytestmark = pytest.mark.property

# Delays that collide often, and some whose sums round.
DELAYS = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, 1.0, 1e-12, 1e-3, 86_400.0, 1e7])


def in_reference_order(plan: Sequence[tuple[float, Sequence[float]]]) -> list[tuple[float, int]]:
    """Return (time, timer) in firing order by a plain heap: timer i fires at its delay, then sets its children."""
    heap: list[tuple[float, int, int]] = []
    num_set = 0
    for index, (delay_s, _) in enumerate(plan):
        heapq.heappush(heap, (delay_s, num_set, index))
        num_set += 1
    fired = []
    while heap:
        now_s, _, timer = heapq.heappop(heap)
        fired.append((now_s, timer))
        if timer < len(plan):
            for child, delay_s in enumerate(plan[timer][1]):
                heapq.heappush(heap, (now_s + delay_s, num_set, (timer + 1) * 1000 + child))
                num_set += 1
    return fired


def run_plan(plan: Sequence[tuple[float, Sequence[float]]]) -> list[tuple[float, int]]:
    fired: list[tuple[float, int]] = []

    async def main(runtime: SimulatedRuntime) -> None:
        loop = asyncio.get_running_loop()
        left = sum(1 + len(children) for _, children in plan)
        done = asyncio.Event()

        def fire(timer: int) -> None:
            nonlocal left
            fired.append((runtime.clock.now_s(), timer))
            if timer < len(plan):
                for child, delay_s in enumerate(plan[timer][1]):
                    loop.call_later(delay_s, fire, (timer + 1) * 1000 + child)
            left -= 1
            if not left:
                done.set()

        for index, (delay_s, _) in enumerate(plan):
            loop.call_later(delay_s, fire, index)
        await done.wait()

    run_virtual(main)
    return fired


@given(plan=st.lists(st.tuples(DELAYS, st.lists(DELAYS, max_size=4)), min_size=1, max_size=12))
def test_timers_fire_by_time_and_insertion_exactly_at_their_time(plan: list[tuple[float, list[float]]]) -> None:
    assert run_plan(plan) == in_reference_order(plan)


@given(delays=st.lists(DELAYS, min_size=1, max_size=8), cancelled=st.sets(st.integers(0, 7)))
def test_cancelled_timers_neither_fire_nor_move_time(delays: list[float], cancelled: set[int]) -> None:
    async def main(runtime: SimulatedRuntime) -> tuple[list[int], float]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        timers = [loop.call_later(delay_s, fired.append, index) for index, delay_s in enumerate(delays)]
        for index in cancelled & set(range(len(delays))):
            timers[index].cancel()
        kept = [delay_s for index, delay_s in enumerate(delays) if index not in cancelled]
        await asyncio.sleep(max(kept, default=0.0))
        await asyncio.sleep(0)
        return fired, runtime.clock.now_s()

    fired, now_s = run_virtual(main)
    kept = [index for index in range(len(delays)) if index not in cancelled]
    assert fired == sorted(kept, key=lambda index: (delays[index], index))
    assert now_s == max((delays[index] for index in kept), default=0.0)


@given(
    costs=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4),
    sends=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.integers(0, 3)), max_size=12),
)
def test_services_behave_as_single_servers_and_twice_the_same(
    costs: list[float], sends: list[tuple[float, int]]
) -> None:
    """A service is a first-come single server of fixed cost: completion i = max(completion i-1, arrival i) + cost."""
    first, second = _serve(costs, sends), _serve(costs, sends)
    assert first == second
    for worker, cost_s in enumerate(costs):
        expected, free_s = [], Fraction(0)
        for number, (arrival_s, target) in _arrivals(sends):
            if target % len(costs) == worker:
                free_s = max(free_s, Fraction(arrival_s)) + Fraction(cost_s)
                expected.append((float(free_s), number))
        assert [(time_s, number) for name, time_s, number in first if name == f"w{worker}"] == expected


def _arrivals(sends: Sequence[tuple[float, int]]) -> list[tuple[int, tuple[float, int]]]:
    return sorted(enumerate(sends), key=lambda item: item[1][0])


def _serve(costs: Sequence[float], sends: Sequence[tuple[float, int]]) -> list[tuple[str, float, int]]:
    async def main(runtime: SimulatedRuntime) -> list[tuple[str, float, int]]:
        log = FactLog(runtime.clock.now_s)
        workers = [runtime.start(script_spec(f"w{n}", cost_s=cost_s), log) for n, cost_s in enumerate(costs)]
        for number, (arrival_s, target) in _arrivals(sends):
            await asyncio.sleep(arrival_s - runtime.clock.now_s())
            workers[target % len(workers)].send(Note(text="echo", number=number))
        await asyncio.sleep(100.0)
        return [
            (str(name), time_s, fact.number)
            for (name, fact), time_s in zip(log.facts, log.times_s, strict=True)
            if isinstance(fact, Note)
        ]

    return run_virtual(main)


@given(killed_at_s=st.sampled_from([0.0, 0.25, 1.0, 1.75, 2.0, 9.0]))
def test_a_kill_at_any_time_leaves_exactly_one_exit_as_the_last_fact(killed_at_s: float) -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        log = FactLog(runtime.clock.now_s)
        worker = runtime.start(script_spec(cost_s=1.0), log)
        for number in range(3):
            worker.send(Note(text="echo", number=number))
        await asyncio.sleep(killed_at_s)
        worker.kill()
        worker.send(Note(text="echo", number=9))
        await asyncio.sleep(10.0)
        *before, last = log.of("worker")
        assert last == WorkerExited(reason="signal SIGKILL", is_expected=True)
        assert not any(isinstance(fact, WorkerExited) for fact in before)
        assert log.times_s[-1] == killed_at_s
        assert [note.number for note in log.notes("worker")] in ([], [0], [0, 1], [0, 1, 2])
        assert len(log.notes("worker")) <= killed_at_s

    run_virtual(main)


def test_a_month_passes_in_no_time() -> None:
    async def main(runtime: SimulatedRuntime) -> float:
        for _ in range(30):
            await asyncio.sleep(86_400.0)
        return runtime.clock.now_s()

    began_s = time.monotonic()
    assert run_virtual(main) == 30 * 86_400.0
    assert time.monotonic() - began_s < 5.0


def test_g7_an_infinite_wait_is_a_deadlock_that_says_who_waits_and_where() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def main(runtime: SimulatedRuntime) -> None:
        await asyncio.sleep(2.5)
        task = asyncio.create_task(wait_for_ever(), name="the waiter")
        await asyncio.wait([task])

    line = wait_for_ever.__code__.co_firstlineno + 1
    with pytest.raises(
        VirtualDeadlock,
        match=rf"deadlock at virtual time 2\.5 s: .*2 tasks wait: .*the waiter at .*{__name__}\.py:{line}",
    ):
        run_virtual(main)


def test_times_far_from_zero_still_fire() -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(asyncio.sleep(1e15))
        loop.run_until_complete(asyncio.sleep(1.0))
        assert loop.time() == 1e15 + 1.0
    finally:
        loop.close()
