"""Whatever a configuration holds, reading it gives a configuration or a ConfigError, never another error."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from flexmarl.config import RootConfig, parse_config, resolved_yaml
from flexmarl.config.plain import read_yaml
from flexmarl.core.errors import ConfigError

pytestmark = pytest.mark.property

BASE: dict[str, Any] = {
    "data": {"source": "tasks:load"},
    "workflow": {"path": "team.py:play"},
    "policies": {"p": {"model": "folder"}},
    "agents": {"a": {"policy": "p"}},
    "pipeline": {"num_steps": 3},
}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates()
NUMBERS = st.sampled_from(["1e-5", "-0", "1_0", "0x1f", "12:30", "nan", "~", "yes", "=", "<<", "é", "1e400"])
VALUES = st.recursive(
    SCALARS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def keys_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key; of a named map the entries `p` and `a`, which the base configuration has."""
    found = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        entry = {"policies": "p.", "agents": "a."}.get(prefix + name, "")
        models = [field.annotation, *get_args(field.annotation)]
        for each in models:
            if isinstance(each, type) and issubclass(each, BaseModel):
                found.extend(keys_of(each, f"{prefix}{name}.{entry}"))
    return sorted(set(found))


KEYS = keys_of(RootConfig)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(), VALUES, max_size=4))
def test_any_value_at_any_key_is_a_configuration_or_a_config_error(changes: dict[str, Any]) -> None:
    plain: dict[str, Any] = read_yaml(str_of(BASE), where="base")
    for dotted, value in changes.items():
        place = plain
        *sections, last = dotted.split(".")
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = value
    check(plain, [])


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.text() | NUMBERS | st.integers().map(str)), max_size=4))
def test_any_override_is_a_configuration_or_a_config_error(changes: list[tuple[str, str]]) -> None:
    check(BASE, [f"{key}={text}" for key, text in changes])


@given(st.text())
def test_any_text_is_plain_data_or_a_config_error(text: str) -> None:
    try:
        plain = read_yaml(text, where="text")
    except ConfigError:
        return
    check(plain, [])


def check(plain: object, overrides: list[str]) -> None:
    try:
        config = parse_config(plain, overrides)
    except ConfigError as error:
        assert str(error).strip()
        return
    text = resolved_yaml(config)
    assert parse_config(read_yaml(text, where="resolved")) == config
    assert resolved_yaml(parse_config(read_yaml(text, where="resolved"))) == text


def str_of(plain: dict[str, Any]) -> str:
    return resolved_yaml(parse_config(plain))


def test_every_section_is_covered() -> None:
    assert "rollout.backend.num_slots" in KEYS
    assert "policies.p.optimizer.learning_rate" in KEYS
    assert "agents.a.system_prompt" in KEYS
