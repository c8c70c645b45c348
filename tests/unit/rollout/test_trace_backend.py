"""The engine that replays a recording: what it answers, when, and what it refuses."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.config import RolloutConfig, parse_config
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.messages import Generated
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, SamplingParams
from flexmarl.rollout.backends.factory import build_backend
from flexmarl.rollout.backends.trace import MAX_WAIT_S, RecordedTurn, TraceBackend, read_trace, write_trace
from flexmarl.testing.clock import ManualClock
from flexmarl.testing.runs import scripted_config

pytestmark = pytest.mark.unit

PROMPT = (1, 2, 3)
STOP = 9


class OneObject:
    """An object plane with one object."""

    def packed(self, key: ObjectKey) -> PackedObject:
        layout = plan_layout([("weight", "uint8", (1,), 1)])
        return PackedObject(layout=layout, buffer=memoryview(bytes(layout.num_bytes)))


def key_of(number: int, *, step: int = 0) -> SampleKey:
    return SampleKey(step, number, 0, AgentName("solver"), 0, 0)


def turn_of(number: int, time_s: float, *, step: int = 0) -> RecordedTurn:
    is_stopped = number % 2 == 0
    return RecordedTurn(
        key=key_of(number, step=step),
        time_s=time_s,
        prompt_tokens=PROMPT,
        tokens=(number, STOP) if is_stopped else (number, number, number),
        logprobs=(-0.5, -0.25) if is_stopped else (-1.0, -2.0, -3.0),
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
    )


def request_of(
    number: int, *, step: int = 0, prompt: tuple[int, ...] = PROMPT, purpose: Purpose = Purpose.TRAIN
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"s{step}/r{number}"),
        purpose=purpose,
        key=key_of(number, step=step),
        attempt=0,
        policy=PolicyName("actor"),
        min_version=0,
        max_version=0,
        prompt_tokens=prompt,
        sampling=SamplingParams(max_new_tokens=8),
        seed=0,
        stop_token_ids=(STOP,),
    )


def describe(
    request: GenerationRequest, tokens: Sequence[int], logprobs: Sequence[float], *, is_stopped: bool
) -> Completion:
    return Completion(
        request_id=request.request_id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        version_spans=(),
        weights_version=0,
        instance_id=InstanceId("i"),
    )


class Replay:
    """A backend over a manual clock; costs of steps pass at once, as a worker's host lets them pass."""

    def __init__(self, folder: Path, turns: Iterable[RecordedTurn], *, start_s: float = 100.0) -> None:
        path = folder / "trace.jsonl"
        write_trace(path, turns)
        self.clock = ManualClock(start_s)
        self.backend = TraceBackend(path, OneObject(), now_s=self.clock.now_s)  # type: ignore[arg-type]
        self.answered_s: dict[RequestId, float] = {}
        self.completions: dict[RequestId, Completion] = {}

    def step(self) -> None:
        step = self.backend.step(describe)
        assert not (step.answers and step.cost_s), "an answer that is due must not wait"
        assert 0 <= step.cost_s <= MAX_WAIT_S
        self.clock.advance(step.cost_s)
        for answer in step.answers:
            assert isinstance(answer, Generated)
            assert answer.completion.request_id not in self.answered_s
            self.answered_s[answer.completion.request_id] = self.clock.now_s()
            self.completions[answer.completion.request_id] = answer.completion

    def run_until(self, time_s: float) -> None:
        while self.clock.now_s() < time_s and self.backend.num_unfinished:
            self.step()

    def run(self) -> None:
        while self.backend.num_unfinished:
            self.step()


def test_answers_hold_what_was_recorded(tmp_path: Path) -> None:
    turns = [turn_of(number, 0.0) for number in range(4)]
    replay = Replay(tmp_path, turns)
    for number in range(4):
        replay.backend.add(request_of(number))
    replay.run()
    for number, turn in enumerate(turns):
        completion = replay.completions[RequestId(f"s0/r{number}")]
        assert (completion.tokens, completion.logprobs, completion.finish_reason) == (
            turn.tokens,
            turn.logprobs,
            turn.finish_reason,
        )


def test_times_count_from_the_first_request_of_each_step(tmp_path: Path) -> None:
    """Step 0 begins at 100: answers at 100.3 and 100.1. Step 1 begins at 102: its answer at 102.5."""
    replay = Replay(tmp_path, [turn_of(0, 0.3), turn_of(1, 0.1), turn_of(2, 0.5, step=1)])
    replay.backend.add(request_of(0))
    replay.backend.add(request_of(1))
    replay.run()
    replay.clock.advance(102.0 - replay.clock.now_s())
    replay.backend.add(request_of(2, step=1))
    replay.run()
    assert replay.answered_s == pytest.approx({"s0/r1": 100.1, "s0/r0": 100.3, "s1/r2": 102.5})
    assert list(replay.answered_s) == ["s0/r1", "s0/r0", "s1/r2"]


def test_a_turn_asked_late_is_answered_at_once(tmp_path: Path) -> None:
    """Recorded for 0.1 s after the start, asked 0.4 s after it."""
    replay = Replay(tmp_path, [turn_of(0, 1.0), turn_of(1, 0.1)])
    replay.backend.add(request_of(0))
    replay.run_until(100.4)
    asked_s = replay.clock.now_s()
    replay.backend.add(request_of(1))
    replay.run()
    assert replay.answered_s["s0/r1"] == asked_s  # type: ignore[index]
    assert replay.answered_s["s0/r0"] == pytest.approx(101.0)  # type: ignore[index]


@given(
    turns=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_each_request_is_answered_once_neither_early_nor_late(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[float, float]], cancelled: set[int]
) -> None:
    """Turn n is recorded for `turns[n][0]` and asked at `turns[n][1]`; those in `cancelled` are cancelled at once."""
    replay = Replay(
        tmp_path_factory.mktemp("trace"), [turn_of(n, recorded_s) for n, (recorded_s, _) in enumerate(turns)]
    )
    asked_s: dict[str, float] = {}
    for number, (_, ask_s) in sorted(enumerate(turns), key=lambda item: item[1][1]):
        replay.run_until(100.0 + ask_s)
        replay.clock.advance(max(0.0, 100.0 + ask_s - replay.clock.now_s()))
        request = request_of(number)
        asked_s[request.request_id] = replay.clock.now_s()
        replay.backend.add(request)
        if number in cancelled:
            replay.backend.cancel(request.request_id)
    replay.run()
    start_s = min(asked_s.values())
    assert replay.answered_s.keys() == {f"s0/r{number}" for number in range(len(turns)) if number not in cancelled}
    for number, (recorded_s, _) in enumerate(turns):
        request_id = request_of(number).request_id
        if number not in cancelled:
            due_s = max(start_s + recorded_s, asked_s[request_id])
            assert due_s - 1e-9 <= replay.answered_s[request_id] <= due_s + MAX_WAIT_S + 1e-9


def test_a_cancelled_turn_may_be_asked_again(tmp_path: Path) -> None:
    replay = Replay(tmp_path, [turn_of(0, 0.2)])
    replay.backend.add(request_of(0))
    replay.backend.cancel(RequestId("s0/r0"))
    assert replay.backend.num_unfinished == 0
    assert not replay.backend.step(describe).answers
    replay.backend.add(request_of(0))
    replay.run()
    assert replay.answered_s == pytest.approx({"s0/r0": 100.2})


def test_unfinished_requests_have_generated_nothing(tmp_path: Path) -> None:
    replay = Replay(tmp_path, [turn_of(0, 0.2)])
    replay.backend.add(request_of(0))
    assert replay.backend.num_generated() == {"s0/r0": 0}
    replay.run()
    assert replay.backend.num_generated() == {}


def test_weights_are_digested_and_change_no_token(tmp_path: Path) -> None:
    replay = Replay(tmp_path, [turn_of(0, 0.0)])
    key = ObjectKey("weights", "actor", 0)
    assert replay.backend.load_weights(key) == OneObject().packed(key).digest()


def test_a_missing_turn_is_refused_by_its_key_g10(tmp_path: Path) -> None:
    replay = Replay(tmp_path, [turn_of(0, 0.0)])
    with pytest.raises(ConfigError, match=r"trace\.jsonl has no turn s0/q7/t0/solver/b0/n0: record a run"):
        replay.backend.add(request_of(7))
    assert replay.backend.num_unfinished == 0


def test_another_prompt_is_refused_by_its_key_g10(tmp_path: Path) -> None:
    replay = Replay(tmp_path, [turn_of(0, 0.0)])
    with pytest.raises(ConfigError, match=r"turn s0/q0/t0/solver/b0/n0 with another prompt"):
        replay.backend.add(request_of(0, prompt=(1, 2, 4)))


def test_evaluations_are_refused_g10(tmp_path: Path) -> None:
    replay = Replay(tmp_path, [turn_of(0, 0.0)])
    with pytest.raises(ConfigError, match=r"eval\.at_ends=false"):
        replay.backend.add(request_of(0, purpose=Purpose.EVAL))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    turns = [turn_of(number, number / 8) for number in range(3)]
    write_trace(tmp_path / "t", turns)
    assert list(read_trace(tmp_path / "t").values()) == turns


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"rollout\.backend\.trace=\S+ cannot be read"),
        ("{}\n", r":1 is not a recorded turn: RecordedTurn: missing"),
        ("nonsense\n", r":1 is not a recorded turn"),
        ("twice", r":2 records s0/q0/t0/solver/b0/n0 again"),
    ],
)
def test_a_wrong_file_is_named_with_its_line_g10(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    if content == "twice":
        write_trace(path, [turn_of(0, 0.0), turn_of(0, 1.0)])
    elif content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_the_factory_builds_it_from_a_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [turn_of(0, 0.0)])
    options = {"backend": {"kind": "scripted", "trace": str(tmp_path / "t")}}
    assert isinstance(build_backend(OneObject(), options), TraceBackend)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["token_s", "prefill_token_s", "mean_tokens", "vocabulary"])
def test_options_of_drawing_are_refused_beside_a_trace_g10(option: str) -> None:
    value = "01" if option == "vocabulary" else 0.5
    with pytest.raises(ValidationError, match=f"{option}={value} has no effect with trace=file"):
        RolloutConfig.model_validate({"backend": {"kind": "scripted", "trace": "file", option: value}})


def test_a_trace_is_refused_under_virtual_time_g10() -> None:
    plain = scripted_config() | {"rollout": {"backend": {"kind": "scripted"}}, "runtime": {"kind": "simulated"}}
    parse_config(plain, [])
    with pytest.raises(ConfigError, match=r"rollout\.backend\.trace=file answers in real time"):
        parse_config(plain, ["rollout.backend.trace=file"])
