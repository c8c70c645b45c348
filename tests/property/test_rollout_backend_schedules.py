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
from transformers import LlamaConfig, LlamaForCausalLM

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
PROMPTS = [(1, 2, 3), (4,), (1, 2, 3), tuple(range(1, 15)), (5, 6), (4,), (7, 8, 9, 10), (1, 2, 3)]


class Plane:
    """An object plane with one object."""

    def __init__(self, content: PackedObject) -> None:
        self.content = content

    def packed(self, key: ObjectKey) -> PackedObject:
        return self.content


@functools.cache
def weights() -> tuple[Path, Plane]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    folder = Path(tempfile.mkdtemp(prefix="flexmarl-test-"))
    config.save_pretrained(folder)
    return folder, Plane(FlatParameters(LlamaForCausalLM(config)).packed())


def embedded(num_slots: int, admit_every: int) -> InferenceBackend:
    folder, plane = weights()
    backend = TransformersBackend(folder, plane, num_slots=num_slots, admit_every=admit_every)  # type: ignore[arg-type]
    backend.load_weights(ObjectKey("weights", "actor", 0))
    return backend


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
        sampling=SamplingParams(max_new_tokens=1 + 3 * index, temperature=0.0 if index == 4 else 0.9),
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
def alone(make: Any, index: int) -> Completion:
    backend: InferenceBackend = make(1, 1)
    backend.add(request_of(index))
    answered: dict[str, Completion] = {}
    while backend.num_unfinished:
        advance(backend, answered)
    return answered[f"r{index}"]


@pytest.mark.parametrize("make", [embedded, scripted])
@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(NUM_REQUESTS)),
    pauses=st.lists(st.integers(0, 4), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    cancelled=st.dictionaries(st.integers(0, NUM_REQUESTS - 1), st.integers(0, 12), max_size=3),
    num_slots=st.integers(1, 5),
    admit_every=st.integers(1, 3),
)
def test_every_request_gets_its_own_tokens_once(
    make: Any, order: list[int], pauses: list[int], cancelled: dict[int, int], num_slots: int, admit_every: int
) -> None:
    backend: InferenceBackend = make(num_slots, admit_every)
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
    for name, completion in answered.items():
        expected = alone(make, int(name[1:]))
        assert completion.tokens == expected.tokens
        assert completion.finish_reason == expected.finish_reason
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
