"""Reads YAML and dotted overrides into a RootConfig; every complaint becomes one ConfigError with the key's path."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from flexmarl.config.plain import plain_copy, read_yaml, write_yaml
from flexmarl.config.root import RootConfig
from flexmarl.core.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RootConfig:
    """Read a YAML file and apply `a.b=value` overrides.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a key or value is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    return parse_config(read_yaml(text, where=str(path)), overrides, where=str(path))


def parse_config(plain: object, overrides: Sequence[str] = (), *, where: str = "configuration") -> RootConfig:
    """Return the checked configuration of plain data.

    Raises:
        ConfigError: a key or value is wrong; names it, what it got and what fits.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: expected a mapping of sections, got {type(plain).__name__}")
    merged = plain_copy(plain, where=where)
    for override in overrides:
        _apply_override(merged, override)
    try:
        return RootConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(f"{where}:\n" + "\n".join(_explain(error))) from error


def resolved_yaml(config: RootConfig) -> str:
    """Return the configuration with every default filled in, as YAML that `load_config` reads back."""
    return write_yaml(config.model_dump(mode="json"))


def _apply_override(merged: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    value = plain_copy(read_yaml(text, where=f"override {override!r}: the value"), where=f"override {override!r}")
    place = merged
    for depth, name in enumerate(names[:-1]):
        if place.get(name) is None:
            place[name] = {}
        if not isinstance(place[name], dict):
            raise ConfigError(f"override {override!r}: {'.'.join(names[: depth + 1])} is a value, not a section")
        place = place[name]
    place[names[-1]] = value


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors(include_url=False):
        keys, parent = _place(item["loc"])
        name = ".".join(keys)
        if item["type"] == "extra_forbidden":
            lines.append(f"  {name}: unknown key{_suggestion(keys[-1], parent)}")
        elif item["type"] == "missing":
            lines.append(f"  {name}: required, but missing")
        elif item["type"] == "value_error" and not keys:
            lines.append(f"  {item['ctx']['error']}")
        else:
            lines.append(f"  {name}: {item['msg']}, got {item['input']!r:.80}")
    return lines


def _place(location: Sequence[int | str]) -> tuple[list[str], Any]:
    """Return the keys of a place as the user wrote them, and the model that holds its last key.

    They are not pydantic's own: below a union it adds the kind of the variant.
    """
    keys = []
    model: Any = RootConfig
    parent = model
    for part in location:
        if not isinstance(model, tuple):
            keys.append(str(part))
        parent = model
        model = _member(model, str(part))
    return keys, parent


def _suggestion(key: str, parent: Any) -> str:
    if not (isinstance(parent, type) and issubclass(parent, BaseModel)):
        return ""
    known = list(parent.model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _member(model: Any, part: str) -> Any:
    """Return what lies below `part`: of a field, an entry of a named map, or a union's variant of that kind."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        field = model.model_fields.get(part)
        return None if field is None else _unwrap(field.annotation)
    if isinstance(model, _NamedMap):
        return model.model
    if isinstance(model, tuple):
        return next((each for each in model if each.model_fields["kind"].default == part), None)
    return None


def _unwrap(annotation: Any) -> Any:
    """Strip `X | None` and `dict[str, X]`; a union of models becomes a tuple of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]
    if not models:
        return None
    if getattr(annotation, "__origin__", None) is dict:
        return _NamedMap(models[0])
    return models[0] if len(models) == 1 else tuple(models)


class _NamedMap:
    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model
