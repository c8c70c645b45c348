"""How far rollouts may run ahead of training, and which versions may generate a step, by pipeline mode.

Step k trains the weights of version k and makes version k + 1. Rollouts of step k by version v have staleness k - v.
"""

from dataclasses import dataclass
from typing import Literal

PipelineMode = Literal["serial", "strict", "one_step_off", "bounded_async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRule:
    """A pipeline mode with its bound."""

    mode: PipelineMode
    max_staleness: int | None = None
    """Of mode bounded_async."""

    @property
    def num_steps_ahead(self) -> int:
        """How many steps after the one that trains may be generated."""
        if self.mode == "one_step_off":
            return 1
        return self.max_staleness or 0

    @property
    def is_streamed(self) -> bool:
        """Whether a group trains as soon as it closes."""
        return self.mode != "serial"

    @property
    def publishes_in_flight(self) -> bool:
        """Whether weights are published while requests are in flight."""
        return self.mode == "bounded_async"

    @property
    def waits_for_next_rollouts(self) -> bool:
        """Whether a step is published only when the next one, if it has begun, is generated whole."""
        return self.mode == "one_step_off"

    def version_bounds(self, step: int, *, oldest_version: int) -> tuple[int, int]:
        """Return the lowest and the highest version that may generate a token of a step.

        `oldest_version` is the oldest that this process can serve: where the run began, or went on.
        """
        if self.mode == "bounded_async":
            return max(oldest_version, step - self.num_steps_ahead), step
        version = max(oldest_version, step - self.num_steps_ahead)
        return version, version
