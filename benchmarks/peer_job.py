"""The fixed job of `end_to_end.py`, and how a side of the comparison that runs in its own process is talked to.

Standard library only: the peer runs it in an environment of its own. A side is a process that loads its imports, says
`{"ready": true}`, then reads one JSON object a line, an order, and answers with one, `{"step_s": [...], "num_samples",
"num_tokens"}`. Models are made before the first step, outside of its time. An order is `{"num_steps", "num_threads",
"seed", "limit_s"}`; after `limit_s` nothing more is begun (a bad number of threads can cost 10 times the time).
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

AGENTS = ("first", "second")
NUM_QUERIES = 4
NUM_TRAJECTORIES = 16
NUM_NEW_TOKENS = 48
NUM_STEPS = 8
LEARNING_RATE = 1e-5
SAMPLES_PER_STEP = len(AGENTS) * NUM_QUERIES * NUM_TRAJECTORIES
START_TIMEOUT_S = 180.0
"""Importing torch and transformers takes 10 s on an idle machine, several times that on a crowded one."""
RUN_TIMEOUT_S = 60.0
"""A side that has not answered so long after the limit of its order is ended."""


def questions(num_steps: int) -> list[str]:
    """Return the questions of a run, all of one length, so that no side has to pad its prompts."""
    return [f"{n % 10}+{n // 10 % 10}-{n * 7 % 10}" for n in range(num_steps * NUM_QUERIES)]


def reward_of(text: str) -> float:
    """Return the reward of an agent for what it wrote: distinct characters / 10."""
    return len(set(text)) / 10


def serve(run: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each line of the standard input with the result of `run`, until it ends."""
    # Libraries print to the standard output too: only this stream carries answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


class TooSlowError(RuntimeError):
    """A side went on for long after the limit of its order, and was ended."""


class SideProcess:
    """A side that runs in its own process; a context manager."""

    def __init__(self, python: str, script: Path, arguments: Sequence[str], *, log: Path) -> None:
        """Start loading; what the side prints goes to the file `log`."""
        self._name = script.stem
        self._log = log
        self._log_file = log.open("wb")
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [python, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            env=environment,
        )

    def wait_ready(self) -> None:
        """Wait until the imports are done."""
        self._read(timeout_s=START_TIMEOUT_S)

    def run(self, *, num_steps: int, num_threads: int, seed: int, limit_s: float = 600.0) -> list[float]:
        """Return the seconds of each step but the first, which warms up.

        Raises:
            TooSlowError: the side did not keep to the limit; it has ended.
            RuntimeError: the side ended, or did not generate and train exactly the tokens of the job.
        """
        assert self._process.stdin is not None
        order = {"num_steps": num_steps, "num_threads": num_threads, "seed": seed, "limit_s": limit_s}
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error
        answer = self._read(timeout_s=limit_s + RUN_TIMEOUT_S)
        step_s: list[float] = answer["step_s"]
        expected = (SAMPLES_PER_STEP * len(step_s), SAMPLES_PER_STEP * len(step_s) * NUM_NEW_TOKENS)
        if (answer["num_samples"], answer["num_tokens"]) != expected:
            raise RuntimeError(f"{self._name} trained other than {expected} samples and tokens: {answer}")
        return step_s[1:]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_file.close()

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, *, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        is_too_slow = threading.Event()

        def end() -> None:
            is_too_slow.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if is_too_slow.is_set():
            raise TooSlowError(f"{self._name} gave no answer within {timeout_s:.0f} s")
        if not line:
            raise self._failure("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> RuntimeError:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        return RuntimeError(f"{self._name} {what}; the end of what it printed:\n{tail}")
