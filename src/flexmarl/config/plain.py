"""YAML to plain data: text, numbers, booleans, null, lists, and mappings with text keys; nothing else gets through.

What YAML can say beyond that is refused here with the place where it stands: dates, sets, repeated keys, values that
contain themselves, and aliases that would unfold into millions of values.
"""

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from flexmarl.core.errors import ConfigError

_MAX_VALUES = 100_000
_MAX_DEPTH = 50
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Reads `1e-5` as a number, as YAML 1.2 and people do, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str, *, where: str) -> Any:
    """Return what `text` says, not yet checked by `plain_copy`.

    Raises:
        ConfigError: the text is not YAML, or asks for more than plain data.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else f"{where}:{mark.line + 1}:{mark.column + 1}"
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{place} is not valid YAML: {problem}") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def write_yaml(plain: Mapping[str, Any]) -> str:
    """Return YAML that `read_yaml` reads back as the same data."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


_MAX_INT = 2**63 - 1
"""Workers are told their options in 64-bit integers."""


def plain_copy(value: Any, *, where: str) -> Any:
    """Return a copy of `value` that shares nothing with it.

    Raises:
        ConfigError: it holds something other than plain data, too much, or itself.
    """
    return _Copier(where).copy(value, "", depth=0)


class _Copier:
    def __init__(self, where: str) -> None:
        self._where = where
        self._num_values = 0

    def copy(self, value: Any, place: str, *, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise self._error(
                place[:200],
                f"more than {_MAX_VALUES} values or {_MAX_DEPTH} levels; does an alias contain itself, or many others?",
            )
        if isinstance(value, Mapping):
            return {
                self._key(key, place): self.copy(item, f"{place}.{key}", depth=depth + 1) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.copy(item, f"{place}[{number}]", depth=depth + 1) for number, item in enumerate(value)]
        if isinstance(value, str):
            return self._text(value, place)
        if isinstance(value, int) and abs(value) > _MAX_INT:
            raise self._error(place, f"{hex(value)[:24]}... is too large: whole numbers have at most 63 bits")
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise self._error(
            place,
            f"{value!r:.80} is a {type(value).__name__}; expected text (quote it), a number, true, false, null, a list "
            "or a mapping",
        )

    def _key(self, key: object, place: str) -> str:
        if not isinstance(key, str):
            raise self._error(place, f"key {key!r:.80} is a {type(key).__name__}; keys are names (quote it)")
        return self._text(key, place)

    def _text(self, text: str, place: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._error(place, f"{text!r:.80} is not valid Unicode") from error
        return text

    def _error(self, place: str, problem: str) -> ConfigError:
        return ConfigError(": ".join(part for part in (self._where, place.lstrip("."), problem) if part))
