"""Writing a trained policy as a folder that transformers, vLLM and this system load."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from flexmarl.core.errors import BackendError
from flexmarl.models.load import without_progress_bars

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
)


def export_causal_lm(model: "PreTrainedModel", source_folder: Path, target: Path) -> None:
    """Write `model` to `target`, with the tokenizer, chat template and generation settings of `source_folder`.

    A folder that is there already is replaced once the new one is complete.

    Raises:
        BackendError: a file cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        with without_progress_bars():
            model.save_pretrained(partial, state_dict=_detached_state(model))
        for pattern in _COPIED:
            for path in source_folder.glob(pattern):
                shutil.copyfile(path, partial / path.name)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, RuntimeError) as error:
        raise BackendError(f"cannot export to {target}: {error}") from error


def _detached_state(model: "PreTrainedModel") -> "dict[str, Tensor]":
    """Return copies of the weights; tied names share one copy, as transformers expects.

    The parameters themselves may be views of one buffer, which transformers would take for one shared tensor.
    """
    copies: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        place = tensor.data_ptr() if tensor.numel() else id(tensor)
        if place not in copies:
            copies[place] = tensor.detach().clone()
        state[name] = copies[place]
    return state
