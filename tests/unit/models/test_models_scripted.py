import pytest

from flexmarl.core.errors import ConfigError, WorkflowError
from flexmarl.core.protocols import ChatMessage, Tokenizer
from flexmarl.models import ScriptedTokenizer

pytestmark = pytest.mark.unit


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def test_numbers_by_hand() -> None:
    tokenizer: Tokenizer = ScriptedTokenizer("ab")

    # 0 end, 1 unknown, 2 to 5 the roles system, user, assistant and tool, 6 and 7 the characters.
    assert tokenizer.encode("bax") == [7, 6, 1]
    assert tokenizer.decode([3, 7, 6, 1, 0]) == "ba\N{REPLACEMENT CHARACTER}"
    assert tokenizer.render([user("a")]) == [3, 6, 0, 4]
    assert tokenizer.render_continuation([user("b")], is_stopped=True) == [3, 7, 0, 4]
    assert tokenizer.render_continuation([user("b")], is_stopped=False) == [0, 3, 7, 0, 4]
    assert tokenizer.stop_token_ids == (0,)
    assert ScriptedTokenizer("ab").vocab_size == 8


def test_a_conversation_is_a_prefix_of_its_continuation() -> None:
    tokenizer = ScriptedTokenizer()
    first, more = [user("1+1")], [ChatMessage(role="tool", content="2"), user("sure?")]
    answer = tokenizer.encode("two")

    grown = tokenizer.render(first) + answer + tokenizer.render_continuation(more, is_stopped=False)

    assert grown == tokenizer.render([*first, ChatMessage(role="assistant", content="two"), *more])


def test_the_system_prompt_opens_conversations_that_have_none() -> None:
    tokenizer = ScriptedTokenizer("ab", system_prompt="a")

    assert tokenizer.render([user("b")]) == [2, 6, 0, 3, 7, 0, 4]
    assert tokenizer.render([ChatMessage(role="system", content="b"), user("a")]) == [2, 7, 0, 3, 6, 0, 4]
    assert tokenizer.render_continuation([user("b")], is_stopped=True) == [3, 7, 0, 4]


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(WorkflowError, match="'robot'; expected one of system, user"):
        ScriptedTokenizer().render([ChatMessage(role="robot", content="x")])


def test_an_alphabet_has_each_character_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        ScriptedTokenizer("abca")
