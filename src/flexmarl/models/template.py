"""Chat templates: from messages to text, and to the text that follows what an assistant has generated.

History is kept as tokens and only ever grows, so a template must be prefix-stable: what it renders for a conversation
must begin with what the model saw and said before. Some templates rewrite history instead (they drop earlier thinking,
or move the system message into the newest turn); `ChatTemplate.continuation` finds that out and refuses.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flexmarl.core.errors import ConfigError, WorkflowError
from flexmarl.core.protocols import ChatMessage

if TYPE_CHECKING:
    from jinja2 import Environment

_ANSWER = "flexmarl-probe-answer"
_THINKING_ANSWER = f"<think>\nflexmarl-probe-thought\n</think>\n\n{_ANSWER}"
_ASKED = (ChatMessage(role="user", content="flexmarl-probe-question"),)
_ASKED_WITH_SYSTEM = (ChatMessage(role="system", content="flexmarl-probe-system"), *_ASKED)
_TODAY = datetime(2024, 7, 26)
"""What a template gets for today, so that a run replayed on another day has the same prompts; the date that Llama 3
templates fall back to."""


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], where: Path) -> None:
        """Compile `source`, a Jinja template as transformers runs them; `where` is named in errors.

        Raises:
            ConfigError: it is not a valid template.
        """
        from jinja2 import TemplateError

        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template of {where} is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._where = where

    def render(self, messages: Sequence[ChatMessage], *, is_open: bool = True) -> str:
        """Return the text of a conversation; `is_open` adds what comes before the assistant's next message.

        Raises:
            WorkflowError: the template refuses the messages, for example roles that do not alternate.
        """
        from jinja2 import TemplateError

        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=is_open, **self._special_tokens)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise WorkflowError(f"the chat template of {self._where} refuses messages [{roles}]: {error}") from error

    @cached_property
    def closing(self) -> str:
        """What the template puts behind the assistant's content when nothing follows: usually an end-of-turn token.

        Raises:
            WorkflowError: the template does not show the content of an assistant's message.
        """
        text = self.render([*_ASKED, ChatMessage(role="assistant", content=_ANSWER)], is_open=False)
        _, found, closing = text.rpartition(_ANSWER)
        if not found:
            raise WorkflowError(f"the chat template of {self._where} does not show what the assistant said")
        return closing

    def continuation(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text between the assistant's last content and its next, with `messages` in between.

        Raises:
            WorkflowError: the template is not prefix-stable, or refuses the messages.
        """
        answer = ChatMessage(role="assistant", content=_THINKING_ANSWER)
        found = set()
        for opening, asked in self._openings.items():
            seen = asked + _THINKING_ANSWER
            text = self.render([*opening, answer, *messages])
            if not text.startswith(seen + self.closing):
                raise WorkflowError(
                    f"the chat template of {self._where} rewrites history: with {len(messages)} more messages the "
                    "conversation no longer begins with what the model saw and said (it may drop earlier thinking, or "
                    "move the system message). Give each conversation one turn, or change chat_template.jinja in the "
                    "model folder so that earlier messages stay as they were"
                )
            found.add(text[len(seen) :])
        if len(found) > 1:
            raise WorkflowError(f"the chat template of {self._where} renders a turn differently under a system message")
        return found.pop()

    @cached_property
    def _openings(self) -> dict[tuple[ChatMessage, ...], str]:
        """Beginnings of conversations with their prompts; the one with a system message where the template takes it."""
        openings: dict[tuple[ChatMessage, ...], str] = {_ASKED: self.render(_ASKED)}
        try:
            openings[_ASKED_WITH_SYSTEM] = self.render(_ASKED_WITH_SYSTEM)
        except WorkflowError:
            # Gemma's template, for one, refuses system messages: then no conversation has one.
            return openings
        return openings


def _environment() -> "Environment":
    """Return a Jinja environment like that of transformers, whose own takes seconds and torch to import."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """Accepts `{% generation %}`, which marks what the assistant said, and renders its body."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment
