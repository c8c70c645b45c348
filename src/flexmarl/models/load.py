"""Models of transformers from a folder on disk; nothing is ever downloaded."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flexmarl.core.errors import BackendError, ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_ATTENTION = "sdpa"
"""As fast as eager attention on short CPU sequences and without its quadratic memory on long ones."""
_LOADING = threading.Lock()
"""Transformers replaces functions of whole modules while it builds a model; instances may be threads of one process."""


def load_causal_lm(folder: Path, *, dtype: str = "float32") -> "PreTrainedModel":
    """Return the model of a folder with its weights in `dtype`, on the CPU, in eval mode.

    Raises:
        ConfigError: `dtype` is not a floating-point type of torch.
        BackendError: transformers cannot load the folder.
    """
    from transformers import AutoModelForCausalLM

    torch_dtype = _float_dtype(dtype)
    try:
        with _LOADING, without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch_dtype, local_files_only=True, attn_implementation=_ATTENTION
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BackendError(f"cannot load the model in {folder}: {error}") from error
    loaded: PreTrainedModel = model.eval()
    return loaded


def new_causal_lm(folder: Path, *, dtype: str = "float32") -> "PreTrainedModel":
    """Return the model that the folder's config.json describes, in eval mode, without reading its weights.

    The parameters hold whatever was in memory: it is for instances, which get theirs from the object plane.

    Raises:
        ConfigError: `dtype` is not a floating-point type of torch.
        BackendError: transformers does not know the architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    torch_dtype = _float_dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with _LOADING, no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, attn_implementation=_ATTENTION)
        # What skips the initialisation of weights skips their tying too.
        model.tie_weights()
    except (OSError, ValueError, KeyError) as error:
        raise BackendError(f"cannot build the model of {folder / 'config.json'}: {error}") from error
    built: PreTrainedModel = model.eval()
    return built


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars out of the terminal, where several processes would draw them at once."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _float_dtype(name: str) -> "torch.dtype":
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {name!r}; expected float32, bfloat16, float16 or float64")
    return dtype
