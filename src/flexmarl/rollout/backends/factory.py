"""Engines from plain options, as they arrive in a worker process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

from flexmarl.config import RolloutConfig, ScriptedRolloutConfig, TransformersRolloutConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.protocols import InferenceBackend, ObjectPlane


def build_backend(objects: ObjectPlane, options: Mapping[str, Any]) -> InferenceBackend:
    """Build the engine that `options` describe.

    Options: `backend`, the section `rollout.backend` as plain data, and `model_folder`, the folder of the policy's
    model, which the scripted engine does not need; `is_deterministic`, false when missing, is
    `rollout.deterministic`. Others are left to their readers.

    Raises:
        ConfigError: the model has layers that the engine cannot serve, the vocabulary cannot be drawn from, or the
            trace cannot be read.
        BackendError: the model folder cannot be read.
    """
    config = RolloutConfig.model_validate({"backend": options["backend"]}).backend
    match config:
        case TransformersRolloutConfig():
            # torch and transformers load only where an engine needs them.
            from flexmarl.rollout.backends.transformers import TransformersBackend

            return TransformersBackend(
                Path(options["model_folder"]),
                objects,
                num_slots=config.num_slots,
                admit_every=config.admit_every,
                is_deterministic=options.get("is_deterministic", False),
            )
        case ScriptedRolloutConfig(trace=str() as trace):
            from flexmarl.rollout.backends.trace import TraceBackend

            return TraceBackend(Path(trace), objects)
        case ScriptedRolloutConfig():
            from flexmarl.models import ScriptedTokenizer
            from flexmarl.rollout.backends.scripted import ScriptedBackend

            tokenizer = ScriptedTokenizer()
            tokens = tokenizer.encode(config.vocabulary)
            if tokenizer.decode(tokens) != config.vocabulary:
                raise ConfigError(
                    f"rollout.backend.vocabulary is {config.vocabulary!r}, which has characters that the scripted "
                    "tokenizer does not know: use printable ASCII"
                )
            return ScriptedBackend(config, objects, tokens=tokens)
        case _:
            assert_never(config)
