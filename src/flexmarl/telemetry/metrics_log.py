"""Metrics: one row per step in `metrics.jsonl`, keys `owner/name_with_unit`.

Owners: `run`, `agent/<name>`, `policy/<name>`, `rollout`, `training`, `store`, `eval`.
Invariant: `step` rises from row to row; a resumed run forgets the rows of the steps that it runs again.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from flexmarl.core.errors import InvariantError
from flexmarl.telemetry.jsonl import AppendFile, read_lines, write_atomically


class MetricsLog:
    """Writes `metrics.jsonl`."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Open the metrics at `path` to go on with `first_step`; rows of that step and later ones are dropped.

        Raises:
            StoreError: the file cannot be opened.
        """
        _forget(path, first_step)
        self._file = AppendFile(path)
        self._last_step = first_step - 1

    def write(self, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """Append the row of a step, in key order, and hand it to the operating system.

        A value that is not finite is written as null: JSON has no name for it.

        Raises:
            InvariantError: the step has a row already, or a later one has.
        """
        if step <= self._last_step:
            raise InvariantError(f"{self._file.path}: row of step {step} after that of step {self._last_step}")
        row: dict[str, float | int | str | None] = {"step": step}
        for key in sorted(values):
            value = values[key]
            row[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._file.append(row)
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float | int | str | None]]:
    """Return the rows in order; a torn last one is left out.

    Raises:
        StoreError: the file cannot be read, or a row before the last is damaged.
    """
    return [plain for _, plain in read_lines(path)]


def _forget(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    rows = read_metrics(path)
    kept = [row for row in rows if isinstance(step := row.get("step"), int) and step < first_step]
    if len(kept) < len(rows):
        write_atomically(path, "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept))
