import json
from pathlib import Path

import pytest

from flexmarl.core.errors import ConfigError, InvariantError, StoreError
from flexmarl.core.events import RunStarted, StepDispatched
from flexmarl.core.ids import AgentName, InstanceId, Purpose, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.messages import Generated, StartTrajectory, TurnRequested, WorkerReady
from flexmarl.core.records import Completion, Denominators, DispatchRecord, FinishReason, SamplingParams, VersionSpan
from flexmarl.telemetry import EventLog, read_events

pytestmark = pytest.mark.unit


class TickingClock:
    def __init__(self) -> None:
        self.time_s = 1.0

    def now_s(self) -> float:
        self.time_s += 0.5
        return self.time_s


STARTED = RunStarted(name="r", seed=3, policy_version=0, is_resumed=False)
GENERATED = Generated(
    completion=Completion(
        request_id=RequestId("r0"),
        tokens=(5, 6, 7),
        logprobs=(-0.5, -1.0, -0.25),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=3, policy_version=2),),
        weights_version=2,
        instance_id=InstanceId("p/0"),
    )
)


def test_lines_are_what_the_format_says(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", TickingClock()) as log:
        assert log.emit(STARTED) == 0
        assert log.emit(WorkerReady(pid=7), source="p/0") == 1
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert first == {
        "seq": 0,
        "time_s": 1.5,
        "source": "orchestrator",
        "kind": "run_started",
        "version": 1,
        "data": {"name": "r", "seed": 3, "policy_version": 0, "is_resumed": False},
    }
    assert (second["seq"], second["source"], second["data"]) == (1, "p/0", {"pid": 7})


def test_events_read_back_typed_with_bulk_as_zeros_of_its_length(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    dispatched = StepDispatched(
        dispatch=DispatchRecord(step=0, min_version=0, max_version=0, queries=(1, 2), num_trajectories=4)
    )
    start = StartTrajectory(
        purpose=Purpose.TRAIN, key=TrajectoryKey(0, 1, 0), attempt=0, query={"question": "1"}, seed=1
    )
    with EventLog(path, TickingClock()) as log:
        for record in (dispatched, GENERATED, start):
            log.emit(record)
    logged = list(read_events(path))
    assert logged[0].record == dispatched
    completion = logged[1].record.completion  # type: ignore[attr-defined]
    assert completion.tokens == (0, 0, 0)
    assert completion.logprobs == (0.0, 0.0, 0.0)
    assert completion.version_spans == GENERATED.completion.version_spans
    assert logged[2].record.query == {}  # type: ignore[attr-defined]
    assert [event.seq for event in logged] == [0, 1, 2]


def test_sequence_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, TickingClock()) as log:
        log.emit(STARTED)
        log.emit(WorkerReady(pid=1))
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert [event.seq for event in read_events(path)] == [0]
        with EventLog(path, TickingClock()) as log:
            assert log.emit(WorkerReady(pid=2)) == 1
        assert [event.record for event in read_events(path)] == [STARTED, WorkerReady(pid=2)]


def test_events_are_buffered_until_flush(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, TickingClock())
    log.emit(STARTED)
    assert path.read_text() == ""
    log.flush()
    assert path.read_text().count("\n") == 1
    for _ in range(2000):
        log.emit(STARTED)
    assert path.stat().st_size > 100_000  # a full buffer is written without being asked
    log.close()
    log.close()
    assert len(list(read_events(path))) == 2001


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2}, ConfigError, "events.jsonl:1: run_started: written in version 2, this code reads 1"),
        ({"kind": "from_the_future"}, ConfigError, "unknown record kind 'from_the_future'"),
        ({"data": {"name": "r"}}, ConfigError, "RunStarted: missing"),
        ({"seq": 5}, StoreError, "events.jsonl:1: expected event 0, got 5"),
        ({"time_s": None}, StoreError, "events.jsonl:1: not an event"),
    ],
)
def test_reader_refuses_what_it_does_not_know(
    tmp_path: Path, change: dict[str, object], error: type[Exception], message: str
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, TickingClock()) as log:
        log.emit(STARTED)
    path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    with pytest.raises(error, match=message):
        list(read_events(path))


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, TickingClock()) as log:
        log.emit(STARTED)
        log.emit(STARTED)
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0][:20]}\n{lines[1]}\n")
    with pytest.raises(StoreError, match="events.jsonl:1: damaged line"):
        list(read_events(path))


def test_a_file_that_is_no_event_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore notes\n")
    with pytest.raises(StoreError, match="not a JSON object"):
        EventLog(path, TickingClock())
    assert path.read_text() == "my notes\nmore notes\n"


def test_text_without_utf8_form_does_not_end_the_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", TickingClock()) as log:
        log.emit(RunStarted(name="\ud800", seed=0, policy_version=0, is_resumed=False))
    assert len(list(read_events(tmp_path / "events.jsonl"))) == 1


def test_a_record_without_json_form_is_a_bug(tmp_path: Path) -> None:
    request = TurnRequested(
        request_id=RequestId("r"),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, 0, 0, AgentName("a"), 0, 0),
        attempt=0,
        prompt_tokens=(1,),
        sampling=SamplingParams(max_new_tokens=1),
        stop_token_ids=(),
    )
    with EventLog(tmp_path / "events.jsonl", TickingClock()) as log:
        assert log.emit(request) == 0
        with pytest.raises(InvariantError):
            log.emit(WorkerReady(pid=b"raw"))  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            log.emit(Denominators())
        assert log.emit(STARTED) == 1
