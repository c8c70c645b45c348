"""Writing trained weights as a folder that transformers, vLLM and this system load. Without torch."""

import json
import shutil
from pathlib import Path

from flexmarl.core.errors import StoreError
from flexmarl.core.layout import PackedObject
from flexmarl.models.folder import read_json
from flexmarl.objects import write_safetensors

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
)


def export_model(weights: PackedObject, source_folder: Path, target: Path) -> None:
    """Write a policy's weights to `target` as a Hugging Face folder.

    Everything but the weights comes from `source_folder`, the folder that the policy started from; the model's type in
    config.json becomes that of the weights. A folder that is there already is replaced once the new one is complete.

    Raises:
        StoreError: a file cannot be written.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for pattern in _COPIED:
            for path in source_folder.glob(pattern):
                shutil.copyfile(path, draft / path.name)
        config = {**read_json(source_folder / "config.json"), "dtype": _dtype(weights)}
        config.pop("torch_dtype", None)
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_safetensors(draft / "model.safetensors", weights, metadata={"format": "pt"})
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    except OSError as error:
        raise StoreError(f"cannot export to {target}: {error}; free space or change run.dir") from error


def _dtype(weights: PackedObject) -> str:
    """Return the type that most bytes of the weights have."""
    num_bytes: dict[str, int] = {}
    for entry in weights.layout.entries:
        num_bytes[entry.dtype] = num_bytes.get(entry.dtype, 0) + entry.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])
