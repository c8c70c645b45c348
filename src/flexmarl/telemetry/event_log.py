"""The event log: every fact in the order in which it was handled, and every decision between them.

Each line is `{"seq", "time_s", "source", "kind", "version", "data"}`. Content marked BULK (tokens, log-probs, queries)
is written as its length, which keeps the log small; `read_events` gives it back as zeros of that length.

Invariants:
    * `seq` counts 0, 1, 2, ... over the whole run, across resumes.
    * A reader refuses a kind or version that it does not know.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_type_hints

from flexmarl.core import events, messages
from flexmarl.core.codec import from_tagged, to_tagged
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.protocols import Clock
from flexmarl.telemetry.jsonl import AppendFile, read_lines


class EventLog:
    """Writes `events.jsonl`; the EventSink of a run."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Open or continue the log at `path`.

        Raises:
            StoreError: the file cannot be opened, or its last line is not an event.
        """
        self._clock = clock
        self._file = AppendFile(path)
        last = self._file.last_line
        if last is not None and not isinstance(last.get("seq"), int):
            raise StoreError(f"{path}: the last line has no sequence number; it is not an event log")
        self._next_seq = 0 if last is None else last["seq"] + 1

    def emit(self, record: object, *, source: str = "orchestrator") -> int:
        """Append a registered record and return its sequence number. It is buffered until `flush`."""
        seq = self._next_seq
        head = {"seq": seq, "time_s": round(self._clock.now_s(), 6), "source": source}
        self._file.append(head | to_tagged(record, bulk=False))
        self._next_seq += 1
        return seq

    def flush(self) -> None:
        """Hand all events to the operating system, so that they survive a kill of this process."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the log."""
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """One line of the event log."""

    seq: int
    time_s: float
    """On the run's clock, whose start is arbitrary and differs after a resume."""
    source: str
    """The worker whose fact it is, or `orchestrator`."""
    record: object
    """A record of `core.messages` or `core.events`; bulk content is zeros of the true length, or empty."""


def read_events(path: Path) -> Iterator[LoggedEvent]:
    """Yield the events of a log in order; a torn last line is left out.

    Raises:
        StoreError: the file cannot be read, or a line is damaged or out of order.
        ConfigError: an event has a kind or version that this code does not know.
    """
    for expected, (number, plain) in enumerate(read_lines(path)):
        if plain.get("seq") != expected:
            raise StoreError(f"{path}:{number}: expected event {expected}, got {plain.get('seq')!r}")
        try:
            event = _to_event(plain)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}:{number}: not an event: {error!r}") from error
        yield event


def _to_event(plain: Mapping[str, Any]) -> LoggedEvent:
    kind = plain["kind"]
    cls = _record_classes().get(kind)
    data = plain["data"] if cls is None else _with_bulk(cls, plain["data"])
    record = from_tagged({"kind": kind, "version": plain["version"], "data": data})
    return LoggedEvent(seq=plain["seq"], time_s=float(plain["time_s"]), source=str(plain["source"]), record=record)


@cache
def _record_classes() -> dict[str, type[Any]]:
    found = {}
    for module in (messages, events):
        for value in vars(module).values():
            if isinstance(value, type) and hasattr(value, "__record_kind__"):
                found[str(value.__record_kind__)] = value
    return found


def _with_bulk(cls: Any, data: Any) -> Any:
    """Return `data` with a stand-in of the logged length wherever `cls` marks a field as BULK."""
    if not isinstance(data, Mapping):
        return data
    restored = dict(data)
    for name, is_bulk, inner in _shape(cls):
        if name not in data:
            continue
        if is_bulk and isinstance(data[name], int):
            restored[name] = _stand_in(inner, data[name])
        elif not is_bulk and dataclasses.is_dataclass(inner):
            restored[name] = _with_bulk(inner, data[name])
    return restored


@cache
def _shape(cls: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Return each field's name, whether it is BULK, and its type: for `X | None` that of X."""
    hints = get_type_hints(cls)
    shape = []
    for item in dataclasses.fields(cls):
        options = [arg for arg in typing.get_args(hints[item.name]) if dataclasses.is_dataclass(arg)]
        is_tuple = typing.get_origin(hints[item.name]) is tuple
        inner = options[0] if options and not is_tuple else hints[item.name]
        shape.append((item.name, bool(item.metadata.get("bulk")), inner))
    return tuple(shape)


def _stand_in(hint: Any, length: int) -> Any:
    if typing.get_origin(hint) is not tuple:
        return {}
    item = typing.get_args(hint)[0]
    return [item(0)] * length if item in (int, float) else []
