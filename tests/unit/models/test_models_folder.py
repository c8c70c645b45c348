import json
from pathlib import Path

import pytest

from flexmarl.core.errors import ConfigError
from flexmarl.models import context_length, resolve_model_folder, shipped_models

pytestmark = pytest.mark.unit


def model_folder(path: Path, config: object, *, without: str = "") -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name != without:
            (path / name).write_text(json.dumps(config) if name == "config.json" else "")
    return path


def test_a_path_is_taken_when_a_model_lies_there(tmp_path: Path) -> None:
    assert resolve_model_folder(str(model_folder(tmp_path, {}))) == tmp_path.resolve()


def test_every_shipped_model_is_complete() -> None:
    assert "chain_sum" in shipped_models()
    for name in shipped_models():
        folder = resolve_model_folder(f"shipped:{name}")
        assert folder.name == name
        assert context_length(folder) > 0


def test_an_unknown_shipped_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'shipped:chain_sun' is not in the package; it ships: .*shipped:chain_sum"):
        resolve_model_folder("shipped:chain_sun")


@pytest.mark.parametrize("name", ["shipped:", "shipped:..", "shipped:../shipped/chain_sum"])
def test_shipped_names_are_no_paths(name: str) -> None:
    with pytest.raises(ConfigError, match="is not in the package"):
        resolve_model_folder(name)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="'nowhere/model' is not a folder"):
        resolve_model_folder("nowhere/model")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"has no {missing}"):
        resolve_model_folder(str(model_folder(tmp_path, {}, without=missing)))


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 96}, {"n_positions": 96}, {"text_config": {"max_position_embeddings": 96}}]
)
def test_context_length_is_what_the_model_says(tmp_path: Path, config: object) -> None:
    assert context_length(model_folder(tmp_path, config)) == 96


@pytest.mark.parametrize("config", [{"hidden_size": 3}, [], "x"])
def test_a_config_without_a_context_length_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        context_length(model_folder(tmp_path, config))
