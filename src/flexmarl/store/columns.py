"""The data columns of a policy's table that are declared, not built in: user columns and required token columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.core.protocols import PolicyColumns
from flexmarl.core.records import ColumnScalar, TokenColumn
from flexmarl.store.schema import encode_record

_SQL_TYPES = {"int": "INTEGER", "float": "REAL", "bool": "INTEGER", "str": "TEXT"}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
_TOKEN_COLUMNS = frozenset(TokenColumn)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserColumn:
    """A user column in SQL."""

    name: str
    kind: str
    sql_name: str
    """`user_<number>_<name>`: the number tells names apart that differ in case only."""
    sql_type: str
    ready_bit: str
    """Name of the column that says whether there is a value."""
    is_required: bool


def user_columns(declared: PolicyColumns) -> list[UserColumn]:
    """Return the user columns of a table, in the order of their names."""
    return [
        UserColumn(
            name=name,
            kind=kind,
            sql_name=_quoted(f"user_{number}_{name}"),
            ready_bit=_quoted(f"has_user_{number}_{name}"),
            sql_type=_SQL_TYPES[kind],
            is_required=name in declared.required,
        )
        for number, (name, kind) in enumerate(sorted(declared.scalars.items()))
    ]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def required_token_columns(declared: PolicyColumns) -> list[TokenColumn]:
    """Return the token columns without which a row is not ready."""
    return [column for column in TokenColumn if column in declared.required]


def check_declaration(policy: PolicyName, declared: PolicyColumns) -> None:
    """Refuse columns that no table can have.

    Raises:
        ConfigError: a kind is unknown, a name is that of a token column, or a required column is not declared.
    """
    for name, kind in declared.scalars.items():
        if kind not in _SQL_TYPES:
            raise ConfigError(
                f"store.columns.{name} of policy {policy!r} is {kind!r}, expected {', '.join(_SQL_TYPES)}"
            )
        if name in _TOKEN_COLUMNS:
            raise ConfigError(f"store.columns.{name}: the name is that of a built-in token column; choose another")
    if unknown := sorted(declared.required - declared.scalars.keys() - _TOKEN_COLUMNS):
        raise ConfigError(f"policy {policy!r} requires column {unknown[0]!r}, which store.columns does not declare")


NEEDED_BY = {
    TokenColumn.OLD_LOGPROBS: "algorithm.num_epochs and num_minibatches",
    TokenColumn.REFERENCE_LOGPROBS: "algorithm.kl_coef",
}
"""The options that make a token column required."""


def require_same_declaration(
    name: str, policy: PolicyName, written: PolicyColumns, declared: PolicyColumns, *, may_require_other: bool
) -> None:
    """Refuse other columns than a table has; without rows in flight, others of them may be required.

    Raises:
        StoreError: they differ.
    """
    if may_require_other:
        written = replace(written, required=declared.required)
    names = {**written.scalars, **declared.scalars, **dict.fromkeys(written.required | declared.required)}
    for column in sorted(names):
        has, wants = _say(written, column), _say(declared, column)
        if has != wants:
            if written.scalars == declared.scalars:
                option = NEEDED_BY[TokenColumn(column)] if column in _TOKEN_COLUMNS else "algorithm.weight_column"
                raise StoreError(
                    f"{name}: column {str(column)!r} of policy {policy!r}, which {option} makes required, is {has} for "
                    f"the rows in flight, and {wants} in the configuration: give the options of before, or "
                    "checkpoint.replay=false to forget those rows"
                )
            raise StoreError(
                f"{name}: column {str(column)!r} of policy {policy!r} is {has} in this store, and {wants} in the "
                "configuration: use another run.dir, or the columns of before"
            )


def _say(columns: PolicyColumns, name: str) -> str:
    kind = "a token column" if name in _TOKEN_COLUMNS else columns.scalars.get(name, "not declared")
    return f"{kind} (required)" if name in columns.required else kind


def encode_columns(declared: PolicyColumns) -> str:
    """Return a declaration as the index keeps it."""
    return encode_record(declared)


def check_values(
    key: SampleKey, policy: PolicyName, columns: list[UserColumn], values: Mapping[str, ColumnScalar]
) -> list[ColumnScalar | None]:
    """Return the value of each column, None where there is none.

    Raises:
        ConfigError: a value is missing that is required, of the wrong type, or of a column that is not declared.
    """
    if unknown := sorted(values.keys() - {column.name for column in columns}):
        raise ConfigError(
            f"turn {key}: column {unknown[0]!r} = {values[unknown[0]]!r} is not declared for policy {policy!r} "
            f"(declared: {', '.join(column.name for column in columns) or 'none'}): add it to store.columns"
        )
    return [_check_value(key, column, values.get(column.name)) for column in columns]


def _check_value(key: SampleKey, column: UserColumn, value: ColumnScalar | None) -> ColumnScalar | None:
    if value is None:
        if column.is_required:
            raise ConfigError(
                f"turn {key}: column {column.name!r} was not given, but is required: set "
                f"turn.columns[{column.name!r}] in the workflow"
            )
        return None
    is_right = isinstance(value, _PYTHON_TYPES[column.kind]) and (column.kind == "bool" or not isinstance(value, bool))
    if not is_right or (column.kind == "int" and not -(2**63) <= int(value) < 2**63):
        raise ConfigError(
            f"turn {key}: column {column.name!r} = {value!r}, expected {column.kind}: fix turn.columns in the "
            "workflow, or the type in store.columns"
        )
    if column.kind == "float" and not math.isfinite(value):  # type: ignore[arg-type]
        raise ConfigError(f"turn {key}: column {column.name!r} = {value}, expected a finite number: fix the workflow")
    return value
