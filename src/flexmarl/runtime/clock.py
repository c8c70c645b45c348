"""Real time."""

import time


class MonotonicClock:
    """Seconds of the operating system's monotonic clock, the same in every process of a machine."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        return time.monotonic()
