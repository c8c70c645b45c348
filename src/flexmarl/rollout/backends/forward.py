"""Models as the embedded engine calls them. `llama.py` is the fast one."""

from typing import Any, Protocol

from torch import Tensor

from flexmarl.core.errors import ConfigError
from flexmarl.rollout.backends.passes import ForwardPass


class Forward(Protocol):
    """A causal language model over a slot cache."""

    def __call__(self, inputs: ForwardPass) -> Tensor:
        """Store what the pass brings and return the logits after the last token of each row, [rows, vocabulary]."""
        ...

    def refresh(self) -> None:
        """The parameters of the model have changed."""
        ...


class HuggingFaceForward:
    """Any Hugging Face causal model with full attention, through its own `forward`."""

    def __init__(self, model: Any) -> None:
        """Use `model`, whose parameters may change between calls.

        Raises:
            ConfigError: a layer of the model does not attend to everything before it.
        """
        _check_full_attention(model.config)
        self._model = model

    def __call__(self, inputs: ForwardPass) -> Tensor:
        """See Forward."""
        output = self._model(
            input_ids=inputs.tokens_NT,
            # A mask of four axes is taken as it is, which skips the building of one.
            attention_mask=inputs.mask_N1TL,
            position_ids=inputs.positions_NT,
            past_key_values=inputs.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def refresh(self) -> None:
        """Nothing is derived from the parameters."""


def _check_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention"} or (window is not None and not kinds):
        raise ConfigError(
            f"model type {config.model_type} has layers {sorted(kinds) or ['sliding_attention']} "
            f"(sliding_window={window}); the embedded engine serves models with full attention only: use another model"
        )
