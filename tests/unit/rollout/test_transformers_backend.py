"""The embedded engine beside plain forwards of the same model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from flexmarl.core.errors import BackendError, ConfigError
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.layout import PackedObject
from flexmarl.core.messages import Generated, GenerationFailed
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, SamplingParams
from flexmarl.models import FlatParameters
from flexmarl.rollout.backends.forward import HuggingFaceForward
from flexmarl.rollout.backends.llama import LlamaForward
from flexmarl.rollout.backends.passes import decode_pass, prefill_pass
from flexmarl.rollout.backends.transformers import TransformersBackend, new_slot_cache

pytestmark = pytest.mark.unit

CONTEXT = 48
VOCABULARY = 40
KEY = ObjectKey("weights", "actor", 0)


class OneObject:
    """An object plane with one object."""

    def __init__(self, content: PackedObject) -> None:
        self.content = content

    def packed(self, key: ObjectKey) -> PackedObject:
        return self.content


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    # Wide weights: with the usual 0.02 every next token is about equally likely, which would hide wrong ones.
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied_biased": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama_head_dim": LlamaConfig(**SHAPE, head_dim=16, rms_norm_eps=1e-3),
    "llama3_rope": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": Qwen2Config(**SHAPE),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def any_model(request: pytest.FixtureRequest) -> Any:
    return new_model(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model("llama")


def new_model(name: str) -> Any:
    torch.manual_seed(3)
    config = CONFIGS[name]
    built: Any = Qwen2ForCausalLM(config) if isinstance(config, Qwen2Config) else LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return built.eval()


def engine_of(model: Any, folder: Path, **options: int) -> TransformersBackend:
    model.config.save_pretrained(folder)
    backend = TransformersBackend(folder, OneObject(FlatParameters(model).packed()), **options)  # type: ignore[arg-type]
    backend.load_weights(KEY)
    return backend


def request_of(
    name: str,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    limit: int = 12,
    temperature: float = 1.0,
    stops: tuple[int, ...] = (),
    ignore_stop: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, 0, 0, AgentName("solver"), 0, 0),
        attempt=0,
        policy=PolicyName("actor"),
        min_version=0,
        max_version=0,
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=limit, temperature=temperature, ignore_stop=ignore_stop),
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


def step(backend: TransformersBackend) -> dict[str, Completion]:
    completions = {}
    for answer in backend.step(describe).answers:
        assert isinstance(answer, Generated)
        completions[str(answer.completion.request_id)] = answer.completion
    return completions


def run(backend: TransformersBackend, requests: Sequence[GenerationRequest] = ()) -> dict[str, Completion]:
    for request in requests:
        backend.add(request)
    completions: dict[str, Completion] = {}
    while backend.num_unfinished:
        finished = step(backend)
        assert not finished.keys() & completions.keys()
        completions |= finished
    return completions


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3], [30, 31, 32, 33, 34]]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_equal_a_full_forward(any_model: Any, temperature: float, tmp_path: Path) -> None:
    # Two slots for five requests of different lengths: newcomers meet running sequences, slots are compacted.
    requests = [
        request_of(f"r{n}", prompt, seed=n, limit=4 + 3 * n, temperature=temperature)
        for n, prompt in enumerate(PROMPTS)
    ]
    completions = run(engine_of(any_model, tmp_path, num_slots=2), requests)
    for request in requests:
        completion = completions[str(request.request_id)]
        assert len(completion.tokens) == request.sampling.max_new_tokens
        expected = reference_logprobs(any_model, request.prompt_tokens, completion.tokens, temperature=temperature)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    # The check would be blind if every token were equally likely.
    assert max(max(each.logprobs) for each in completions.values()) > -1.0


def test_greedy_equals_generate(any_model: Any, tmp_path: Path) -> None:
    requests = [request_of(f"r{n}", prompt, temperature=0.0, limit=10) for n, prompt in enumerate(PROMPTS)]
    completions = run(engine_of(any_model, tmp_path, num_slots=3), requests)
    for request in requests:
        prompt = torch.tensor([request.prompt_tokens])
        generated = any_model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=None,
            pad_token_id=0,
        )
        completion = completions[str(request.request_id)]
        assert list(completion.tokens) == generated[0, len(request.prompt_tokens) :].tolist()
        expected = reference_logprobs(any_model, request.prompt_tokens, completion.tokens)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_same_request_gives_the_same_tokens_in_any_company(model: Any, tmp_path: Path) -> None:
    requests = [request_of(f"r{n}", PROMPTS[n % 5], seed=100 + n, limit=5 + n % 7) for n in range(16)]
    together = run(engine_of(model, tmp_path, num_slots=5), requests)
    alone = engine_of(model, tmp_path, num_slots=1)
    assert {name: each.tokens for name, each in together.items()} == {
        name: each.tokens for name, each in run(alone, requests[::-1]).items()
    }
    # Different seeds of one prompt differ.
    assert together["r5"].tokens[:5] != together["r10"].tokens[:5]


def test_sampled_frequencies_follow_the_model(model: Any, tmp_path: Path) -> None:
    completions = run(
        engine_of(model, tmp_path, num_slots=500), [request_of(f"r{n}", [5, 6], seed=n, limit=1) for n in range(500)]
    )
    counts = torch.zeros(VOCABULARY)
    for completion in completions.values():
        counts[completion.tokens[0]] += 1
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([[5, 6]])).logits[0, -1], dim=-1)
    # Four standard deviations, and room for what is rarer than one in 500.
    allowed = 4 * (probs * (1 - probs) / 500).sqrt() + 4 / 500
    assert bool(((counts / 500 - probs).abs() < allowed).all())


def test_waiting_requests_enter_before_the_batch_drains(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path, num_slots=2)
    for name, limit in (("long", 10), ("short", 2), ("waiting", 2)):
        backend.add(request_of(name, [1], limit=limit))
    assert step(backend).keys() == {"short"}  # the first step gives two tokens: of the prefill, and of the decode
    assert backend.num_running == 1
    assert step(backend).keys() == {"waiting"}
    assert run(backend).keys() == {"long"}


def test_admit_every_holds_newcomers_back(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path, num_slots=4, admit_every=4)
    backend.add(request_of("a", [1], limit=12))
    step(backend)
    backend.add(request_of("b", [1], limit=30))
    running = []
    for _ in range(5):
        step(backend)
        running.append(backend.num_running)
    # "a" entered at step 0 because nothing ran; the next chance is 4 steps later.
    assert running == [1, 1, 1, 2, 2]


def test_an_empty_batch_admits_at_once(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path, admit_every=100)
    assert run(backend, [request_of("a", [1], limit=3)]).keys() == {"a"}
    backend.add(request_of("b", [1], limit=3))
    step(backend)
    assert backend.num_running == 1


def test_stop_tokens_end_a_sequence_unless_ignored(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path)
    free = run(backend, [request_of("r", [4, 5], seed=1, limit=10)])["r"]
    stop = free.tokens[4]
    end = free.tokens.index(stop) + 1
    never = next(token for token in range(VOCABULARY) if token not in free.tokens)

    def with_stops(limit: int, *, ignore_stop: bool = False) -> Completion:
        request = request_of("r", [4, 5], seed=1, limit=limit, stops=(never, stop), ignore_stop=ignore_stop)
        return run(backend, [request])["r"]

    assert with_stops(10).tokens == free.tokens[:end]
    assert with_stops(10).finish_reason is FinishReason.STOP
    assert with_stops(end).finish_reason is FinishReason.STOP
    assert with_stops(end - 1).tokens == free.tokens[: end - 1]
    assert with_stops(end - 1).finish_reason is FinishReason.LENGTH
    assert with_stops(10, ignore_stop=True) == free


def test_the_context_ends_a_sequence(model: Any, tmp_path: Path) -> None:
    prompt = [1 + n % 30 for n in range(CONTEXT - 3)]
    completion = run(engine_of(model, tmp_path), [request_of("r", prompt, limit=100)])["r"]
    assert len(completion.tokens) == 3
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.logprobs == pytest.approx(reference_logprobs(model, prompt, completion.tokens), abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * CONTEXT, {}, "48 tokens, but the model's context of 48"),
        ([], {}, "the prompt is empty"),
        ([1, VOCABULARY], {}, r"\[1, 40\], but the model has ids 0 to 39"),
        ([-1, 3], {}, r"\[-1, 3\]"),
        ([1], {"limit": 0}, "max_new_tokens is 0"),
        ([1], {"temperature": -0.5}, "temperature is -0.5"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"seed": -1}, "seed is -1"),
    ],
)
def test_what_cannot_be_served_is_refused(
    model: Any, tmp_path: Path, prompt: list[int], options: dict[str, Any], message: str
) -> None:
    backend = engine_of(model, tmp_path)
    with pytest.raises(ConfigError, match=message):
        backend.add(request_of("r", prompt, **options))
    assert backend.num_unfinished == 0


def test_cancelled_requests_leave_the_others_alone(model: Any, tmp_path: Path) -> None:
    requests = [request_of(f"r{n}", PROMPTS[n], seed=n, limit=8) for n in range(5)]
    expected = run(engine_of(model, tmp_path), requests)
    backend = engine_of(model, tmp_path, num_slots=3)
    for request in requests:
        backend.add(request)
    step(backend)
    backend.cancel(RequestId("r0"))  # runs, in the first slot: the last one moves into it
    backend.cancel(RequestId("r4"))  # waits
    backend.cancel(RequestId("unknown"))
    completions = run(backend)
    assert {name: each.tokens for name, each in completions.items()} == {
        name: expected[name].tokens for name in ("r1", "r2", "r3")
    }


def test_a_sequence_with_bad_logits_fails_alone_and_leaves_its_slot_clean(tmp_path: Path) -> None:
    model = new_model("llama")
    bad_token = 39
    with torch.no_grad():
        model.model.embed_tokens.weight[bad_token] = torch.nan
    backend = engine_of(model, tmp_path, num_slots=2)
    good = request_of("good", [1, 2], seed=6, limit=6)
    expected = run(backend, [good])
    if bad_token in expected["good"].tokens:
        pytest.fail("choose another seed: the good request draws the bad token")
    backend.add(request_of("bad", [bad_token, *range(1, 20)], limit=6))
    backend.add(good)
    answers: list[Generated | GenerationFailed] = []
    while backend.num_unfinished:
        answers.extend(backend.step(describe).answers)
    assert {type(answer) for answer in answers} == {Generated, GenerationFailed}
    for answer in answers:
        if isinstance(answer, GenerationFailed):
            assert answer.request_id == "bad"
            assert "log-prob nan" in answer.message
        else:
            assert answer.completion.tokens == expected["good"].tokens
    # The slot of the bad sequence serves again, also beside a longer one, with which all its columns are read.
    assert (
        run(backend, [good, request_of("long", range(1, 20), seed=9, limit=6)])["good"].tokens
        == expected["good"].tokens
    )


def test_loaded_weights_are_used_and_digested(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path)
    before = run(backend, [request_of("r", [3], temperature=0.0)])["r"]
    other = new_model("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.1)
    packed = FlatParameters(other).packed()
    backend._objects = OneObject(packed)  # type: ignore[assignment]
    assert backend.load_weights(KEY) == packed.digest()
    after = run(backend, [request_of("r", [3], temperature=0.0)])["r"]
    assert after.tokens != before.tokens
    assert after.logprobs == pytest.approx(reference_logprobs(other, [3], after.tokens), abs=1e-5)


def test_weights_of_another_model_are_refused(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path)
    backend._objects = OneObject(FlatParameters(new_model("llama_head_dim")).packed())  # type: ignore[assignment]
    with pytest.raises(BackendError, match="do not fit"):
        backend.load_weights(KEY)


def test_generated_tokens_are_counted_while_sequences_move_between_slots(model: Any, tmp_path: Path) -> None:
    backend = engine_of(model, tmp_path, num_slots=2)
    for name, limit in (("short", 2), ("long", 9), ("waits", 3)):
        backend.add(request_of(name, [3, 4], limit=limit, ignore_stop=True))
    assert backend.num_generated() == {"short": 0, "long": 0, "waits": 0}
    assert set(step(backend)) == {"short"}  # a step reads prompts and decodes: two tokens each
    assert backend.num_generated() == {"long": 2, "waits": 0}
    step(backend)
    assert backend.num_generated() == {"long": 3, "waits": 2}
    run(backend)
    assert backend.num_generated() == {}


def test_models_whose_activations_depend_on_the_slot_are_not_deterministic(tmp_path: Path) -> None:
    Qwen2Config(**{**SHAPE, "intermediate_size": 50}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rollout.deterministic=true: .* intermediate_size 50"):
        TransformersBackend(tmp_path, None, is_deterministic=True)  # type: ignore[arg-type]


def test_models_with_windows_are_refused(tmp_path: Path) -> None:
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="full attention only"):
        TransformersBackend(tmp_path, None)  # type: ignore[arg-type]


def test_the_fast_forward_equals_the_models_own(any_model: Any) -> None:
    if isinstance(any_model, Qwen2ForCausalLM):
        assert not LlamaForward.serves(any_model)
        return
    logprobs = []
    for forward in (HuggingFaceForward(any_model), LlamaForward(any_model)):
        cache = new_slot_cache(any_model, len(PROMPTS))
        cache.reserve(CONTEXT)
        with torch.inference_mode():
            inputs, rows = prefill_pass(cache, PROMPTS, 0)
            passes = [torch.log_softmax(forward(inputs), dim=-1)[rows]]
            lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
            for n in range(10):
                inputs = decode_pass(cache, (lengths + 7 * n) % VOCABULARY, lengths + n, 10 + n)
                passes.append(torch.log_softmax(forward(inputs), dim=-1))
        logprobs.append(torch.stack(passes))
    torch.testing.assert_close(logprobs[1], logprobs[0], atol=1e-5, rtol=1e-5)
    assert rows.tolist() == [0, 1, 2, 0, 3]


def test_the_fast_forward_serves_only_what_it_computes() -> None:
    assert LlamaForward.serves(LlamaForCausalLM(LlamaConfig(**SHAPE)))
    assert not LlamaForward.serves(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not LlamaForward.serves(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dynamic)))
