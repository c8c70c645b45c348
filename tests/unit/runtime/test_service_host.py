"""The host loop with a channel that a test fills beforehand."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from flexmarl.core.ids import WorkerId
from flexmarl.core.messages import WorkerReady
from flexmarl.core.protocols import ServiceKind, WorkerContext, WorkerSpec
from flexmarl.runtime.service_host import STOP_ASKED, WorkerKilled, host_service
from flexmarl.runtime.simulated import MemoryObjectPlane
from flexmarl.testing.clock import ManualClock
from flexmarl.testing.workers import Note, script_spec

pytestmark = pytest.mark.unit


class ListedChannel:
    """Gives one list of commands per `receive` and writes down all that happens, in order."""

    def __init__(self, batches: Sequence[Sequence[object]]) -> None:
        self._batches = list(batches)
        self.story: list[object] = []

    def receive(self, *, is_waiting: bool) -> list[object]:
        self.story.append("wait" if is_waiting else "look")
        if not self._batches:
            raise WorkerKilled
        return list(self._batches.pop(0))

    def send_fact(self, fact: object) -> None:
        self.story.append("ready" if isinstance(fact, WorkerReady) else fact)

    def sleep(self, duration_s: float) -> None:
        self.story.append(duration_s)


def host(spec: WorkerSpec, channel: ListedChannel) -> str | None:
    context = WorkerContext(
        worker_id=spec.worker_id, objects=MemoryObjectPlane(), clock=ManualClock(), send=channel.send_fact
    )
    return host_service(spec, context, channel)


def test_all_commands_then_one_step_then_its_cost_then_its_messages(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = Note(text="twice", number=1), Note(text="echo", number=2)
    channel = ListedChannel([[one, two], [], [], [STOP_ASKED, one]])
    assert host(script_spec(cost_s=0.5), channel) is None
    assert channel.story == ["ready", "look", 0.5, one, one, "look", 0.5, two, "look", "wait"]
    assert capsys.readouterr().out == "closed\n"


def test_close_is_called_once_also_after_an_error_or_a_kill(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        assert host(script_spec(close_error="also"), ListedChannel([[Note(text="fail")]])) == (
            "ValueError: asked to fail"
        )
        assert host(script_spec(close_error="late"), ListedChannel([[STOP_ASKED]])) == "RuntimeError: late"
        with pytest.raises(WorkerKilled):
            host(script_spec(), ListedChannel([[]]))
    assert capsys.readouterr().out == "closed\n" * 3


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("flexmarl", "ConfigError: worker w: factory 'flexmarl': expected module:function"),
        ("flexmarl.testing:nix", "ConfigError: worker w: module flexmarl.testing has no function 'nix'"),
        ("no_such_module_z:make", "ModuleNotFoundError: No module named 'no_such_module_z'"),
    ],
)
def test_a_factory_that_is_not_there_is_the_reason(factory: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    channel = ListedChannel([])
    options: dict[str, Any] = {}
    spec = WorkerSpec(worker_id=WorkerId("w"), kind=ServiceKind.INSTANCE, factory=factory, options=options)
    with caplog.at_level(logging.CRITICAL):
        assert host(spec, channel) == reason
    assert channel.story == []
