"""The rows of `store.py`, and how its processes are talked to. Standard library only: the peer has its own environment.

A process says `{"ready": true}`, then reads one JSON object a line, an order `{"role", "step", "num_rows",
"batch_size"}`, and answers each with one line, `{"wall_s": ...}` or `{"error": ...}`.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NUM_VALUES = 256
"""Ints of a row, and floats of a row."""
NUM_CONTENTS = 64


def values_of(row: int) -> tuple[list[int], list[float], float]:
    """Return the ints, floats and reward of a row; NUM_CONTENTS differ, so that a row is as near as a fresh one is."""
    base = row % NUM_CONTENTS * 619
    return [base + n for n in range(NUM_VALUES)], [-1.0 / (base + n + 1) for n in range(NUM_VALUES)], float(row % 2)


def sum_of_last(num_rows: int) -> int:
    """Return the sum over the last int of each of the first rows: what a consumer must have read."""
    return sum(values_of(row)[0][-1] for row in range(num_rows))


def serve(run: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each line of the standard input with the result of `run`, until it ends."""
    # Libraries print to the standard output too: only this stream carries answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception:  # noqa: BLE001 (told to whoever ordered it)
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A process that serves orders; a context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it and wait until it is ready."""
        self._command = list(command)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to an order.

        Raises:
            RuntimeError: the process failed or ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command} ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._command} failed:\n{answer['error']}")
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
