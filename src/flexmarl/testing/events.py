"""An event log in memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """One emitted record."""

    seq: int
    source: str
    record: object


class RecordingSink:
    """An `EventSink` that keeps every record."""

    def __init__(self) -> None:
        """Start empty."""
        self.events: list[RecordedEvent] = []

    def emit(self, record: object, *, source: str = "orchestrator") -> int:
        """Append a record and return its number, counted from 0."""
        seq = len(self.events)
        self.events.append(RecordedEvent(seq=seq, source=source, record=record))
        return seq

    @property
    def records(self) -> list[object]:
        """The records alone, in order."""
        return [event.record for event in self.events]
