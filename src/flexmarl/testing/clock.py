"""A clock that only a test moves."""


class ManualClock:
    """Starts at `now_s` and stays there until told."""

    def __init__(self, now_s: float = 0.0) -> None:
        """Set the first reading."""
        self._now_s = now_s

    def now_s(self) -> float:
        """Return the time that was set."""
        return self._now_s

    def advance(self, duration_s: float) -> float:
        """Let `duration_s` pass and return the new time."""
        if duration_s < 0:
            raise ValueError(f"a clock never goes back, but was to advance by {duration_s}")
        self._now_s += duration_s
        return self._now_s
