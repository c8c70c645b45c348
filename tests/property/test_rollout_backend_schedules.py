"""Whatever the arrivals, cancellations and slots: each request is answered once, with the tokens of its seed."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from flexmarl.config import ScriptedRolloutConfig
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.layout import PackedObject
from flexmarl.core.messages import Generated
from flexmarl.core.protocols import InferenceBackend
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, SamplingParams
from flexmarl.models import FlatParameters
from flexmarl.rollout.backends.scripted import ScriptedBackend
from flexmarl.rollout.backends.transformers import TransformersBackend

pytestmark = pytest.mark.property

NUM_REQUESTS = 8
# The longest crosses the end of a block of the cache.
PROMPTS = [(1, 2, 3), (4,), (1, 2, 3), (*range(1, 15), *range(1, 15)), (5, 6), (4,), (7, 8, 9, 10), (1, 2, 3)]


class Plane:
    """An object plane with one object."""

    def __init__(self, content: PackedObject) -> None:
        self.content = content

    def packed(self, key: ObjectKey) -> PackedObject:
        return self.content


@functools.cache
def weights(family: type[LlamaConfig] | type[Qwen2Config] = LlamaConfig) -> tuple[Path, Plane]:
    torch.manual_seed(0)
    config = family(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
        max_position_embeddings=96,
        initializer_range=0.4,
    )
    folder = Path(tempfile.mkdtemp(prefix="flexmarl-test-"))
    config.save_pretrained(folder)
    return folder, Plane(FlatParameters(AutoModelForCausalLM.from_config(config).eval()).packed())


def embedded(num_slots: int, admit_every: int, family: Any = LlamaConfig, **options: bool) -> InferenceBackend:
    folder, objects = weights(family)
    plane: Any = objects
    backend = TransformersBackend(folder, plane, num_slots=num_slots, admit_every=admit_every, **options)
    backend.load_weights(ObjectKey("weights", "actor", 0))
    return backend


def deterministic(num_slots: int, admit_every: int) -> InferenceBackend:
    return embedded(num_slots, admit_every, is_deterministic=True)


def deterministic_other(num_slots: int, admit_every: int) -> InferenceBackend:
    """A model that runs through the forward of transformers."""
    return embedded(num_slots, admit_every, Qwen2Config, is_deterministic=True)


def scripted(num_slots: int, admit_every: int) -> InferenceBackend:
    plane: Any = weights()[1]
    return ScriptedBackend(ScriptedRolloutConfig(num_slots=num_slots), plane, tokens=(5, 6, 7))


def request_of(index: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"r{index}"),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, index, 0, AgentName("solver"), 0, 0),
        attempt=0,
        policy=PolicyName("actor"),
        min_version=0,
        max_version=0,
        prompt_tokens=PROMPTS[index],
        sampling=SamplingParams(
            max_new_tokens=1 + 3 * index, temperature=0.0 if index == 4 else 0.9, top_k=5 if index == 6 else None
        ),
        seed=1000 + index,
        stop_token_ids=(2, 3)[: index % 3],
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


def advance(backend: InferenceBackend, answered: dict[str, Completion]) -> None:
    for answer in backend.step(describe).answers:
        assert isinstance(answer, Generated)
        assert answer.completion.request_id not in answered, "answered twice"
        answered[str(answer.completion.request_id)] = answer.completion


@functools.cache
def alone(make: Any, index: int, num_slots: int) -> Completion:
    backend: InferenceBackend = make(num_slots, 1)
    backend.add(request_of(index))
    answered: dict[str, Completion] = {}
    while backend.num_unfinished:
        advance(backend, answered)
    return answered[f"r{index}"]


schedules = given(
    order=st.permutations(range(NUM_REQUESTS)),
    pauses=st.lists(st.integers(0, 4), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    cancelled=st.dictionaries(st.integers(0, NUM_REQUESTS - 1), st.integers(0, 12), max_size=3),
    num_slots=st.integers(1, 5),
    admit_every=st.integers(1, 3),
)


@pytest.mark.parametrize("make", [embedded, scripted])
@settings(max_examples=40, deadline=None)
@schedules
def test_every_request_gets_its_own_tokens_once(
    make: Any, order: list[int], pauses: list[int], cancelled: dict[int, int], num_slots: int, admit_every: int
) -> None:
    answered = run_schedule(make(num_slots, admit_every), order, pauses, cancelled)
    for name, completion in answered.items():
        expected = alone(make, int(name[1:]), 1)
        assert completion.tokens == expected.tokens
        assert completion.finish_reason == expected.finish_reason
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("make", [deterministic, deterministic_other])
@settings(max_examples=25, deadline=None)
@schedules
def test_deterministic_requests_get_the_same_bits_in_any_company(
    make: Any, order: list[int], pauses: list[int], cancelled: dict[int, int], num_slots: int, admit_every: int
) -> None:
    answered = run_schedule(make(num_slots, admit_every), order, pauses, cancelled)
    for name, completion in answered.items():
        expected = alone(make, int(name[1:]), num_slots)
        assert completion == expected


def test_company_changes_bits_without_the_option() -> None:
    # Shows that the test above can fail: the same schedule, the default engine.
    def logprobs(make: Any) -> list[bool]:
        together = run_schedule(make(5, 1), list(range(NUM_REQUESTS)), [0] * NUM_REQUESTS, {})
        return [together[f"r{n}"].logprobs == alone(make, n, 5).logprobs for n in range(NUM_REQUESTS)]

    assert all(logprobs(deterministic))
    assert not all(logprobs(embedded))


def run_schedule(
    backend: InferenceBackend, order: list[int], pauses: list[int], cancelled: dict[int, int]
) -> dict[str, Completion]:
    """Let requests arrive in `order` after `pauses`, cancel some after a delay; all others must be answered."""
    answered: dict[str, Completion] = {}
    arrivals = {index: sum(pauses[: place + 1]) for place, index in enumerate(order)}
    withdrawn = set()
    for now in range(1000):
        for index in order:
            if arrivals[index] == now:
                backend.add(request_of(index))
        for index, delay in cancelled.items():
            if arrivals[index] + delay == now and f"r{index}" not in answered:
                backend.cancel(RequestId(f"r{index}"))
                withdrawn.add(index)
        if now > max(arrivals.values()) + 12 and not backend.num_unfinished:
            break
        advance(backend, answered)
    assert answered.keys() == {f"r{index}" for index in range(NUM_REQUESTS) if index not in withdrawn}
    return answered
