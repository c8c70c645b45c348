"""Model folders as configurations name them. No torch: `validate` looks into them before any model is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexmarl.core.errors import ConfigError

SHIPPED_PREFIX = "shipped:"
_SHIPPED = Path(__file__).parent / "shipped"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def shipped_models() -> list[str]:
    """Return the names of the models inside the package."""
    return sorted(path.parent.name for path in _SHIPPED.glob("*/config.json"))


def resolve_model_folder(model: str) -> Path:
    """Return the folder of `shipped:NAME`, or of a path, after a look that a model lies in it.

    Raises:
        ConfigError: no such shipped model or folder, or files are missing; the message lists them.
    """
    if model.startswith(SHIPPED_PREFIX):
        name = model.removeprefix(SHIPPED_PREFIX)
        if name not in shipped_models():
            known = ", ".join(SHIPPED_PREFIX + known for known in shipped_models()) or "none"
            raise ConfigError(f"model {model!r} is not in the package; it ships: {known}")
        folder = _SHIPPED / name
    else:
        folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model {model!r} is not a folder; give a Hugging Face model folder or {SHIPPED_PREFIX}NAME")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in _WEIGHTS):
        missing.append(" or ".join(_WEIGHTS))
    if missing:
        raise ConfigError(f"model {model!r}: {folder} has no {', no '.join(missing)}; save_pretrained writes them")
    return folder.resolve()


def context_length(folder: Path) -> int:
    """Return how many tokens the model takes, prompt and response together, as its config.json says.

    Raises:
        ConfigError: config.json does not say.
    """
    config = read_json(folder / "config.json")
    for section in (config, config.get("text_config") or {}):
        for name in _CONTEXT_KEYS:
            if isinstance(section.get(name), int):
                return int(section[name])
    raise ConfigError(f"{folder / 'config.json'} has none of {', '.join(_CONTEXT_KEYS)}; add the context length")


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file of a model folder.

    Raises:
        ConfigError: the file is missing, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected an object")
    return content
