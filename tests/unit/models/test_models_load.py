from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from flexmarl.core.errors import BackendError, ConfigError, StoreError
from flexmarl.models import (
    FlatParameters,
    context_length,
    export_model,
    load_causal_lm,
    load_tokenizer,
    new_causal_lm,
    resolve_model_folder,
)

pytestmark = pytest.mark.unit

INPUT = torch.tensor([[1, 5, 2, 7]])


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=request.param,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=3, do_sample=True, top_k=0)
    model.save_pretrained(path)
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(11)}, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="w3",
        chat_template="{% for m in messages %}{{ m.content }}w3{% endfor %}",
    ).save_pretrained(path)
    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(INPUT).logits
    return result


def test_loads_the_weights_of_the_folder_for_inference(folder: Path) -> None:
    model = load_causal_lm(folder)

    assert not model.training
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(folder).eval()))


def test_loads_in_another_type(folder: Path) -> None:
    assert {tensor.dtype for tensor in load_causal_lm(folder, dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_a_model_without_weights_becomes_the_model_by_one_copy(folder: Path) -> None:
    source, model = load_causal_lm(folder), new_causal_lm(folder)
    weights, flat = FlatParameters(source), FlatParameters(model)

    flat.copy_from(weights.packed())

    assert flat.layout == weights.layout
    assert flat.digest() == weights.digest()
    assert torch.equal(logits(model), logits(source))


def test_building_a_model_draws_no_random_numbers(folder: Path) -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()

    new_causal_lm(folder)

    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", ["int64", "float33", "nn"])
def test_a_type_that_is_no_float_is_refused(folder: Path, dtype: str) -> None:
    for load in (load_causal_lm, new_causal_lm):
        with pytest.raises(ConfigError, match=f"dtype is '{dtype}'"):
            load(folder, dtype=dtype)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=f"cannot load the model in {tmp_path}"):
        load_causal_lm(tmp_path)
    with pytest.raises(BackendError, match="cannot build the model"):
        new_causal_lm(tmp_path)


def test_an_exported_policy_loads_as_transformers_and_we_load_folders(folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(folder)
    flat = FlatParameters(model)
    with torch.no_grad():
        flat.tensors["model.norm.weight"].mul_(1.5)
    target = tmp_path / "export" / "solver"
    target.mkdir(parents=True)
    (target / "old").touch()

    export_model(flat.packed(), folder, target)

    assert resolve_model_folder(str(target)) == target.resolve()
    assert [path.name for path in target.parent.iterdir()] == ["solver"]
    assert not (target / "old").exists()
    exported = AutoModelForCausalLM.from_pretrained(target).eval()
    assert torch.equal(logits(exported), logits(model))
    assert exported.generation_config.eos_token_id == 3
    assert FlatParameters(load_causal_lm(target)).digest() == flat.digest()
    assert AutoTokenizer.from_pretrained(target).chat_template == AutoTokenizer.from_pretrained(folder).chat_template
    assert load_tokenizer(target).stop_token_ids == (3,)
    assert context_length(target) == 16


def test_an_export_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match="cannot export to"):
        export_model(FlatParameters(load_causal_lm(folder)).packed(), folder, tmp_path / "file" / "solver")
