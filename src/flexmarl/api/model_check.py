"""Checks a policy's model folder against itself and against what the configuration asks of it. Loads no model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.config import RootConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.protocols import Tokenizer
from flexmarl.models import ScriptedTokenizer, context_length, resolve_model_folder
from flexmarl.models.folder import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a policy's folder says."""

    context_tokens: int
    """Prompt and response together."""
    vocab_size: int
    """Token ids that the model knows."""
    num_tokenizer_ids: int
    """Token ids that its tokenizer may give: the largest, plus one."""


def check_model(config: RootConfig, policy: str, tokenizer: Tokenizer) -> ModelFacts:
    """Check a policy's folder; `tokenizer` is the one that its agents get.

    Raises:
        ConfigError: a file is missing or damaged, the tokenizer gives ids that the model does not know, or a limit of
            new tokens leaves no room for a prompt.
    """
    folder = resolve_model_folder(config.policies[policy].model)
    context_tokens = context_length(folder)
    _check_context(config, policy, context_tokens)
    vocab_size = _vocab_size(folder)
    if isinstance(tokenizer, ScriptedTokenizer):
        num_ids = tokenizer.vocab_size
        if vocab_size < num_ids:
            raise ConfigError(
                f"rollout.backend.kind=scripted draws from {num_ids} token ids, but the model of policy {policy} has "
                f"vocab_size={vocab_size}: train a larger one, or set training.backend.kind=scripted"
            )
        return ModelFacts(context_tokens=context_tokens, vocab_size=vocab_size, num_tokenizer_ids=num_ids)
    num_ids = _largest_token_id(folder / "tokenizer.json") + 1
    where = f"policies.{policy}.model={config.policies[policy].model}"
    if num_ids > vocab_size:
        raise ConfigError(
            f"{where}: tokenizer.json has token ids up to {num_ids - 1}, but config.json says vocab_size={vocab_size}, "
            "so the model knows none above that: use the tokenizer that belongs to the model, or call "
            "model.resize_token_embeddings and save it"
        )
    for token in tokenizer.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: the token that ends an answer has id {token}, but the model has only ids 0 to "
                f"{vocab_size - 1}: correct eos_token_id in generation_config.json or config.json"
            )
    return ModelFacts(context_tokens=context_tokens, vocab_size=vocab_size, num_tokenizer_ids=num_ids)


def _check_context(config: RootConfig, policy: str, context_tokens: int) -> None:
    for name, agent in config.agents.items():
        limit = agent.max_new_tokens or config.rollout.max_new_tokens
        if agent.policy == policy and limit >= context_tokens:
            key = f"agents.{name}.max_new_tokens" if agent.max_new_tokens else "rollout.max_new_tokens"
            raise ConfigError(
                f"{key}={limit} leaves no room for a prompt: the context of policies.{policy}.model="
                f"{config.policies[policy].model} has {context_tokens} tokens; lower it"
            )


def _vocab_size(folder: Path) -> int:
    config = read_json(folder / "config.json")
    for section in (config, config.get("text_config")):
        if isinstance(section, Mapping) and isinstance(size := section.get("vocab_size"), int):
            return size
    raise ConfigError(f"{folder / 'config.json'} does not give vocab_size; save the model again with save_pretrained")


def _largest_token_id(path: Path) -> int:
    """Return the largest id in a tokenizer.json, among its vocabulary and its added tokens."""
    plain = read_json(path)
    try:
        return max(_token_ids(plain), default=-1)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a tokenizer file: {error!r}; save the tokenizer again") from error


def _token_ids(plain: Mapping[str, Any]) -> Iterator[int]:
    yield from (token["id"] for token in plain.get("added_tokens") or ())
    vocabulary = plain["model"].get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        yield from vocabulary.values()
    else:  # Unigram: a list of [token, score], numbered by place
        yield len(vocabulary) - 1
