"""Records to plain data and back: dicts, lists, strings, numbers, bytes. Never pickle.

`to_plain(record)` and `from_plain(type, plain)` follow the type hints of dataclasses. A class registered with
`tagged` can also travel where the reader does not know its type: `to_tagged` adds `kind` and `version`.
Bad input raises `ConfigError` from `from_plain`; the message names the field.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from flexmarl.core.errors import ConfigError, InvariantError

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])

_TAGGED: dict[str, tuple[type[Any], int]] = {}
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


def tagged(kind: str, *, version: int = 1) -> Callable[[C], C]:
    """Register a dataclass under `kind` for `to_tagged` and `from_tagged`; `version` rises when its fields change."""

    def register(cls: C) -> C:
        if kind in _TAGGED:
            raise InvariantError(f"two record types are tagged {kind!r}: {_TAGGED[kind][0].__name__}, {cls.__name__}")
        _TAGGED[kind] = (cls, version)
        cls.__record_kind__ = kind
        return cls

    return register


def kind_of(record: object) -> str:
    """Return the kind under which the record's class is registered."""
    return str(type(record).__record_kind__)  # type: ignore[attr-defined]


def to_plain(value: Any, *, bulk: bool = True) -> Any:
    """Return `value` as plain data. With `bulk=False` fields marked BULK become their length (for the event log)."""
    return _encode(value, bulk)


def _encode(value: Any, bulk: bool) -> Any:
    kind = type(value)
    return value if kind in _PLAIN_TYPES else _encoder_of(typing.cast(Any, kind), bulk)(value)


@cache
def _encoder_of(kind: Any, bulk: bool) -> Callable[[Any], Any]:
    """What to do depends on the type alone, and to find it out takes longer than to do it."""
    if issubclass(kind, Enum):
        return lambda value: value.value
    if dataclasses.is_dataclass(kind):
        return _record_encoder(typing.cast(Any, kind), bulk)
    if issubclass(kind, Mapping):
        return lambda value: {str(key): _encode(item, bulk) for key, item in value.items()}
    if issubclass(kind, (set, frozenset)):
        return lambda value: _encode_items(sorted(value), bulk)
    if issubclass(kind, (bool, int, float, str, bytes)):
        return lambda value: value
    if issubclass(kind, Sequence) and not issubclass(kind, memoryview):
        return lambda value: _encode_items(value, bulk)
    return _refuse


def _encode_items(items: Sequence[Any], bulk: bool) -> list[Any]:
    if items and type(items[0]) in _PLAIN_TYPES:
        return list(items)
    return [_encode(item, bulk) for item in items]


def _refuse(value: Any) -> Any:
    raise InvariantError(f"cannot encode a {type(value).__name__}: {value!r:.80}")


@cache
def _record_encoder(cls: type[Any], bulk: bool) -> Callable[[Any], dict[str, Any]]:
    """Fields whose type hint is a scalar are copied as they are: most of what is encoded is such a field."""
    hints = get_type_hints(cls)
    fields: list[tuple[str, Callable[[Any], Any] | None]] = []
    for item in dataclasses.fields(cls):
        if item.metadata.get("bulk") and not bulk:
            fields.append((item.name, _length))
        elif _unwrap_newtype(hints[item.name]) in _PLAIN_TYPES:
            fields.append((item.name, None))
        else:
            fields.append((item.name, _encode_bulk if bulk else _encode_short))

    def encode(record: Any) -> dict[str, Any]:
        return {
            name: getattr(record, name) if encoder is None else encoder(getattr(record, name))
            for name, encoder in fields
        }

    return encode


def _length(value: Any) -> int:
    return len(value)


def _encode_bulk(value: Any) -> Any:
    return _encode(value, True)


def _encode_short(value: Any) -> Any:
    return _encode(value, False)


def from_plain(cls: type[T], plain: Any) -> T:
    """Return a `cls` from what `to_plain` made.

    Raises:
        ConfigError: a field is missing, unknown or of the wrong type.
    """
    result: T = _decoder(typing.cast(Any, cls))(plain)
    return result


@cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    hint = _unwrap_newtype(hint)
    origin = get_origin(hint)
    if hint is Any or hint is object:
        return lambda plain: plain
    if origin in (Union, types.UnionType):
        return _optional_decoder(hint)
    if origin is tuple:
        return _tuple_decoder(get_args(hint))
    if origin in (list, Sequence):
        item = _decoder(get_args(hint)[0])
        return lambda plain: [item(each) for each in plain]
    if origin is frozenset:
        item = _decoder(get_args(hint)[0])
        return lambda plain: frozenset(item(each) for each in plain)
    if origin in (dict, Mapping):
        key, item = (_decoder(arg) for arg in get_args(hint))
        return lambda plain: {key(k): item(v) for k, v in plain.items()}
    if dataclasses.is_dataclass(hint):
        return _record_decoder(typing.cast(type[Any], hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda plain: hint(plain)
    return _scalar_decoder(hint)


def _unwrap_newtype(hint: Any) -> Any:
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def _optional_decoder(hint: Any) -> Callable[[Any], Any]:
    options = [arg for arg in get_args(hint) if arg is not type(None)]
    if len(options) > 1:
        scalars = tuple(_unwrap_newtype(option) for option in options)
        if not all(scalar in (int, float, str, bool, bytes) for scalar in scalars):
            raise InvariantError(f"cannot decode the union {hint}")
        return lambda plain: plain
    inner = _decoder(options[0])
    return lambda plain: None if plain is None else inner(plain)


def _tuple_decoder(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(args) == 2 and args[1] is Ellipsis:
        if _unwrap_newtype(args[0]) in (int, str):
            return tuple
        if args[0] is float:
            return _decode_floats
        item = _decoder(args[0])
        return lambda plain: tuple(item(each) for each in plain)
    items = tuple(_decoder(arg) for arg in args)
    return lambda plain: tuple(item(each) for item, each in zip(items, plain, strict=True))


def _decode_floats(plain: Any) -> tuple[float, ...]:
    """Long rows of log-probs come here: the common case is checked and taken as a whole."""
    if set(map(type, plain)) <= {float}:
        return tuple(plain)
    decode = _scalar_decoder(float)
    return tuple(decode(each) for each in plain)


def _scalar_decoder(hint: Any) -> Callable[[Any], Any]:
    accepted = (int, float) if hint is float else hint

    def decode(plain: Any) -> Any:
        if not isinstance(plain, accepted) or (isinstance(plain, bool) and hint is not bool):
            raise ConfigError(f"expected {getattr(hint, '__name__', hint)}, got {plain!r:.80}")
        return float(plain) if hint is float else plain

    return decode


def _record_decoder(cls: type[Any]) -> Callable[[Any], Any]:
    hints = get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    decoders = {name: _decoder(hints[name]) for name in fields}
    required = {
        name
        for name, item in fields.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    }

    def decode(plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            raise ConfigError(f"{cls.__name__}: expected a mapping, got {plain!r:.80}")
        if missing := required - plain.keys():
            raise ConfigError(f"{cls.__name__}: missing {', '.join(sorted(missing))}")
        if unknown := plain.keys() - fields.keys():
            raise ConfigError(f"{cls.__name__}: unknown {', '.join(sorted(map(str, unknown)))}")
        values = {}
        for name, item in plain.items():
            try:
                values[name] = decoders[name](item)
            except (ConfigError, ValueError, TypeError, AttributeError) as error:
                raise ConfigError(f"{cls.__name__}.{name}: {error}") from error
        return cls(**values)

    return decode


def to_tagged(record: object, *, bulk: bool = True) -> dict[str, Any]:
    """Return the plain form of a registered record with its `kind` and `version` beside its `data`."""
    kind = kind_of(record)
    return {"kind": kind, "version": _TAGGED[kind][1], "data": to_plain(record, bulk=bulk)}


def from_tagged(plain: Mapping[str, Any]) -> Any:
    """Return the record that `to_tagged` wrote.

    Raises:
        ConfigError: the kind is unknown, its version is newer than this code, or a field does not fit.
    """
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in _TAGGED:
        raise ConfigError(f"unknown record kind {kind!r}; known: {', '.join(sorted(_TAGGED))}")
    cls, version = _TAGGED[kind]
    if plain.get("version") != version:
        raise ConfigError(f"{kind}: written in version {plain.get('version')}, this code reads {version}")
    return from_plain(cls, plain["data"])
