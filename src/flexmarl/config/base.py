"""The base of every configuration model."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """Frozen, no unknown keys, no infinite numbers, fields documented by the string under them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def kind_when_missing(kind: str) -> Callable[[Any], Any]:
    """Return a validator for a union discriminated by `kind`: a section without `kind` is of this one."""

    def add_kind(value: Any) -> Any:
        return {"kind": kind, **value} if isinstance(value, Mapping) else value

    return add_kind
