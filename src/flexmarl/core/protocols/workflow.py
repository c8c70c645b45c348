"""The seams of the workflow API: tokenizers, and how an episode gets a turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flexmarl.core.ids import SampleKey
from flexmarl.core.records import Completion, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation, as chat templates take it."""

    role: str
    content: str


class Tokenizer(Protocol):
    """Text to token ids and back for one policy's model, with its chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens."""
        ...

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of a conversation, ready for the assistant's next message."""
        ...

    def render_continuation(self, messages: Sequence[ChatMessage], *, is_stopped: bool) -> list[int]:
        """Return what follows the assistant's last tokens when `messages` are added after them.

        `is_stopped` says that those tokens already end with the stop token.
        """
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant message."""
        ...


class AgentClient(Protocol):
    """What an Episode calls to get a turn."""

    async def generate(
        self, key: SampleKey, prompt_tokens: Sequence[int], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> Completion:
        """Return the completion. Raises WorkflowError when the generation failed for good."""
        ...
