"""Every call of the store is lent or kept on purpose, and frames say what is wrong with them."""

import inspect
from pathlib import Path

import pytest

from flexmarl.core import errors
from flexmarl.core.errors import ConfigError, FlexMARLError, InvariantError, StoreError
from flexmarl.core.protocols import ExperienceStore
from flexmarl.runtime.local.store_client import StoreClient
from flexmarl.runtime.local.store_wire import (
    LENT_OPERATIONS,
    error_answer,
    frame_of,
    operation,
    raised_by,
    read_body,
    socket_address,
)

pytestmark = pytest.mark.unit

OWNERS_ALONE = {"declare", "fence", "release", "prune", "rewind", "close"}


def methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


def test_every_call_of_the_store_is_lent_or_its_owners_alone() -> None:
    assert methods(ExperienceStore) == LENT_OPERATIONS | OWNERS_ALONE
    assert methods(StoreClient) >= LENT_OPERATIONS


@pytest.mark.parametrize("name", sorted(LENT_OPERATIONS))
def test_the_arguments_of_an_operation_are_those_of_the_method(name: str) -> None:
    found = operation(name)
    signature = inspect.signature(getattr(ExperienceStore, name))
    assert ("self", *found.parameters) == tuple(signature.parameters)


@pytest.mark.parametrize("name", sorted(OWNERS_ALONE | {"__class__", "put", ""}))
def test_g10_other_operations_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown operation"):
        operation(name)


@pytest.mark.parametrize(
    "cls", [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, FlexMARLError)]
)
def test_our_errors_cross_as_the_same_class(cls: type[FlexMARLError]) -> None:
    number, kind, message = error_answer(3, cls("what happened"))
    error = raised_by(kind, message)
    assert (number, type(error), str(error)) == (3, cls, "what happened")


def test_other_errors_cross_as_a_bug_that_names_them() -> None:
    _, kind, message = error_answer(3, KeyError("red"))
    error = raised_by(kind, message)
    assert (type(error), str(error)) == (InvariantError, "KeyError: 'red'")


def test_an_error_of_a_class_that_is_not_known_here_is_a_store_error() -> None:
    assert type(raised_by("SystemExit", "")) is StoreError


def test_frames_are_bounded_and_plain() -> None:
    assert read_body(frame_of([1, "ready", ["red", 0]])[4:]) == [1, "ready", ["red", 0]]
    with pytest.raises(StoreError, match="over the limit of 100"):
        frame_of([b"\0" * 200], max_bytes=100)
    with pytest.raises(StoreError, match="out of range"):
        frame_of([2**64])
    with pytest.raises(StoreError, match="not msgpack"):
        read_body(b"\xc1")


@pytest.mark.parametrize("length", [10, 200])
def test_an_address_is_short_whatever_the_path(tmp_path: Path, length: int) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    (folder / "socket").touch()
    with socket_address(folder) as address:
        assert len(address) <= 107
        assert Path(address).samefile(folder / "socket")
