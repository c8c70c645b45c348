"""An engine that answers from a file of recorded completions, in real time, without computing anything. No torch.

For measurements of what runs beside generation (`benchmarks/overlap.py`): every run gets the same tokens at the same
times. The file has one JSON object a line, a RecordedTurn in the form of `core/codec.py`.

Invariants:
    * A request gets the tokens recorded under its key, whatever the weights are, and only if its prompt is the recorded
      one.
    * It is answered at the recorded time after the start of its step, which is this engine's first request of that
      step, or at once when it is asked later than that; never before it is asked.
"""

import heapq
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import ObjectKey, Purpose, RequestId, SampleKey
from flexmarl.core.messages import Generated
from flexmarl.core.protocols import BackendStep, CompletionStamp, ObjectPlane
from flexmarl.core.records import FinishReason, GenerationRequest
from flexmarl.rollout.backends.requests import check_request

MAX_WAIT_S = 0.005
"""An instance takes in new requests at least so often; a request can be answered so much late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One completion, and when it came."""

    key: SampleKey
    time_s: float
    """Since the first request of its step at its instance."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def write_trace(path: Path, turns: Iterable[RecordedTurn]) -> None:
    """Write a trace file, one turn a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(to_plain(turn), separators=(",", ":")) + "\n" for turn in turns)


def read_trace(path: Path) -> dict[SampleKey, RecordedTurn]:
    """Return the turns of a trace file by key.

    Raises:
        ConfigError: the file cannot be read, a line is not a RecordedTurn, or two have one key; names the line.
    """
    turns: dict[SampleKey, RecordedTurn] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout.backend.trace={path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            turn = from_plain(RecordedTurn, json.loads(line))
        except ValueError as error:  # a ConfigError is one too
            raise ConfigError(f"{path}:{number} is not a recorded turn: {error}") from error
        if turn.key in turns:
            raise ConfigError(f"{path}:{number} records {turn.key} again: remove one of the two lines")
        turns[turn.key] = turn
    return turns


class TraceBackend:
    """An InferenceBackend over a trace file."""

    def __init__(self, path: Path, objects: ObjectPlane, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """Read the file; `now_s` is the clock that answers follow.

        Raises:
            ConfigError: it is not a trace file.
        """
        self._path = path
        self._objects = objects
        self._now_s = now_s
        self._turns = read_trace(path)
        self._step_start_s: dict[int, float] = {}
        self._unfinished: dict[RequestId, GenerationRequest] = {}
        self._due: list[tuple[float, int, RequestId]] = []
        """A heap of when to answer what; the number breaks ties in the order asked. May hold cancelled requests."""
        self._numbers = count()

    def load_weights(self, weights: ObjectKey) -> str:
        """See InferenceBackend: digests the object, and keeps nothing of it."""
        return self._objects.packed(weights).digest()

    def num_generated(self) -> Mapping[RequestId, int]:
        """See InferenceBackend: a recorded completion comes as a whole."""
        return dict.fromkeys(self._unfinished, 0)

    def add(self, request: GenerationRequest) -> None:
        """See InferenceBackend.

        Raises:
            ConfigError: the trace has no such turn, or has it with another prompt; names the key.
        """
        check_request(request, context_tokens=None, vocabulary_size=None)
        if request.purpose is not Purpose.TRAIN:
            raise ConfigError(
                f"request {request.request_id}: a trace holds training turns alone: set eval.at_ends=false and "
                "eval.every=null"
            )
        turn = self._turns.get(request.key)
        if turn is None:
            raise ConfigError(
                f"{self._path} has no turn {request.key}: record a run of the same seed, sizes and number of steps"
            )
        if turn.prompt_tokens != request.prompt_tokens:
            raise ConfigError(
                f"{self._path} has turn {request.key} with another prompt ({len(turn.prompt_tokens)} tokens) than is "
                f"asked ({len(request.prompt_tokens)} tokens): record a run of the same workflow and data"
            )
        start_s = self._step_start_s.setdefault(request.key.step, self._now_s())
        self._unfinished[request.request_id] = request
        heapq.heappush(self._due, (start_s + turn.time_s, next(self._numbers), request.request_id))

    def cancel(self, request_id: RequestId) -> None:
        """See InferenceBackend."""
        self._unfinished.pop(request_id, None)

    @property
    def num_unfinished(self) -> int:
        """See InferenceBackend."""
        return len(self._unfinished)

    def step(self, describe: CompletionStamp) -> BackendStep:
        """See InferenceBackend. Answers what is due, or costs the time to wait for the next answer."""
        now_s = self._now_s()
        answers: list[Generated] = []
        while self._due:
            due_s, _, request_id = self._due[0]
            if request_id in self._unfinished:
                if due_s > now_s:
                    break
                answers.append(self._answer(self._unfinished.pop(request_id), describe))
            heapq.heappop(self._due)
        if answers or not self._due:
            return BackendStep(answers=tuple(answers))
        return BackendStep(cost_s=min(self._due[0][0] - now_s, MAX_WAIT_S))

    def _answer(self, request: GenerationRequest, describe: CompletionStamp) -> Generated:
        turn = self._turns[request.key]
        is_stopped = turn.finish_reason is FinishReason.STOP
        return Generated(completion=describe(request, turn.tokens, turn.logprobs, is_stopped=is_stopped))
