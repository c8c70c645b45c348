"""Tokenizers of model folders, with their chat templates.

They read the files that transformers writes, by `tokenizers` and Jinja alone: transformers' AutoTokenizer imports
torch, which costs the orchestrator's process seconds and hundreds of megabytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmarl.core.errors import ConfigError, WorkflowError
from flexmarl.core.protocols import ChatMessage
from flexmarl.models.folder import read_json
from flexmarl.models.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Text to token ids and back for one policy's model, with its chat template."""

    def __init__(
        self, backend: "Backend", template: ChatTemplate, *, end_ids: Sequence[int], system_prompt: str | None = None
    ) -> None:
        """Take a tokenizer and its template; `load_tokenizer` reads both from a model folder.

        `end_ids` are the model's end-of-sequence tokens; the template's end-of-turn token is added to them.
        """
        self._backend = backend
        self._template = template
        self._system_prompt = system_prompt
        self._stop_token_ids = tuple(dict.fromkeys([*end_ids, *self._end_of_turn()]))
        self._stop_texts = [str(backend.id_to_token(token)) for token in self._stop_token_ids]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant message."""
        return self._stop_token_ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of a conversation, ready for the assistant's next message.

        Raises:
            WorkflowError: the template refuses the messages.
        """
        has_system = bool(messages) and messages[0].role == "system"
        if self._system_prompt is not None and not has_system:
            messages = [ChatMessage(role="system", content=self._system_prompt), *messages]
        return self.encode(self._template.render(messages))

    def render_continuation(self, messages: Sequence[ChatMessage], *, is_stopped: bool) -> list[int]:
        """Return what follows the assistant's last tokens when `messages` are added after them.

        The stop token itself is part of it unless `is_stopped`. Nothing that was generated is decoded or encoded again.

        Raises:
            WorkflowError: the template refuses the messages, or rewrites history.
        """
        text = self._template.continuation(messages)
        return self.encode(text[self._end_of_stop() :] if is_stopped else text)

    def _end_of_turn(self) -> list[int]:
        """Return the special token that the template puts behind an assistant's content, if it is one."""
        added = self._backend.get_added_tokens_decoder()
        special = [token for token in self.encode(self._template.closing) if token in added and added[token].special]
        return special[:1]

    def _end_of_stop(self) -> int:
        """Return where, in a continuation, the text behind the assistant's stop token begins."""
        closing = self._template.closing
        ends = [closing.index(text) + len(text) for text in self._stop_texts if text in closing]
        return min(ends, default=0)


def load_tokenizer(folder: Path, *, system_prompt: str | None = None) -> ChatTokenizer:
    """Return the tokenizer of a model folder.

    `system_prompt` opens every conversation that does not open with a system message itself.

    Raises:
        ConfigError: a file is missing or damaged, or the folder names no end-of-sequence token.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; write one with "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"cannot read {path}: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    config = _optional_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_optional_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    template = ChatTemplate(_template_source(folder, config), special_tokens=special_tokens, where=folder)
    end_ids = _end_ids(folder, backend, special_tokens)
    try:
        tokenizer = ChatTokenizer(backend, template, end_ids=end_ids, system_prompt=system_prompt)
    except WorkflowError as error:  # no workflow runs yet: it is the folder that is wrong
        raise ConfigError(str(error)) from error
    if not tokenizer.stop_token_ids:
        raise ConfigError(f"{folder} names no token that ends an answer; set eos_token_id in generation_config.json")
    return tokenizer


def _optional_json(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; a file gives each as its text or as an object with a content."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item.get("name"): item.get("template") for item in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"{folder} has no chat template: expected chat_template.jinja, or chat_template in tokenizer_config.json; "
            "base models have none, so take an instruct model or add one"
        )
    return template


def _end_ids(folder: Path, backend: "Backend", special_tokens: Mapping[str, str]) -> list[int]:
    ids: list[int] = []
    if "eos_token" in special_tokens:
        token = backend.token_to_id(special_tokens["eos_token"])
        if token is None:
            raise ConfigError(f"{folder}: eos_token {special_tokens['eos_token']!r} is not in tokenizer.json")
        ids.append(token)
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        if value is not None:
            return ids + [int(token) for token in (value if isinstance(value, list) else [value])]
    return ids
