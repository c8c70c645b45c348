"""A tokenizer without a model, for scripted runs: one token per character. Standard library only."""

from collections.abc import Sequence

from flexmarl.core.errors import ConfigError, WorkflowError
from flexmarl.core.protocols import ChatMessage

PRINTABLE = "".join(chr(code) for code in range(32, 127)) + "\n"
ROLES = ("system", "user", "assistant", "tool")
_UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"


class ScriptedTokenizer:
    """One token per character of an alphabet, one per role, one that ends a message, one for unknown characters."""

    def __init__(self, alphabet: str = PRINTABLE, *, system_prompt: str | None = None) -> None:
        """Number the control tokens first, then the characters in the order of `alphabet`.

        `system_prompt` opens every conversation that does not open with a system message itself.

        Raises:
            ConfigError: a character is in the alphabet twice.
        """
        if len(set(alphabet)) != len(alphabet):
            raise ConfigError(f"the alphabet {alphabet!r} has a character twice")
        self._end_id, self._unknown_id = 0, 1
        self._role_ids = {role: index for index, role in enumerate(ROLES, start=2)}
        first = 2 + len(ROLES)
        self._ids = {character: index for index, character in enumerate(alphabet, start=first)}
        self._texts = {index: character for character, index in self._ids.items()} | {self._unknown_id: _UNKNOWN_TEXT}
        self._system_prompt = system_prompt

    @property
    def vocab_size(self) -> int:
        """Number of token ids; they are 0 to one below it."""
        return 2 + len(ROLES) + len(self._ids)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that ends a message."""
        return (self._end_id,)

    def encode(self, text: str) -> list[int]:
        """Return one token per character; those outside the alphabet become the unknown token."""
        return [self._ids.get(character, self._unknown_id) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters of `tokens`; control tokens have none."""
        return "".join(self._texts.get(token, "") for token in tokens)

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return `<role> characters <end>` for each message, then the assistant's role.

        Raises:
            WorkflowError: a role is unknown.
        """
        has_system = bool(messages) and messages[0].role == "system"
        if self._system_prompt is not None and not has_system:
            messages = [ChatMessage(role="system", content=self._system_prompt), *messages]
        return self._render(messages)

    def render_continuation(self, messages: Sequence[ChatMessage], *, is_stopped: bool) -> list[int]:
        """Return the end of the assistant's message, unless its tokens have it, then `messages` as `render` does.

        Raises:
            WorkflowError: a role is unknown.
        """
        return ([] if is_stopped else [self._end_id]) + self._render(messages)

    def _render(self, messages: Sequence[ChatMessage]) -> list[int]:
        tokens: list[int] = []
        for message in messages:
            if message.role not in self._role_ids:
                raise WorkflowError(f"a message has the role {message.role!r}; expected one of {', '.join(ROLES)}")
            tokens += [self._role_ids[message.role], *self.encode(message.content), self._end_id]
        return [*tokens, self._role_ids["assistant"]]
