"""The engine without a model: determinism, limits, costs."""

import math
from collections.abc import Sequence

import pytest

from flexmarl.config import ScriptedRolloutConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.messages import Generated
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, SamplingParams
from flexmarl.rollout.backends.scripted import ScriptedBackend

pytestmark = pytest.mark.unit

STOP = 99
TOKENS = (10, 11, 12, 13)


class OneObject:
    """An object plane with one object."""

    def __init__(self, content: PackedObject) -> None:
        self.content = content

    def packed(self, key: ObjectKey) -> PackedObject:
        return self.content


def packed_bytes(content: bytes) -> PackedObject:
    layout = plan_layout([("weight", "uint8", (len(content),), len(content))])
    return PackedObject(layout=layout, buffer=memoryview(content.ljust(layout.num_bytes, b"\0")))


def backend_with(**options: object) -> ScriptedBackend:
    config = ScriptedRolloutConfig.model_validate(options)
    return ScriptedBackend(config, OneObject(packed_bytes(b"weights")), tokens=TOKENS)  # type: ignore[arg-type]


def request_of(
    seed: int,
    *,
    limit: int = 8,
    stops: tuple[int, ...] = (STOP,),
    ignore_stop: bool = False,
    prompt: tuple[int, ...] = (1, 2, 3),
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"r{seed}"),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, seed, 0, AgentName("solver"), 0, 0),
        attempt=0,
        policy=PolicyName("actor"),
        min_version=0,
        max_version=0,
        prompt_tokens=prompt,
        sampling=SamplingParams(max_new_tokens=limit, ignore_stop=ignore_stop),
        seed=seed,
        stop_token_ids=stops,
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


def run(backend: ScriptedBackend) -> tuple[dict[str, Completion], list[float]]:
    completions, costs = {}, []
    while backend.num_unfinished:
        step = backend.step(describe)
        costs.append(step.cost_s)
        for answer in step.answers:
            assert isinstance(answer, Generated)
            completions[str(answer.completion.request_id)] = answer.completion
    return completions, costs


def test_tokens_do_not_depend_on_company_or_slots() -> None:
    crowd = backend_with(num_slots=3)
    for seed in range(20):
        crowd.add(request_of(seed))
    together, _ = run(crowd)
    for seed in range(20):
        alone = backend_with()
        alone.add(request_of(seed))
        assert run(alone)[0][f"r{seed}"] == together[f"r{seed}"]


def test_content_is_of_the_vocabulary_and_ends_with_stop_unless_truncated() -> None:
    backend = backend_with()
    for seed in range(300):
        backend.add(request_of(seed, limit=4))
    completions, _ = run(backend)
    reasons = dict.fromkeys(FinishReason, 0)
    for completion in completions.values():
        reasons[completion.finish_reason] += 1
        content = completion.tokens[:-1] if completion.finish_reason is FinishReason.STOP else completion.tokens
        assert 1 <= len(content)
        assert set(content) <= set(TOKENS)
        assert len(completion.tokens) <= 4
        assert (completion.tokens[-1] == STOP) == (completion.finish_reason is FinishReason.STOP)
        assert set(completion.logprobs) == {-math.log(5)}
    # One of four lengths, drawn uniformly, leaves no room for the stop token: 75 of 300, standard deviation 7.5.
    assert 45 < reasons[FinishReason.LENGTH] < 105


def test_mean_tokens_sets_the_mean_of_the_content() -> None:
    backend = backend_with(mean_tokens=5.0, num_slots=1000)
    for seed in range(1000):
        backend.add(request_of(seed, limit=100))
    completions, _ = run(backend)
    mean = sum(len(completion.tokens) - 1 for completion in completions.values()) / 1000
    # A geometric number with mean 5 has standard deviation 4.5: 0.14 for the mean of 1000.
    assert mean == pytest.approx(5.0, abs=0.6)


@pytest.mark.parametrize(("stops", "ignore_stop"), [((), False), ((STOP,), True)])
def test_without_a_stop_token_the_limit_is_reached(stops: tuple[int, ...], ignore_stop: bool) -> None:
    backend = backend_with()
    backend.add(request_of(7, limit=6, stops=stops, ignore_stop=ignore_stop))
    completion = run(backend)[0]["r7"]
    assert len(completion.tokens) == 6
    assert completion.finish_reason is FinishReason.LENGTH


def test_costs_by_hand() -> None:
    backend = backend_with(num_slots=2, token_s=1.0, prefill_token_s=0.01)
    for seed, limit in enumerate((1, 2, 2)):
        backend.add(request_of(seed, limit=limit, ignore_stop=True, prompt=(1,) * 10 * (seed + 1)))
    # r0 and r1 enter (10 + 20 prompt tokens); r0 ends; r2 enters (30); r1 ends; r2 ends.
    assert run(backend)[1] == pytest.approx([1.3, 1.3, 1.0])


def test_cancelled_requests_are_not_answered() -> None:
    backend = backend_with(num_slots=1)
    for seed in (1, 2, 3):
        backend.add(request_of(seed, ignore_stop=True))
    backend.step(describe)
    backend.cancel(RequestId("r1"))
    backend.cancel(RequestId("r2"))
    backend.cancel(RequestId("unknown"))
    assert backend.num_unfinished == 1
    assert list(run(backend)[0]) == ["r3"]


def test_weights_change_between_two_steps_and_touch_no_token() -> None:
    expected = backend_with(num_slots=2)
    backend = backend_with(num_slots=2)
    for each in (expected, backend):
        for seed in (1, 2, 3):
            each.add(request_of(seed, limit=4, ignore_stop=True))
    assert backend.num_generated() == {"r1": 0, "r2": 0, "r3": 0}
    backend.step(describe)
    backend.load_weights(ObjectKey("weights", "actor", 1))
    assert backend.num_generated() == {"r1": 1, "r2": 1, "r3": 0}
    assert run(backend)[0] == run(expected)[0]
    assert backend.num_generated() == {}


def test_weights_are_digested() -> None:
    content = packed_bytes(b"other weights")
    backend = ScriptedBackend(ScriptedRolloutConfig(), OneObject(content), tokens=TOKENS)  # type: ignore[arg-type]
    assert backend.load_weights(ObjectKey("weights", "actor", 1)) == content.digest()


def test_bad_requests_are_refused_by_name() -> None:
    backend = backend_with()
    with pytest.raises(ConfigError, match="r1: the prompt is empty"):
        backend.add(request_of(1, prompt=()))
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        backend.add(request_of(1, limit=0))
    with pytest.raises(ConfigError, match="vocabulary is empty"):
        ScriptedBackend(ScriptedRolloutConfig(), OneObject(packed_bytes(b"")), tokens=())  # type: ignore[arg-type]
    assert backend.num_unfinished == 0
