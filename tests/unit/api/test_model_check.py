"""A model folder against its own tokenizer and against the configuration."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api.model_check import ModelFacts, check_model
from flexmarl.config import RootConfig, parse_config
from flexmarl.core.errors import ConfigError
from flexmarl.models import ScriptedTokenizer, load_tokenizer, resolve_model_folder

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model, with empty weights: nothing here reads them."""
    copy = tmp_path / "model"
    shutil.copytree(resolve_model_folder("shipped:chain_sum"), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / "model.safetensors").touch()
    return copy


def config(folder: Path) -> RootConfig:
    return parse_config(
        {
            "data": {"source": "a:b"},
            "workflow": {"path": "a:b"},
            "policies": {"p": {"model": str(folder)}},
            "agents": {"a": {"policy": "p"}},
            "pipeline": {"num_steps": 1},
            "rollout": {"max_new_tokens": 8},
        }
    )


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(folder: Path) -> ModelFacts:
    return check_model(config(folder), "p", load_tokenizer(folder))


def test_the_shipped_model_fits_its_tokenizer(folder: Path) -> None:
    assert check(folder) == ModelFacts(context_tokens=128, vocab_size=103, num_tokenizer_ids=103)


def test_a_model_may_know_more_tokens_than_its_tokenizer(folder: Path) -> None:
    change(folder / "config.json", vocab_size=128)
    assert (check(folder).vocab_size, check(folder).num_tokenizer_ids) == (128, 103)


def test_g10_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    change(folder / "config.json", vocab_size=102)
    with pytest.raises(
        ConfigError, match=r"policies.p.model=.*token ids up to 102, but config.json says vocab_size=102"
    ):
        check(folder)


def test_g10_an_end_token_that_the_model_does_not_know_is_refused(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[2, 500])
    with pytest.raises(ConfigError, match=r"ends an answer has id 500, but the model has only ids 0 to 102"):
        check(folder)


@pytest.mark.parametrize(
    ("content", "largest"),
    [
        ({"added_tokens": [{"id": 7}], "model": {"vocab": {"a": 0, "b": 3}}}, 7),
        ({"added_tokens": [], "model": {"vocab": {"a": 0, "b": 3}}}, 3),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}}, 2),
    ],
)
def test_the_largest_id_of_each_kind_of_tokenizer_file(folder: Path, content: dict[str, Any], largest: int) -> None:
    tokenizer = load_tokenizer(folder)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert check_model(config(folder), "p", tokenizer).num_tokenizer_ids == largest + 1


@pytest.mark.parametrize("content", [{"model": []}, {}, {"added_tokens": [1], "model": {}}])
def test_g10_a_damaged_tokenizer_file_is_named(folder: Path, content: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(folder)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer.json is not a tokenizer file"):
        check_model(config(folder), "p", tokenizer)


def test_vocabulary_of_a_text_part_and_of_none(folder: Path) -> None:
    change(folder / "config.json", vocab_size=None, text_config={"vocab_size": 104})
    assert check(folder).vocab_size == 104
    change(folder / "config.json", text_config={})
    with pytest.raises(ConfigError, match=r"config.json does not give vocab_size"):
        check(folder)


def test_scripted_rollouts_need_a_model_that_knows_their_tokens(folder: Path) -> None:
    change(folder / "config.json", vocab_size=50)
    with pytest.raises(ConfigError, match=r"rollout.backend.kind=scripted draws from 102 token ids"):
        check_model(config(folder), "p", ScriptedTokenizer())
