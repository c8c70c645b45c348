"""Weights that change while requests run: nothing is lost, every token is labelled with the weights that made it."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

from flexmarl.config import ScriptedRolloutConfig
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.layout import PackedObject
from flexmarl.core.messages import Generate, Generated, LoadWeights, WeightsLoaded
from flexmarl.core.protocols import InferenceBackend
from flexmarl.core.records import Completion, GenerationRequest, SamplingParams
from flexmarl.models import FlatParameters
from flexmarl.rollout.backends.scripted import ScriptedBackend
from flexmarl.rollout.backends.transformers import TransformersBackend
from flexmarl.rollout.instance import InstanceService

pytestmark = pytest.mark.property

NUM_VERSIONS = 4
NUM_REQUESTS = 6
TEMPERATURE = 0.9
# The longest crosses the end of a block of the cache while it generates.
PROMPTS = [(1, 2, 3), (4,), (1, 2, 3), (*range(1, 15), *range(1, 15)), (5, 6), (7, 8, 9, 10)]


class Plane:
    """An object plane with the weights of each version."""

    def __init__(self, contents: list[PackedObject]) -> None:
        self.contents = contents

    def packed(self, key: ObjectKey) -> PackedObject:
        return self.contents[key.version]


@functools.cache
def models(family: type[LlamaConfig] | type[Qwen2Config]) -> tuple[Path, list[Any], Plane]:
    config = family(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
        max_position_embeddings=96,
        initializer_range=0.4,  # wide, so that the versions disagree
    )
    folder = Path(tempfile.mkdtemp(prefix="flexmarl-test-"))
    config.save_pretrained(folder)
    versions = []
    for seed in range(NUM_VERSIONS):
        torch.manual_seed(seed)
        versions.append(AutoModelForCausalLM.from_config(config).eval())
    return folder, versions, Plane([FlatParameters(model).packed() for model in versions])


def embedded(family: Any, num_slots: int, admit_every: int, **options: bool) -> InferenceBackend:
    folder, _, plane = models(family)
    objects: Any = plane
    return TransformersBackend(folder, objects, num_slots=num_slots, admit_every=admit_every, **options)


def scripted(family: Any, num_slots: int, admit_every: int) -> InferenceBackend:
    objects: Any = models(family)[2]
    return ScriptedBackend(ScriptedRolloutConfig(num_slots=num_slots), objects, tokens=(5, 6, 7))


def request_of(index: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"r{index}"),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, index, 0, AgentName("solver"), 0, 0),
        attempt=0,
        policy=PolicyName("actor"),
        min_version=0,
        max_version=NUM_VERSIONS,
        prompt_tokens=PROMPTS[index],
        sampling=SamplingParams(max_new_tokens=4 + 4 * index, temperature=TEMPERATURE),
        seed=1000 + index,
        stop_token_ids=(2, 3)[: index % 3],
    )


class Schedule:
    """An instance whose weights change before some of its steps."""

    def __init__(self, backend: InferenceBackend, plane: Plane) -> None:
        self.backend = backend
        self.service = InstanceService(backend, instance_id=InstanceId("i"))
        self.plane = plane
        self.version = -1
        self.answered: dict[str, Completion] = {}
        self.generated_by: dict[str, list[int]] = {}
        """Version of every token, seen from outside: counted before and after each step."""
        self.swap()

    def swap(self) -> None:
        """Load the next version and generate nothing."""
        self.version += 1
        weights = ObjectKey("weights", "actor", self.version)
        digest = self.plane.contents[self.version].digest()
        self.service.handle(
            LoadWeights(
                policy=PolicyName("actor"),
                policy_version=self.version,
                weights_version=self.version,
                object_key=weights,
                digest=digest,
            )
        )
        step = self.service.step()
        assert step is not None
        assert [type(message) for message in step.messages] == [WeightsLoaded]

    def add(self, index: int) -> None:
        self.generated_by[f"r{index}"] = []
        self.service.handle(Generate(request=request_of(index)))

    def step(self) -> bool:
        """Let the engine advance once; whether it had work."""
        step = self.service.step()
        if step is None:
            return False
        for message in step.messages:
            assert isinstance(message, Generated)
            name = str(message.completion.request_id)
            assert name not in self.answered, "answered twice"
            self.answered[name] = message.completion
        counts = {str(name): count for name, count in self.backend.num_generated().items()}
        for name, labels in self.generated_by.items():
            count = len(self.answered[name].tokens) if name in self.answered else counts[name]
            labels += [self.version] * (count - len(labels))
        return True


@torch.no_grad()
def reference_logprobs(family: Any, request: GenerationRequest, completion: Completion) -> list[float]:
    """Log-probs by plain models, one token at a time: the version of a token's span reads what comes before it."""
    cache = DynamicCache()
    values = []
    for span in completion.version_spans:
        model = models(family)[1][span.policy_version]
        for place in range(span.start, span.end):
            fed = request.prompt_tokens if place == 0 else (completion.tokens[place - 1],)
            logits = model(torch.tensor([list(fed)]), past_key_values=cache, use_cache=True).logits[0, -1]
            values.append(float(torch.log_softmax(logits / TEMPERATURE, dim=-1)[completion.tokens[place]]))
    return values


def run_schedule(schedule: Schedule, pauses: list[int], swaps: list[int]) -> None:
    """Let request i arrive after the first i pauses, and weights change before the steps `swaps`."""
    arrivals = [sum(pauses[: index + 1]) for index in range(NUM_REQUESTS)]
    for now in range(500):
        for index, arrival in enumerate(arrivals):
            if arrival == now:
                schedule.add(index)
        for _ in range(swaps.count(now)):
            schedule.swap()
        if not schedule.step() and now > max(*arrivals, *swaps):
            return
    raise AssertionError("the schedule did not end")


@pytest.mark.parametrize(
    ("make", "family"),
    [(embedded, LlamaConfig), (embedded, Qwen2Config), (scripted, LlamaConfig)],
    ids=["llama", "transformers", "scripted"],
)
@settings(max_examples=20, deadline=None)
@given(
    pauses=st.lists(st.integers(0, 4), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    swaps=st.lists(st.integers(1, 30), min_size=NUM_VERSIONS - 1, max_size=NUM_VERSIONS - 1),
    num_slots=st.integers(1, 4),
    admit_every=st.integers(1, 3),
)
def test_g3_g8_every_token_is_labelled_with_the_weights_that_generated_it(
    make: Any, family: Any, pauses: list[int], swaps: list[int], num_slots: int, admit_every: int
) -> None:
    schedule = Schedule(make(family, num_slots, admit_every), models(family)[2])
    run_schedule(schedule, pauses, swaps)
    assert schedule.answered.keys() == {f"r{index}" for index in range(NUM_REQUESTS)}  # a publication loses nothing
    for index in range(NUM_REQUESTS):
        completion = schedule.answered[f"r{index}"]
        spans = completion.version_spans
        event(f"{len(spans)} spans")
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(completion.tokens)
        assert all(span.start < span.end for span in spans)
        assert completion.weights_version == min(span.policy_version for span in spans)
        labels = [span.policy_version for span in spans for _ in range(span.start, span.end)]
        assert labels == schedule.generated_by[f"r{index}"]
        if make is embedded:
            expected = reference_logprobs(family, request_of(index), completion)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_versions_disagree_so_that_a_wrong_label_would_be_seen() -> None:
    schedule = Schedule(embedded(LlamaConfig, 4, 1), models(LlamaConfig)[2])
    run_schedule(schedule, [0] * NUM_REQUESTS, [3, 6, 9])
    completion = max(schedule.answered.values(), key=lambda each: len(each.tokens))
    first, second, *_ = completion.version_spans
    spans = (replace(first, end=second.end), *completion.version_spans[2:])
    mislabelled = replace(completion, version_spans=spans)
    expected = reference_logprobs(LlamaConfig, request_of(int(completion.request_id[1:])), mislabelled)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) > 0.05


def test_deterministic_requests_repeat_their_bits_when_weights_change_at_the_same_step() -> None:
    def logprobs() -> dict[str, Completion]:
        schedule = Schedule(embedded(LlamaConfig, 4, 1, is_deterministic=True), models(LlamaConfig)[2])
        run_schedule(schedule, [0] * NUM_REQUESTS, [3, 6, 9])
        return schedule.answered

    assert logprobs() == logprobs()
