import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from flexmarl.core.errors import ConfigError, WorkflowError
from flexmarl.core.protocols import ChatMessage, Tokenizer
from flexmarl.models import ChatTokenizer, load_tokenizer

pytestmark = pytest.mark.unit

SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|im_start|>", "<|im_end|>", "</s>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = CHATML.replace(
    "m.content",
    "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' and not loop.last else m.content)",
)
OPENED_THINKING = CHATML.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% else %}{{ m.content + ' </s>' }}{% endif %}{% endfor %}"
)
MOVING_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + (system if loop.last else '') + m.content }}[/INST]"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
RICH = (
    "{%- for m in messages %}\n    {%- if loop.index0 > 5 %}{% break %}{% endif %}\n"
    "    {{- m | tojson }}\n    {%- if m.role == 'assistant' %}{% generation %}{{- m.content }}{% endgeneration %}\n"
    "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n  {{- 'é<|assistant|>' }}\n{%- endif %}"
)

Load = Callable[..., ChatTokenizer]


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def assistant(content: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=content)


def write_folder(path: Path, template: str, *, eos: str = "<|end|>") -> Path:
    backend = Backend(
        models.WordLevel({token: n for n, token in enumerate([*SPECIAL, *CHARACTERS])}, unk_token="<|end|>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.enable_padding(length=50)
    backend.enable_truncation(max_length=3)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<|bos|>",
                "eos_token": {"__type": "AddedToken", "content": eos, "special": True},
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(template: str, *, eos: str = "<|end|>", system_prompt: str | None = None) -> ChatTokenizer:
        return load_tokenizer(write_folder(tmp_path, template, eos=eos), system_prompt=system_prompt)

    return make


# --- text and tokens --------------------------------------------------------------------------------------------------


def test_is_a_tokenizer_that_neither_pads_nor_cuts(load: Load) -> None:
    tokenizer: Tokenizer = load(LLAMA)

    assert tokenizer.encode("ab c") == [8 + ord(character) - 32 for character in "ab c"]
    assert tokenizer.decode([0, *tokenizer.encode("ab c"), 1]) == "ab c"


@pytest.mark.parametrize("template", [LLAMA, CHATML, THINKING, MOVING_SYSTEM, RICH])
def test_renders_as_transformers_does(tmp_path: Path, template: str) -> None:
    folder = write_folder(tmp_path, template)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    reference.backend_tokenizer.no_padding()
    reference.backend_tokenizer.no_truncation()
    messages = [ChatMessage(role="system", content="Be <b>'brief'</b>."), user("1+1\n"), assistant("2"), user('"?"')]

    plain = [{"role": message.role, "content": message.content} for message in messages]
    expected = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)

    assert load_tokenizer(folder).render(messages) == expected


def test_the_system_prompt_opens_conversations_that_have_none(load: Load) -> None:
    tokenizer = load(LLAMA, system_prompt="S")

    assert tokenizer.render([user("q")]) == tokenizer.render([ChatMessage(role="system", content="S"), user("q")])
    assert tokenizer.render([ChatMessage(role="system", content="T"), user("q")])[2] == tokenizer.encode("T")[0]


def test_todays_date_is_the_same_on_every_day(load: Load) -> None:
    tokenizer = load("{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}<|end|>")

    assert tokenizer.decode(tokenizer.render([user("q")])) == "26 Jul 2024q"


# --- continuations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [LLAMA, CHATML])
@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("num_messages", [1, 2])
def test_a_grown_history_is_what_the_template_renders(
    load: Load, template: str, is_stopped: bool, num_messages: int
) -> None:
    tokenizer = load(template, eos="<|end|>" if template is LLAMA else "<|im_end|>")
    more = [user("and 2+2?"), user("well?")][:num_messages]
    stop = [tokenizer.stop_token_ids[0]] if is_stopped else []

    grown = tokenizer.render([user("1+1?")]) + tokenizer.encode("two") + stop
    grown += tokenizer.render_continuation(more, is_stopped=is_stopped)

    assert grown == tokenizer.render([user("1+1?"), assistant("two"), *more])


def test_continuation_by_hand(load: Load) -> None:
    tokenizer = load(CHATML, eos="<|im_end|>")
    end, start = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|im_start|>")
    newline = tokenizer.encode("\n")
    tail = [*newline, start, *tokenizer.encode("user\nq"), end, *newline, start, *tokenizer.encode("assistant\n")]

    assert tokenizer.render_continuation([user("q")], is_stopped=True) == tail
    assert tokenizer.render_continuation([user("q")], is_stopped=False) == [end, *tail]


def test_text_between_content_and_stop_token_is_not_repeated_after_a_stop(load: Load) -> None:
    tokenizer = load(INST, eos="</s>")
    stop = SPECIAL.index("</s>")
    asked = tokenizer.encode("[INST] q [/INST]")

    assert tokenizer.render_continuation([user("q")], is_stopped=True) == asked
    assert tokenizer.render_continuation([user("q")], is_stopped=False) == [*tokenizer.encode(" "), stop, *asked]


def test_messages_that_look_like_the_probe_do_no_harm(load: Load) -> None:
    tokenizer = load(LLAMA)
    odd = user("<think>\nflexmarl-probe-thought\n</think>\n\nflexmarl-probe-answer")

    grown = tokenizer.render([user("q")]) + tokenizer.render_continuation([odd], is_stopped=False)

    assert grown == tokenizer.render([user("q"), assistant(""), odd])


@pytest.mark.parametrize("template", [THINKING, OPENED_THINKING, MOVING_SYSTEM])
def test_a_template_that_rewrites_history_serves_one_turn_and_refuses_the_next(load: Load, template: str) -> None:
    tokenizer = load(template)
    assert tokenizer.render([user("q")])

    with pytest.raises(WorkflowError, match=r"rewrites history.*Give each conversation one turn"):
        tokenizer.render_continuation([user("q")], is_stopped=True)


def test_messages_that_the_template_refuses_are_the_workflows_error(load: Load, tmp_path: Path) -> None:
    tokenizer = load(INST, eos="</s>")

    with pytest.raises(WorkflowError, match=r"refuses messages \[system, user\]: no system messages"):
        tokenizer.render([ChatMessage(role="system", content="x"), user("q")])


# --- stop tokens ------------------------------------------------------------------------------------------------------


def test_answers_end_with_eos_or_with_the_templates_end_of_turn(load: Load) -> None:
    assert load(LLAMA).stop_token_ids == (SPECIAL.index("<|end|>"),)
    assert load(CHATML).stop_token_ids == (SPECIAL.index("<|end|>"), SPECIAL.index("<|im_end|>"))
    assert load(THINKING, eos="<|im_end|>").stop_token_ids == (SPECIAL.index("<|im_end|>"),)
    assert load(INST, eos="</s>").stop_token_ids == (SPECIAL.index("</s>"),)


@pytest.mark.parametrize(
    ("generation", "expected"), [({"eos_token_id": [6, 7]}, (1, 6, 7)), ({"eos_token_id": 7}, (1, 7)), ({}, (1, 5))]
)
def test_generation_config_adds_stop_tokens_and_stands_before_config(
    tmp_path: Path, generation: object, expected: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path, LLAMA)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))

    assert load_tokenizer(folder).stop_token_ids == expected


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, LLAMA)
    expected = load_tokenizer(folder).render([user("q")])
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for template in (LLAMA, [{"name": "tool_use", "template": ""}, {"name": "default", "template": LLAMA}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))

        assert load_tokenizer(folder).render([user("q")]) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"has no tokenizer\.json; write one with"),
        ("tokenizer.json", "{", r"cannot read .*tokenizer\.json"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds a list"),
        ("tokenizer_config.json", '{"eos_token": "<|nope|>"}', "'<|nope|>' is not in tokenizer.json"),
        ("tokenizer_config.json", "{}", "names no token that ends an answer"),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{% if %}", "chat template of .* is not valid"),
    ],
)
def test_a_folder_that_does_not_serve_says_why(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = write_folder(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)

    with pytest.raises(ConfigError, match=message):
        load_tokenizer(folder)


def test_a_template_that_hides_the_assistant_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="does not show what the assistant said"):
        load("{{ messages[0].content }}")
