"""Every registered record survives the wire (msgpack) and, without its bulk, the event log (JSON)."""

import dataclasses
import json
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core import events, messages
from flexmarl.core.codec import from_tagged, to_tagged

pytestmark = pytest.mark.property

RECORDS = sorted(
    {
        value
        for module in (messages, events)
        for value in vars(module).values()
        if isinstance(value, type) and hasattr(value, "__record_kind__")
    },
    key=lambda cls: str(cls.__record_kind__),
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    object: st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """A strategy for a type as records use them."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    args = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*(st.none() if arg is type(None) else values(arg) for arg in args))
    if get_origin(hint) is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if get_origin(hint) is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return records(hint)
    return SCALARS[hint]


def records(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{item.name: values(hints[item.name]) for item in dataclasses.fields(cls)})


@given(record=st.sampled_from(RECORDS).flatmap(records))
def test_record_survives_the_wire(record: Any) -> None:
    wire = msgpack.packb(to_tagged(record))
    assert from_tagged(msgpack.unpackb(wire)) == record


@given(record=st.sampled_from(RECORDS).flatmap(records))
def test_record_survives_json(record: Any) -> None:
    assert from_tagged(json.loads(json.dumps(to_tagged(record)))) == record


def test_all_records_are_covered() -> None:
    assert len(RECORDS) >= 40
