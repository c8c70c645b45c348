"""The embedded rollout engine beside batch-synchronous `generate` of transformers: tokens per second, one thread.

256 requests through 32 slots. `skewed`: a tenth of them generates 10 times more tokens; `uniform`: all equally many.
`generate` takes the requests in the same order, 32 at a time, and each batch runs until its longest member is done;
only tokens that were asked for count, on both sides. Both sides sample at temperature 1 and alternate within one run.

Usage: .venv/bin/python benchmarks/rollout.py [--json] [--quick]
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before torch is imported: its thread pools read it once.
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import transformers
from report import parser_of, spread_of, with_setting

from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.layout import PackedObject
from flexmarl.core.messages import Generated
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, SamplingParams
from flexmarl.core.rng import HashRng
from flexmarl.models import FlatParameters, load_causal_lm, resolve_model_folder, shipped_models
from flexmarl.rollout.backends.transformers import TransformersBackend

NUM_SLOTS = 32
CONTEXT_TOKENS = 512
FACTOR = 10
"""How much longer the long requests are."""


class OneObject:
    """An object plane that holds the weights of one model."""

    def __init__(self, content: PackedObject) -> None:
        """Hold `content` under every key."""
        self._content = content

    def packed(self, key: ObjectKey) -> PackedObject:
        """Return the content."""
        return self._content


def prepare_model(folder: Path) -> tuple[Any, str]:
    """Write the model to `folder` with room for long requests; return it with its name."""
    if "chain_sum" in shipped_models():
        model: Any = load_causal_lm(resolve_model_folder("shipped:chain_sum"))
        # The position encoding has no table: a longer context needs no other weights.
        model.config.max_position_embeddings = CONTEXT_TOKENS
        name = "shipped:chain_sum"
    else:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=103,
            max_position_embeddings=CONTEXT_TOKENS,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        name = "random Llama of the same size"
    model.save_pretrained(folder)
    return model, name


def make_requests(lengths: Sequence[int]) -> list[GenerationRequest]:
    """Return one request per length, with prompts of 8 to 24 tokens."""
    rng = HashRng(0)
    return [
        GenerationRequest(
            request_id=RequestId(str(number)),
            purpose=Purpose.EVAL,
            key=SampleKey(0, number, 0, AgentName("agent"), 0, 0),
            attempt=0,
            policy=PolicyName("policy"),
            min_version=0,
            max_version=0,
            prompt_tokens=tuple(3 + rng.below(100) for _ in range(8 + rng.below(17))),
            sampling=SamplingParams(max_new_tokens=length, ignore_stop=True),
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]


def describe(
    request: GenerationRequest, tokens: Sequence[int], logprobs: Sequence[float], *, is_stopped: bool
) -> Completion:
    """Return a completion without versions."""
    return Completion(
        request_id=request.request_id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        version_spans=(),
        weights_version=0,
        instance_id=InstanceId("benchmark"),
    )


def run_engine(backend: TransformersBackend, requests: Sequence[GenerationRequest]) -> int:
    """Answer all requests; return the number of tokens generated."""
    for request in requests:
        backend.add(request)
    num_tokens = 0
    while backend.num_unfinished:
        for answer in backend.step(describe).answers:
            if not isinstance(answer, Generated):
                raise RuntimeError(f"the engine failed: {answer.message}")
            num_tokens += len(answer.completion.tokens)
    return num_tokens


@torch.inference_mode()
def run_generate(model: Any, requests: Sequence[GenerationRequest]) -> int:
    """Answer all requests in batches of NUM_SLOTS; return the number of tokens that were asked for."""
    num_tokens = 0
    for start in range(0, len(requests), NUM_SLOTS):
        batch = requests[start : start + NUM_SLOTS]
        longest = max(len(request.prompt_tokens) for request in batch)
        padding = [longest - len(request.prompt_tokens) for request in batch]
        rows = [[0] * pad + list(request.prompt_tokens) for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        limit = max(request.sampling.max_new_tokens for request in batch)
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=limit,
            eos_token_id=None,
            pad_token_id=0,
        )
        if output.shape[1] != longest + limit:
            raise RuntimeError(f"generate made {output.shape[1] - longest} tokens, expected {limit}")
        num_tokens += sum(request.sampling.max_new_tokens for request in batch)
    return num_tokens


def rate(run: Callable[[], int]) -> float:
    """Return the tokens per second of one run."""
    start_s = time.perf_counter()
    num_tokens = run()
    return num_tokens / (time.perf_counter() - start_s)


def compare(
    backend: TransformersBackend, model: Any, lengths: Sequence[int], *, repeats: int
) -> dict[str, dict[str, float]]:
    """Measure both sides alternately; the first repeat warms up and does not count."""
    requests = make_requests(lengths)
    pairs = [
        (rate(lambda: run_engine(backend, requests)), rate(lambda: run_generate(model, requests)))
        for _ in range(repeats + 1)
    ][1:]
    return {
        "tokens_per_s": spread_of([engine for engine, _ in pairs]),
        "generate_tokens_per_s": spread_of([generate for _, generate in pairs]),
        "ratio": spread_of([engine / generate for engine, generate in pairs]),
    }


def measure(*, is_quick: bool) -> dict[str, Any]:
    """Return the result object."""
    torch.set_num_threads(1)
    num_requests, short, repeats = (64, 12, 2) if is_quick else (256, 24, 5)
    lengths = [short] * num_requests
    for number in range(0, num_requests, 10):
        lengths[number] = short * FACTOR
    HashRng(1).shuffle(lengths)
    uniform = [round(statistics.mean(lengths))] * num_requests
    with tempfile.TemporaryDirectory() as name:
        model, model_name = prepare_model(Path(name))
        plane: Any = OneObject(FlatParameters(model).packed())
        backend = TransformersBackend(Path(name), plane, num_slots=NUM_SLOTS)
    backend.load_weights(ObjectKey("weights", "policy", 0))
    results = {
        "skewed": compare(backend, model, lengths, repeats=repeats),
        "uniform": compare(backend, model, uniform, repeats=repeats),
    }
    config = {
        "num_requests": num_requests,
        "num_slots": NUM_SLOTS,
        "short_tokens": short,
        "long_tokens": short * FACTOR,
        "uniform_tokens": uniform[0],
        "repeats": repeats,
        "model": model_name,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "threads": torch.get_num_threads(),
    }
    figures = {
        "benchmark": "rollout",
        "unit": "tokens/s",
        "tokens_per_s": results["skewed"]["tokens_per_s"]["median"],
        "generate_tokens_per_s": results["skewed"]["generate_tokens_per_s"]["median"],
        "ratio": results["skewed"]["ratio"]["median"],
        "uniform_ratio": results["uniform"]["ratio"]["median"],
        "spread": results,
    }
    return with_setting(figures, config, is_quick=is_quick)


def main() -> None:
    """Run the benchmark."""
    arguments = parser_of(
        "Embedded rollout engine beside batch-synchronous generate.", quick="fewer and shorter requests"
    ).parse_args()
    result = measure(is_quick=arguments.quick)
    if arguments.json:
        print(json.dumps(result))
        return
    for load, rows in result["spread"].items():
        for metric, spread in rows.items():
            print(f"{load:8} {metric:22} {spread['median']:10.2f}  [{spread['min']:.2f}, {spread['max']:.2f}]")


if __name__ == "__main__":
    main()
