"""A learning curve as plain text."""

import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def learning_curve(
    values: Sequence[float | None], *, title: str, first_step: int = 1, width: int = 60, height: int = 8
) -> list[str]:
    """Return lines that show `values`, one per step from `first_step`, as bars; missing values leave gaps.

    More steps than `width` are averaged in equal spans. The axis begins at 0, unless a value is negative.
    Returns no lines when there is nothing to show.
    """
    columns = _columns(values, width)
    known = [value for value in columns if value is not None]
    if not known:
        return []
    low = min(0.0, *known)
    high = max(known)
    span = high - low or 1.0
    lines = [title]
    for row in range(height - 1, -1, -1):
        bar = "".join(_cell(value, low, span, row, height) for value in columns)
        label = high if row == height - 1 else low if row == 0 else None
        lines.append(f"{'' if label is None else format(label, '.2f'):>6} |{bar}".rstrip())
    lines.append(f"{'':>6} +{'-' * len(columns)}")
    first, last = str(first_step), f"step {first_step + len(values) - 1}"
    lines.append(f"{'':>6}  {first}{last:>{max(len(columns) - len(first), len(last) + 1)}}")
    return lines


def _columns(values: Sequence[float | None], width: int) -> list[float | None]:
    num_columns = min(width, len(values))
    columns: list[float | None] = []
    for column in range(num_columns):
        start = column * len(values) // num_columns
        end = (column + 1) * len(values) // num_columns
        known = [value for value in values[start:end] if value is not None and math.isfinite(value)]
        columns.append(sum(known) / len(known) if known else None)
    return columns


def _cell(value: float | None, low: float, span: float, row: int, height: int) -> str:
    if value is None:
        return " "
    eighths = round((value - low) / span * height * 8)
    if row == 0:
        eighths = max(eighths, 1)  # a value of 0 is not a gap
    return _BLOCKS[min(max(eighths - row * 8, 0), 8)]
