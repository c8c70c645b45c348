"""The state of running sequences, one slot each, as arrays that a decode step handles without a loop.

Invariants:
    * The live slots are the first `num_live`: when a sequence leaves, the last one moves into its slot.
    * A live sequence of prompt length P with n new tokens has P + n - 1 tokens in the cache: its newest is not yet fed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexmarl.core.ids import RequestId
from flexmarl.core.records import GenerationRequest
from flexmarl.rollout.backends.sampling import SamplingBatch, uniforms

_NO_TOKEN = -1
"""Fills the rows of `stop_tokens`; no token has this id."""


class SlotTable:
    """Running sequences."""

    def __init__(self, *, num_slots: int, vocabulary_size: int) -> None:
        """Make an empty table."""
        self._vocabulary_size = vocabulary_size
        self._requests: list[GenerationRequest] = []
        self._num_cached = np.zeros(num_slots, np.int64)
        self._num_new = np.zeros(num_slots, np.int64)
        self._limits = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._temperatures = np.ones(num_slots, np.float32)
        self._is_greedy = np.zeros(num_slots, np.bool_)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._stop_tokens = np.full((num_slots, 1), _NO_TOKEN, np.int64)
        self._is_stopped = np.zeros(num_slots, np.bool_)
        self._tokens = np.zeros((num_slots, 0), np.int64)
        self._logprobs = np.zeros((num_slots, 0), np.float32)

    @property
    def num_live(self) -> int:
        """Running sequences."""
        return len(self._requests)

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return len(self._num_new) - len(self._requests)

    def enter(self, requests: Sequence[GenerationRequest], *, context_tokens: int) -> None:
        """Put requests into the next free slots, their prompts cached and nothing generated."""
        limits = [
            min(request.sampling.max_new_tokens, context_tokens - len(request.prompt_tokens)) for request in requests
        ]
        self._make_room(max(len(request.stop_token_ids) for request in requests), max(limits))
        for request, limit in zip(requests, limits, strict=True):
            slot = self.num_live
            sampling = request.sampling
            self._num_cached[slot] = len(request.prompt_tokens)
            self._num_new[slot] = 0
            self._limits[slot] = limit
            self._seeds[slot] = request.seed
            self._is_greedy[slot] = sampling.temperature == 0.0
            self._temperatures[slot] = sampling.temperature or 1.0
            self._top_p[slot] = sampling.top_p
            self._top_k[slot] = sampling.top_k or self._vocabulary_size
            self._is_stopped[slot] = False
            self._stop_tokens[slot] = _NO_TOKEN
            if not sampling.ignore_stop:
                self._stop_tokens[slot, : len(request.stop_token_ids)] = request.stop_token_ids
            self._requests.append(request)

    def _make_room(self, num_stops: int, num_tokens: int) -> None:
        if num_stops > self._stop_tokens.shape[1]:
            self._stop_tokens = _widened(self._stop_tokens, num_stops, _NO_TOKEN)
        if num_tokens > self._tokens.shape[1]:
            self._tokens = _widened(self._tokens, num_tokens, 0)
            self._logprobs = _widened(self._logprobs, num_tokens, 0)

    def sampling(self, first: int, count: int) -> SamplingBatch:
        """Return how `count` slots from `first` draw their next token; free ones as a sequence before them did."""
        slots = slice(first, first + count)
        return SamplingBatch(
            temperatures=self._temperatures[slots],
            is_greedy=self._is_greedy[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            uniforms=uniforms(self._seeds[slots], self._num_new[slots].astype(np.uint64)),
        )

    def append(self, first: int, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> list[int]:
        """Append one token to each live slot from `first`; return the slots that are finished now, in rising order.

        A slot is finished at a stop token, at its limit, and when its log-prob is not finite.
        """
        live = slice(first, self.num_live)
        slots = np.arange(first, self.num_live)
        self._tokens[slots, self._num_new[live]] = tokens
        self._logprobs[slots, self._num_new[live]] = logprobs
        self._num_new[live] += 1
        self._is_stopped[live] = (tokens[:, None] == self._stop_tokens[live]).any(axis=1)
        is_finished = self._is_stopped[live] | (self._num_new[live] >= self._limits[live]) | ~np.isfinite(logprobs)
        return [first + int(place) for place in is_finished.nonzero()[0]]

    def feed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the newest token of each live slot and its position, and count it as cached."""
        live = slice(0, self.num_live)
        tokens = self._tokens[np.arange(self.num_live), self._num_new[live] - 1]
        positions = self._num_cached[live].copy()
        self._num_cached[live] += 1
        return tokens, positions

    def request(self, slot: int) -> GenerationRequest:
        """Return the request in a live slot."""
        return self._requests[slot]

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot in which a request runs."""
        return next((slot for slot, each in enumerate(self._requests) if each.request_id == request_id), None)

    def num_generated(self) -> dict[RequestId, int]:
        """Return the number of new tokens of each running request."""
        return {request.request_id: int(count) for request, count in zip(self._requests, self._num_new, strict=False)}

    def num_cached(self, slot: int) -> int:
        """Return the number of cached tokens of a live slot."""
        return int(self._num_cached[slot])

    def result(self, slot: int) -> tuple[list[int], list[float], bool]:
        """Return tokens and log-probs of a live slot, and whether the last token is a stop token."""
        end = int(self._num_new[slot])
        return self._tokens[slot, :end].tolist(), self._logprobs[slot, :end].tolist(), bool(self._is_stopped[slot])

    def leave(self, slot: int) -> int:
        """Free a live slot; return the slot whose sequence has moved into it (itself when it was the last)."""
        last = self.num_live - 1
        for array in self._arrays():
            array[slot] = array[last]
        self._requests[slot] = self._requests[last]
        self._requests.pop()
        return last

    def _arrays(self) -> list[npt.NDArray[np.generic]]:
        return [
            self._num_cached,
            self._num_new,
            self._limits,
            self._seeds,
            self._temperatures,
            self._is_greedy,
            self._top_p,
            self._top_k,
            self._stop_tokens,
            self._is_stopped,
            self._tokens,
            self._logprobs,
        ]


def _widened(old: npt.NDArray[np.generic], width: int, fill: int) -> npt.NDArray:  # type: ignore[type-arg]
    new = np.full((old.shape[0], width), fill, old.dtype)
    new[:, : old.shape[1]] = old
    return new
