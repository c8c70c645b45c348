"""The fakes that tests share do what they say."""

import pytest

from flexmarl.testing.clock import ManualClock
from flexmarl.testing.events import RecordedEvent, RecordingSink

pytestmark = pytest.mark.unit


def test_a_manual_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(2.0)
    assert clock.advance(1.5) == clock.now_s() == 3.5
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1.0)


def test_a_recording_sink_numbers_records() -> None:
    sink = RecordingSink()
    assert [sink.emit("a"), sink.emit("b", source="w")] == [0, 1]
    assert sink.events[1] == RecordedEvent(seq=1, source="w", record="b")
    assert sink.records == ["a", "b"]
