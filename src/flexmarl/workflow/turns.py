"""A turn as workflow code holds it: its text, its reward, and its values of user columns.

Invariants:

* a reward and a column are given once: a second, other value is an error that names both;
* a value of a column has the type that `store.columns` declares, from the moment it is given.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real

from flexmarl.core.errors import WorkflowError
from flexmarl.core.ids import SampleKey
from flexmarl.core.records import ColumnScalar, FinishReason

_INT64 = range(-(1 << 63), 1 << 63)


class BadRewardError(WorkflowError):
    """A reward of a workflow cannot be used."""


class BadColumnError(WorkflowError):
    """A value of a user column is missing, or cannot be used."""


class ColumnValues(Mapping[str, ColumnScalar]):
    """The user columns of one turn: `turn.columns["difficulty"] = 0.3`."""

    def __init__(self, key: SampleKey, types: Mapping[str, str]) -> None:
        """Take the declared columns, name to `int`, `float`, `bool` or `str`; no value is given yet."""
        self._key = key
        self._types = types
        self._values: dict[str, ColumnScalar] = {}

    def __setitem__(self, name: str, value: ColumnScalar) -> None:
        """Give the turn its value of a column.

        Raises:
            WorkflowError: no such column is declared, the value is not of its type, or another one was given before.
        """
        if name not in self._types:
            known = ", ".join(sorted(self._types)) or "none"
            raise BadColumnError(
                f"turn {self._key}: column {name!r} = {value!r:.60} is not declared; store.columns has: {known}; "
                f"add {name}: {_type_of(value)} to it"
            )
        try:
            scalar = _READERS[self._types[name]](value)
        except (TypeError, ValueError) as error:
            raise BadColumnError(
                f"turn {self._key}: column {name!r} must be {error}, got {type(value).__name__} {value!r:.60}; "
                f"store.columns declares {name}: {self._types[name]}"
            ) from error
        if name in self._values and self._values[name] != scalar:
            raise BadColumnError(
                f"turn {self._key}: column {name!r} is {self._values[name]!r:.60} already, now {scalar!r:.60}: give a "
                "column its value once"
            )
        self._values[name] = scalar

    def __getitem__(self, name: str) -> ColumnScalar:
        """Return the value that was given."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the columns that have a value."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return how many columns have a value."""
        return len(self._values)

    def __repr__(self) -> str:
        """Return the values as those of a dict."""
        return repr(self._values)


class Turn:
    """One generation of an agent."""

    __slots__ = ("_columns", "_reward", "finish_reason", "key", "text", "tokens")

    def __init__(
        self,
        *,
        key: SampleKey,
        text: str,
        tokens: tuple[int, ...],
        finish_reason: FinishReason,
        reward: float | None = None,
        column_types: Mapping[str, str] | None = None,
    ) -> None:
        """Made by `AgentHandle.chat`, and by tests."""
        self.key = key
        self.text = text
        self.tokens = tokens
        self.finish_reason = finish_reason
        self._reward = reward
        self._columns = ColumnValues(key, column_types or {})

    @property
    def is_truncated(self) -> bool:
        """The turn ran into its token limit, or into the end of the context."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def reward(self) -> float | None:
        """Set it, once, to reward this turn; it is added to the agent's reward of the trajectory."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        if self._reward is not None and self._reward != value:
            raise BadRewardError(
                f"turn {self.key}: reward is {self._reward!r:.60} already, now {value!r:.60}: add up what it is worth "
                "first, then set turn.reward once"
            )
        self._reward = value

    @property
    def columns(self) -> ColumnValues:
        """Values of the columns that `store.columns` declares: set `turn.columns[name]`, each once."""
        return self._columns

    def __repr__(self) -> str:
        """Return what a debugger should show."""
        return f"Turn({self.key}, text={self.text!r}, reward={self.reward!r}, columns={self.columns!r})"


def _type_of(value: object) -> str:
    return next((name for name in ("bool", "int", "float", "str") if type(value).__name__.startswith(name)), "float")


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) not in _INT64:
        raise ValueError("a whole number of 64 bits")
    return int(value)


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError("a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("True or False")
    return value


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("text that UTF-8 can write") from None
    return str(value)


_READERS: Mapping[str, Callable[[object], ColumnScalar]] = {"int": _int, "float": _float, "bool": _bool, "str": _str}
