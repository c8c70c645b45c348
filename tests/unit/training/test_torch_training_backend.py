"""The torch backend beside slow references: one loss over all samples, one optimizer over all tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_builders import COUNTED, SAMPLES, SEAL, STATE, WEIGHTS, Build, make_backend

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.records import Denominators, Sample
from flexmarl.models import load_causal_lm
from flexmarl.testing.training import MemoryObjectPlane, make_sample, write_tiny_model
from flexmarl.training.backends.torch import TorchBackend
from flexmarl.training.metrics import COMPUTED_TOKENS_SUM, GRAD_NORM_SUM

pytestmark = pytest.mark.unit

CONFIGS = {
    "token_mean": AlgorithmConfig(),
    "sample_mean": AlgorithmConfig(normaliser="sample_mean"),
    "constant": AlgorithmConfig(normaliser="constant", constant_tokens=10),
}
DENOMINATORS = {"token_mean": 13.0, "sample_mean": 4.0, "constant": 40.0}


@pytest.fixture(scope="module", params=["llama", "tied", "gpt2"])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = "gpt2" if request.param == "gpt2" else "llama"
    return write_tiny_model(tmp_path_factory.mktemp("model"), tie=request.param == "tied", kind=kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(folder: Path) -> Build:
    return lambda **settings: make_backend(folder, **settings)


def reference_gradients(folder: Path, samples: Sequence[Sample], normaliser: str) -> dict[str, Tensor]:
    """One loss over the whole batch, every sample alone at its own length, divided once."""
    model = load_causal_lm(folder)
    loss = torch.zeros(())
    for sample in samples:
        turn = sample.turn
        tokens = torch.tensor([[*turn.prompt_tokens, *turn.response_tokens]])
        logits = model(input_ids=tokens, use_cache=False).logits[0] / turn.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        count = len(turn.response_tokens)
        picked = [logprobs[len(turn.prompt_tokens) - 1 + n, token] for n, token in enumerate(turn.response_tokens)]
        mean = torch.stack(picked).sum() / (count if normaliser == "sample_mean" else 1)
        loss = loss - sample.advantage * mean
    (loss / DENOMINATORS[normaliser]).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights_of(backend: TorchBackend, objects: MemoryObjectPlane) -> dict[str, Tensor]:
    backend.publish(state=STATE, weights=WEIGHTS)
    weights = {name: tensor.clone() for name, tensor in objects.get(WEIGHTS).items()}
    for key in (STATE, WEIGHTS):
        objects.delete(key)
    return weights


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("normaliser", list(CONFIGS))
def test_update_equals_adamw_on_one_loss_over_all_samples(any_folder: Path, normaliser: str, canonical: bool) -> None:
    objects = MemoryObjectPlane()
    backend = make_backend(any_folder, objects=objects, canonical=canonical, algorithm=CONFIGS[normaliser], eps=1e-3)
    for samples in (SAMPLES[:1], SAMPLES[1:]):
        backend.accumulate(samples)
    backend.update(COUNTED)

    model = load_causal_lm(any_folder)
    expected = reference_gradients(any_folder, SAMPLES, normaliser)
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0).step()
    after = weights_of(backend, objects)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-5, atol=2e-7, msg=name)


@pytest.mark.parametrize("normaliser", list(CONFIGS))
def test_grad_norm_is_that_of_the_normalised_gradient(folder: Path, normaliser: str) -> None:
    backend = make_backend(folder, algorithm=CONFIGS[normaliser])
    # Unequal micro-batches: a mean of their means would give another gradient.
    for samples in (SAMPLES[:1], SAMPLES[1:]):
        backend.accumulate(samples)
    norm = backend.update(COUNTED).metrics[GRAD_NORM_SUM]
    gradients = reference_gradients(folder, SAMPLES, normaliser).values()
    expected = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().item()
    assert norm == pytest.approx(expected, rel=1e-5)


def test_metrics_by_the_plain_model(build: Build, folder: Path) -> None:
    model = load_causal_lm(folder)
    sample = make_sample(0, prompt=[1, 2], response=[3, 4], temperature=0.5, logprobs=[-1.0, -2.0])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([[1, 2, 3]])).logits[0] / 0.5, dim=-1)
    own = [logprobs[1, 3].item(), logprobs[2, 4].item()]
    metrics = build().accumulate([sample]).metrics
    gaps = [abs(own[0] + 1.0), abs(own[1] + 2.0)]
    assert metrics["agent.solver.logprob_sum"] == pytest.approx(sum(own), rel=1e-6)
    assert metrics["agent.solver.logprob_gap_sum"] == pytest.approx(sum(gaps), rel=1e-6)
    assert metrics["agent.solver.logprob_gap_max"] == pytest.approx(max(gaps), rel=1e-6)
    assert metrics[COMPUTED_TOKENS_SUM] == 3.0


def test_publish_is_one_copy_for_state_and_one_for_weights(build: Build) -> None:
    objects = MemoryObjectPlane()
    backend = build(objects=objects)
    digest = backend.publish(state=STATE, weights=WEIGHTS)
    assert objects.num_copies == 2
    assert digest == objects.packed(WEIGHTS).digest() == backend.weights_digest()
    assert objects.packed(STATE).layout.num_bytes == backend.state_bytes
    assert {entry.offset_bytes % 64 for entry in objects.packed(STATE).layout.entries} == {0}


def train(backend: TorchBackend, samples: Sequence[Sample]) -> None:
    counted = backend.accumulate(samples).denominators
    backend.update(counted)


@pytest.mark.parametrize("canonical", [False, True])
def test_policies_that_swap_through_the_object_plane_equal_each_alone(
    tmp_path: Path, folder: Path, canonical: bool
) -> None:
    """G6: A-B-A on one process each time, state and unfinished cache moved out and in, equals A alone, bit for bit."""
    objects = MemoryObjectPlane()
    other = write_tiny_model(tmp_path, seed=1)
    settings: dict[str, Any] = {"warmup_steps": 5, "weight_decay": 0.1, "max_grad_norm": 0.5}
    rounds = [SAMPLES[:2], SAMPLES[1:], SAMPLES[2:]]
    expected = []
    for place in (folder, other):
        alone = make_backend(place, canonical=canonical, **settings)
        for samples in rounds:
            train(alone, samples)
        expected.append(alone.weights_digest())

    keys: list[ObjectKey | None] = [None, None]
    for number, samples in enumerate(rounds):
        for owner, place in enumerate((folder, other)):
            backend = make_backend(place, objects=objects, canonical=canonical, is_loaded=False, **settings)
            state = keys[owner]
            if state is None:
                backend.load_model()
            else:
                backend.load_state(state)
            train(backend, samples)
            keys[owner] = ObjectKey("state", str(owner), number)
            digest = backend.publish(state=ObjectKey("state", str(owner), number), weights=WEIGHTS)
            objects.delete(WEIGHTS)
            if number == len(rounds) - 1:
                assert digest == expected[owner]


@pytest.mark.parametrize("canonical", [False, True])
def test_a_sealed_cache_survives_its_process(build: Build, canonical: bool) -> None:
    """Work after the seal is lost with the process and done again: the update has the same bits."""
    objects = MemoryObjectPlane()
    whole = build(canonical=canonical)
    for sample in SAMPLES:
        whole.accumulate([sample])
    whole.update(COUNTED)

    dying = build(objects=objects, canonical=canonical)
    dying.publish(state=STATE, weights=WEIGHTS)
    dying.accumulate(SAMPLES[:1])
    dying.accumulate(SAMPLES[1:2])
    assert dying.seal(SEAL) == Denominators(num_samples=2, num_tokens=5)
    dying.accumulate(SAMPLES[2:3])
    heir = build(objects=objects, canonical=canonical, is_loaded=False)
    heir.load_state(STATE)
    assert heir.load_seal(SEAL) == Denominators(num_samples=2, num_tokens=5)
    for sample in SAMPLES[2:]:
        heir.accumulate([sample])
    heir.update(COUNTED)
    assert heir.weights_digest() == whole.weights_digest()


def test_a_seal_of_the_other_kind_of_accumulation_is_refused(build: Build) -> None:
    objects = MemoryObjectPlane()
    build(objects=objects).seal(SEAL)
    with pytest.raises(BackendError, match=r"does not fit.*float32"):
        build(objects=objects, canonical=True).load_seal(SEAL)


def test_a_state_of_another_model_is_refused(build: Build, tmp_path: Path) -> None:
    objects = MemoryObjectPlane()
    make_backend(write_tiny_model(tmp_path, kind="gpt2"), objects=objects).publish(state=STATE, weights=WEIGHTS)
    with pytest.raises(BackendError, match="does not fit"):
        build(objects=objects).load_state(STATE)


@pytest.mark.parametrize("canonical", [False, True])
def test_a_gradient_that_is_not_finite_changes_no_state(build: Build, canonical: bool) -> None:
    objects = MemoryObjectPlane()
    backend = build(objects=objects, canonical=canonical)
    backend.publish(state=STATE, weights=WEIGHTS)
    overflowing = make_sample(0, response=[3, 4], advantage=1e39)
    with pytest.raises(BackendError, match="gradient"):
        train(backend, [overflowing])
    backend.publish(state=ObjectKey("state", "actor", 2), weights=ObjectKey("weights", "actor", 2))
    assert objects.packed(ObjectKey("state", "actor", 2)).digest() == objects.packed(STATE).digest()


def test_weights_that_are_not_finite_are_reported_with_the_samples(build: Build) -> None:
    objects = MemoryObjectPlane()
    backend = build(objects=objects)
    backend.publish(state=STATE, weights=WEIGHTS)
    damaged = bytearray(objects.packed(STATE).buffer)
    damaged[:4] = b"\x00\x00\xc0\x7f"
    packed = type(objects.packed(STATE))(layout=objects.packed(STATE).layout, buffer=memoryview(bytes(damaged)))
    key = ObjectKey("state", "actor", 3)
    objects.set(key, packed)
    backend.load_state(key)
    with pytest.raises(BackendError, match=r"not finite.*s0/q0/t1/solver"):
        backend.accumulate([make_sample(1, prompt=[0], response=[0])])


def test_update_refuses_denominators_that_it_did_not_count(build: Build) -> None:
    backend = build()
    backend.accumulate(SAMPLES[:1])
    with pytest.raises(InvariantError, match="num_tokens=4"):
        backend.update(Denominators(num_samples=1, num_tokens=5))


def test_an_update_empties_the_cache(build: Build) -> None:
    once, twice = build(), build()
    train(once, SAMPLES)
    train(twice, SAMPLES)
    train(once, SAMPLES[:2])
    twice.accumulate(SAMPLES[:2])
    twice.update(Denominators(num_samples=2, num_tokens=5))
    assert once.weights_digest() == twice.weights_digest()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (make_sample(temperature=0.0), "temperature 0.0 does not train"),
        (make_sample(prompt=[]), "prompt and response"),
        (make_sample(logprobs=[-1.0]), "1 log-probs for 2 tokens"),
        (make_sample(advantage=float("nan")), "advantage nan"),
    ],
)
def test_refuses_samples_that_cannot_train(build: Build, sample: Sample, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        build().accumulate([sample])


def test_refuses_an_architecture_that_changes_its_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GraniteConfig

    config = GraniteConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match="changes its logits"):
        make_backend(tmp_path)


def test_use_before_loading_is_refused(build: Build) -> None:
    with pytest.raises(InvariantError, match="before load_model"):
        build(is_loaded=False).accumulate(SAMPLES)


def test_num_parameters_counts_tied_tensors_once(tmp_path: Path) -> None:
    tied = write_tiny_model(tmp_path / "tied", tie=True)
    free = write_tiny_model(tmp_path / "free")
    assert make_backend(free).num_parameters - make_backend(tied).num_parameters == 23 * 16
