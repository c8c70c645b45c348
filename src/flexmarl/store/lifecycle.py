"""The life of a row: its states, and the only moves between them.

    partial -> ready -> leased -> acknowledged -> sealed -> committed
    partial, ready -> masked     partial -> failed     partial, masked -> superseded
    acknowledged -> leased (a further pass)     leased, acknowledged -> ready     sealed -> ready (the run died)

Invariants, which every statement that changes a status keeps because its condition is made from a `RowMove`: a row is
ready only with its attempt's outcome and all its required data; a row that has been sealed is not ready again in the
life of the run, and a committed one never; per key at most one row is not superseded.
"""

from enum import Enum, StrEnum


class RowStatus(StrEnum):
    """Where a row is in its life."""

    PARTIAL = "partial"
    """Its attempt has no outcome yet, or a data column is empty."""
    READY = "ready"
    LEASED = "leased"
    """A holder works on it."""
    ACKNOWLEDGED = "acknowledged"
    """In its holder's gradient cache, which dies with the holder."""
    SEALED = "sealed"
    """In a gradient cache that survives its holder."""
    COMMITTED = "committed"
    """In the weights of a committed version."""
    MASKED = "masked"
    """Taken out of training, with a reason."""
    FAILED = "failed"
    """Its trajectory failed for good; the reason is the kind of failure."""
    SUPERSEDED = "superseded"
    """A newer attempt of its trajectory replaced it."""


class RowMove(Enum):
    """A legal change of status: the states it may start from, and the one it ends in."""

    COMPLETE = (RowStatus.PARTIAL,), RowStatus.READY
    """The attempt has its outcome and every data column is filled."""
    LEASE = (RowStatus.READY,), RowStatus.LEASED
    LEASE_AGAIN = (RowStatus.ACKNOWLEDGED,), RowStatus.LEASED
    """A further pass of the same holder over the same samples."""
    ACKNOWLEDGE = (RowStatus.LEASED,), RowStatus.ACKNOWLEDGED
    RELEASE = (RowStatus.LEASED, RowStatus.ACKNOWLEDGED), RowStatus.READY
    """The holder is gone, and its gradient cache with it."""
    SEAL = (RowStatus.ACKNOWLEDGED,), RowStatus.SEALED
    UNSEAL = (RowStatus.SEALED,), RowStatus.READY
    """The run died, and with it the memory that sealed caches are in."""
    COMMIT = (RowStatus.ACKNOWLEDGED, RowStatus.SEALED), RowStatus.COMMITTED
    MASK = (RowStatus.PARTIAL, RowStatus.READY), RowStatus.MASKED
    FAIL = (RowStatus.PARTIAL,), RowStatus.FAILED
    SUPERSEDE = (RowStatus.PARTIAL, RowStatus.MASKED), RowStatus.SUPERSEDED

    def __init__(self, sources: tuple[RowStatus, ...], target: RowStatus) -> None:
        self.sources = sources
        self.target = target


OPEN_STATUSES = (
    RowStatus.PARTIAL,
    RowStatus.READY,
    RowStatus.LEASED,
    RowStatus.ACKNOWLEDGED,
    RowStatus.SEALED,
)
"""States of rows whose step is not committed."""

BLOCKS_COMMIT = (RowStatus.PARTIAL, RowStatus.READY, RowStatus.LEASED)
"""States in which a finished sample is in no gradient yet: a step with such a row is not committed."""


class LeaseStatus(StrEnum):
    """Where a lease, and with it every one of its rows, is in its life."""

    ACTIVE = "active"
    ACKNOWLEDGED = "acknowledged"
    SEALED = "sealed"
    COMMITTED = "committed"
    RELEASED = "released"
    """Its holder is fenced: nothing more is accepted under it."""
