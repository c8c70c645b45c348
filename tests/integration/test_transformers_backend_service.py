"""An instance as a worker builds it: the embedded engine on a model folder, fed through messages."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flexmarl.core.errors import BackendError, ConfigError
from flexmarl.core.ids import AgentName, ObjectKey, PolicyName, Purpose, RequestId, SampleKey, WorkerId
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.messages import (
    CancelRequests,
    Generate,
    Generated,
    GenerationFailed,
    GenerationFailureKind,
    LoadWeights,
    WeightsLoaded,
)
from flexmarl.core.protocols import WorkerContext
from flexmarl.core.records import FinishReason, GenerationRequest, SamplingParams
from flexmarl.core.rng import derive_seed
from flexmarl.models import FlatParameters, ScriptedTokenizer, load_causal_lm
from flexmarl.rollout.instance import InstanceService, build_instance

pytestmark = pytest.mark.integration


class WallClock:
    def now_s(self) -> float:
        return time.monotonic()


class Objects:
    """An object plane of this process."""

    def __init__(self) -> None:
        self.contents: dict[ObjectKey, PackedObject] = {}

    def packed(self, key: ObjectKey) -> PackedObject:
        return self.contents[key]


def context_of(objects: Objects) -> WorkerContext:
    plane: Any = objects
    return WorkerContext(worker_id=WorkerId("instance-actor-0"), objects=plane, clock=WallClock(), send=print)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    target = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=103,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    return target


def load_of(version: int, packed: PackedObject) -> LoadWeights:
    return LoadWeights(
        policy=PolicyName("actor"),
        policy_version=version,
        weights_version=version,
        object_key=ObjectKey("weights", "actor", version),
        digest=packed.digest(),
    )


def generate(name: str, *, version: int, prompt: tuple[int, ...] = (1, 2, 3), limit: int = 6) -> Generate:
    return Generate(
        request=GenerationRequest(
            request_id=RequestId(name),
            purpose=Purpose.TRAIN,
            key=SampleKey(version, 0, 0, AgentName("solver"), 0, 0),
            attempt=0,
            policy=PolicyName("actor"),
            min_version=version,
            max_version=version,
            prompt_tokens=prompt,
            sampling=SamplingParams(max_new_tokens=limit, temperature=0.7),
            seed=derive_seed(name),
            stop_token_ids=(2,),
        )
    )


def drain(service: InstanceService) -> list[object]:
    messages: list[object] = []
    while (step := service.step()) is not None:
        messages.extend(step.messages)
    return messages


def test_two_versions_through_one_instance(folder: Path) -> None:
    objects = Objects()
    models = [load_causal_lm(folder), load_causal_lm(folder)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.2)
    service = build_instance(
        context_of(objects),
        {
            "policy": "actor",
            "model_folder": str(folder),
            "backend": {"kind": "transformers", "num_slots": 3, "admit_every": 2},
        },
    )
    for version, model in enumerate(models):
        packed = FlatParameters(model).packed()
        objects.contents[ObjectKey("weights", "actor", version)] = packed
        service.handle(load_of(version, packed))
        (loaded,) = drain(service)
        assert isinstance(loaded, WeightsLoaded)
        assert loaded.digest == packed.digest()
        for number in range(8):
            service.handle(generate(f"v{version}/{number}", version=version, prompt=(1 + number % 3, 40, 41)))
        service.handle(generate(f"v{version}/other", version=1 - version))
        service.handle(generate(f"v{version}/long", version=version, prompt=(1,) * 64))
        service.handle(CancelRequests(request_ids=(RequestId(f"v{version}/7"),)))
        answers = drain(service)
        failures = {str(a.request_id): a.failure_kind for a in answers if isinstance(a, GenerationFailed)}
        assert failures == {
            f"v{version}/other": GenerationFailureKind.WRONG_VERSION,
            f"v{version}/long": GenerationFailureKind.REFUSED,
        }
        completions = [answer.completion for answer in answers if isinstance(answer, Generated)]
        assert sorted(each.request_id for each in completions) == [f"v{version}/{n}" for n in range(7)]
        for completion in completions:
            assert completion.weights_version == version
            assert completion.instance_id == "instance-actor-0"
            assert (completion.tokens[-1] == 2) == (completion.finish_reason is FinishReason.STOP)
            prompt = (1 + int(completion.request_id[-1]) % 3, 40, 41)
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, 2:-1]
            expected = torch.log_softmax(logits / 0.7, dim=-1)[range(len(completion.tokens)), list(completion.tokens)]
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    service.close()


def test_damaged_weights_are_never_served(folder: Path) -> None:
    objects = Objects()
    packed = FlatParameters(load_causal_lm(folder)).packed()
    damaged = bytearray(packed.buffer)
    damaged[1000] ^= 1
    objects.contents[ObjectKey("weights", "actor", 0)] = PackedObject(
        layout=packed.layout, buffer=memoryview(bytes(damaged))
    )
    service = build_instance(
        context_of(objects), {"policy": "actor", "model_folder": str(folder), "backend": {"kind": "transformers"}}
    )
    service.handle(load_of(0, packed))
    with pytest.raises(BackendError, match="damaged"):
        service.step()


def test_a_scripted_instance_speaks_the_scripted_tokenizers_tokens() -> None:
    objects = Objects()
    layout = plan_layout([("weight", "uint8", (64,), 64)])
    packed = PackedObject(layout=layout, buffer=memoryview(bytes(64)))
    objects.contents[ObjectKey("weights", "actor", 0)] = packed
    service = build_instance(
        context_of(objects), {"policy": "actor", "backend": {"kind": "scripted", "vocabulary": "01+"}}
    )
    service.handle(load_of(0, packed))
    for number in range(5):
        service.handle(generate(f"r{number}", version=0))
    completions = [answer.completion for answer in drain(service) if isinstance(answer, Generated)]
    assert len(completions) == 5
    assert all(set(ScriptedTokenizer().decode(each.tokens)) <= set("01+") for each in completions)
    with pytest.raises(ConfigError, match="printable ASCII"):
        build_instance(context_of(objects), {"policy": "actor", "backend": {"kind": "scripted", "vocabulary": "0é"}})


def deterministic_bits(folder: Path, numbers: list[int]) -> dict[str, tuple[list[int], list[str]]]:
    """Return tokens and exact log-probs of requests that a new deterministic instance gets in this order."""
    objects = Objects()
    packed = FlatParameters(load_causal_lm(folder)).packed()
    objects.contents[ObjectKey("weights", "actor", 0)] = packed
    options = {
        "policy": "actor",
        "model_folder": str(folder),
        "backend": {"kind": "transformers", "num_slots": 6},
        "is_deterministic": True,
    }
    service = build_instance(context_of(objects), options)
    service.handle(load_of(0, packed))
    for number in numbers:
        service.handle(generate(f"r{number}", version=0, prompt=(3,) * (1 + 5 * (number % 4)), limit=9 + number))
    completions = [answer.completion for answer in drain(service) if isinstance(answer, Generated)]
    service.close()
    return {str(each.request_id): (list(each.tokens), [value.hex() for value in each.logprobs]) for each in completions}


def test_deterministic_bits_are_those_of_another_process_with_other_company(folder: Path) -> None:
    here = deterministic_bits(folder, list(range(14)))
    # This file as a script: see its end.
    done = subprocess.run(
        [sys.executable, __file__, str(folder), json.dumps([13, 2, 9, 4, 0])],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    there = {name: (tokens, bits) for name, (tokens, bits) in json.loads(done.stdout.splitlines()[-1]).items()}
    assert there.keys() == {"r13", "r2", "r9", "r4", "r0"}
    assert there == {name: here[name] for name in there}


if __name__ == "__main__":
    print(json.dumps(deterministic_bits(Path(sys.argv[1]), json.loads(sys.argv[2]))))
