"""The simulated runtime, against hand-worked times."""

import asyncio
import logging

import pytest
import torch

from flexmarl.config import RuntimeConfig
from flexmarl.core.errors import InvariantError, StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.messages import WorkerExited, WorkerReady
from flexmarl.runtime.simulated import MemoryObjectPlane, SimulatedRuntime, run_virtual
from flexmarl.testing.workers import FactLog, Note, episode_spec, script_spec

pytestmark = pytest.mark.unit


def test_calls_run_one_at_a_time_in_order_and_cost_passes() -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        seen: list[tuple[str, float]] = []

        def note(name: str) -> str:
            seen.append((name, runtime.clock.now_s()))
            if name == "bad":
                raise ValueError("bad")
            return name

        unheard = asyncio.ensure_future(runtime.call(note, "unheard", cost_s=1.0))
        results = asyncio.gather(
            runtime.call(note, "a", cost_s=2.0),
            runtime.call(note, "free"),
            runtime.call(note, "bad", cost_s=0.5),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
        unheard.cancel()
        assert [str(each) for each in await results] == ["a", "free", "bad"]
        assert seen == [("unheard", 1.0), ("a", 3.0), ("free", 3.0), ("bad", 3.5)]
        assert await runtime.call(note, "now") == "now"

    run_virtual(main)


def test_workers_end_for_the_reasons_of_the_local_runtime(caplog: pytest.LogCaptureFixture) -> None:
    async def main(runtime: SimulatedRuntime) -> dict[str, tuple[float, object]]:
        log = FactLog(runtime.clock.now_s)
        with caplog.at_level(logging.CRITICAL):
            runtime.start(script_spec("failing"), log).send(Note(text="fail"))
            runtime.start(script_spec("unbuilt", start_error="no model"), log)
            runtime.start(script_spec("unclosed", close_error="stuck"), log).stop()
            runtime.start(episode_spec("episodes"), log).send(Note(text="fail"))
            stuck = runtime.start(script_spec("stuck", cost_s=60.0), log)
            stuck.send(Note(text="echo"))
            done = runtime.start(script_spec("done", cost_s=2.0), log)
            done.send(Note(text="echo"))
            await asyncio.sleep(1.0)
            done.stop()
            stuck.stop()
            await asyncio.sleep(100.0)
        return {
            str(name): (time_s, fact)
            for (name, fact), time_s in zip(log.facts, log.times_s, strict=True)
            if isinstance(fact, WorkerExited)
        }

    assert run_virtual(main, RuntimeConfig(kind="simulated", stop_timeout_s=4.0)) == {
        "failing": (0.0, WorkerExited(reason="ValueError: asked to fail", is_expected=False)),
        "unbuilt": (0.0, WorkerExited(reason="ValueError: no model", is_expected=False)),
        "unclosed": (0.0, WorkerExited(reason="RuntimeError: stuck", is_expected=True)),
        "episodes": (0.0, WorkerExited(reason="ValueError: asked to fail", is_expected=False)),
        "stuck": (5.0, WorkerExited(reason="asked; killed after 4 s", is_expected=True)),
        "done": (2.0, WorkerExited(reason="asked", is_expected=True)),
    }


def test_an_episode_worker_shares_the_virtual_clock() -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        log = FactLog(runtime.clock.now_s)
        worker = runtime.start(episode_spec(), log)
        for number in (3000, 1000):
            worker.send(Note(text="wait", number=number))
        await log.wait_for("episodes", Note, count=2)
        assert [type(fact) for fact in log.of("episodes")] == [WorkerReady, Note, Note]
        assert log.times_s == [0.0, 1.0, 3.0]
        worker.send(Note(text="wait", number=9000))
        worker.kill()
        await log.wait_until_exited("episodes")
        await asyncio.sleep(20.0)
        assert len(log.notes("episodes")) == 2

    run_virtual(main)


def test_misuse_is_refused() -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        log = FactLog(runtime.clock.now_s)
        runtime.start(script_spec(), log)
        with pytest.raises(InvariantError, match="worker worker started while one of this id runs"):
            runtime.start(script_spec(), log)
        with pytest.raises(InvariantError, match="cannot encode a object"):
            runtime.start(script_spec("other", thing=object()), log)
        await runtime.close()
        assert [type(fact) for fact in log.of("worker")] == [WorkerReady, WorkerExited]
        with pytest.raises(InvariantError, match="closed runtime"):
            runtime.start(script_spec(), log)
        with pytest.raises(InvariantError, match="closed runtime"):
            await runtime.call(int)

    run_virtual(main)


def test_memory_objects_are_immutable_copies() -> None:
    plane = MemoryObjectPlane()
    key = ObjectKey(kind="weights", owner="solver", version=0)
    content = bytearray(b"abc" + bytes(61))
    packed = PackedObject(layout=plan_layout([("a", "uint8", (3,), 3)]), buffer=memoryview(content))
    info = plane.set(key, packed).result(1.0)
    assert (info.num_bytes, info.digest) == (64, packed.digest())
    content[0] = 0
    assert bytes(plane.packed(key).bytes_of("a")) == b"abc"
    with pytest.raises(StoreError, match="object weights/solver/0 exists with other content"):
        plane.set(key, packed)
    content[0] = ord("a")
    plane.set(key, packed)  # the same again
    plane.delete(key)
    plane.delete(key)
    assert plane.info(key) is None
    with pytest.raises(StoreError, match="object weights/solver/0 does not exist"):
        plane.packed(key)


def test_memory_objects_take_and_give_tensors() -> None:
    plane = MemoryObjectPlane()
    key = ObjectKey(kind="state", owner="solver", version=0)
    tensors = {"b": torch.arange(6, dtype=torch.int64).reshape(2, 3), "a": torch.tensor(1.5), "c": torch.empty(0)}
    plane.set(key, tensors)
    tensors["a"].fill_(9.0)
    found = plane.get(key)
    assert list(found) == ["a", "b", "c"]
    assert found["a"].item() == 1.5
    assert found["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["c"].shape == (0,)
