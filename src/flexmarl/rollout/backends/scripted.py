"""A deterministic engine without a model: tokens follow from the seed of a request, time from a cost model. No torch.

Invariants:
    * The tokens of a request depend on its seed, its options and the vocabulary alone: not on weights, nor on company.
    * Every added request is answered once, unless it is cancelled.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexmarl.config import ScriptedRolloutConfig
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import ObjectKey, RequestId
from flexmarl.core.messages import Generated
from flexmarl.core.protocols import BackendStep, CompletionStamp, ObjectPlane
from flexmarl.core.records import GenerationRequest
from flexmarl.core.rng import HashRng, derive_seed
from flexmarl.rollout.backends.requests import check_request


@dataclass(slots=True, kw_only=True)
class _Running:
    request: GenerationRequest
    tokens: list[int]
    is_stopped: bool
    num_done: int = 0


class ScriptedBackend:
    """An InferenceBackend that draws each content token uniformly and independently.

    One step lets waiting requests into free slots and advances every running sequence by one token. A sequence has at
    least one content token; its stop token is the first of the request's, and is missing where the limit comes first.
    """

    def __init__(self, config: ScriptedRolloutConfig, objects: ObjectPlane, *, tokens: Sequence[int]) -> None:
        """Draw from the token ids `tokens`.

        Raises:
            ConfigError: `tokens` is empty.
        """
        if not tokens:
            raise ConfigError("rollout.backend.vocabulary is empty: give it at least one character")
        self._config = config
        self._objects = objects
        self._tokens = tuple(tokens)
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[RequestId, _Running] = {}

    def load_weights(self, weights: ObjectKey) -> str:
        """See InferenceBackend: digests the object, and keeps nothing of it."""
        return self._objects.packed(weights).digest()

    def num_generated(self) -> Mapping[RequestId, int]:
        """See InferenceBackend."""
        waiting = {request.request_id: 0 for request in self._waiting}
        return waiting | {request_id: running.num_done for request_id, running in self._running.items()}

    def add(self, request: GenerationRequest) -> None:
        """See InferenceBackend."""
        check_request(request, context_tokens=None, vocabulary_size=None)
        self._waiting.append(request)

    def cancel(self, request_id: RequestId) -> None:
        """See InferenceBackend."""
        if self._running.pop(request_id, None) is None:
            self._waiting = deque(request for request in self._waiting if request.request_id != request_id)

    @property
    def num_unfinished(self) -> int:
        """See InferenceBackend."""
        return len(self._waiting) + len(self._running)

    def step(self, describe: CompletionStamp) -> BackendStep:
        """See InferenceBackend. Costs one decode step and the prompts of the sequences that entered."""
        cost_s = 0.0
        while self._waiting and len(self._running) < self._config.num_slots:
            request = self._waiting.popleft()
            self._running[request.request_id] = self._drawn(request)
            cost_s += self._config.prefill_token_s * len(request.prompt_tokens)
        if self._running:
            cost_s += self._config.token_s
        answers = []
        for running in list(self._running.values()):
            running.num_done += 1
            if running.num_done == len(running.tokens):
                del self._running[running.request.request_id]
                # One of the content tokens or the stop, all equally likely.
                logprobs = [-math.log(len(self._tokens) + 1)] * len(running.tokens)
                completion = describe(running.request, running.tokens, logprobs, is_stopped=running.is_stopped)
                answers.append(Generated(completion=completion))
        return BackendStep(answers=tuple(answers), cost_s=cost_s)

    def _drawn(self, request: GenerationRequest) -> _Running:
        rng = HashRng(derive_seed("scripted completion", request.seed))
        limit = request.sampling.max_new_tokens
        can_stop = bool(request.stop_token_ids) and not request.sampling.ignore_stop
        num_content = min(self._num_content(rng, limit), limit) if can_stop else limit
        tokens = [self._tokens[rng.below(len(self._tokens))] for _ in range(num_content)]
        is_stopped = num_content < limit
        if is_stopped:
            tokens.append(request.stop_token_ids[0])
        return _Running(request=request, tokens=tokens, is_stopped=is_stopped)

    def _num_content(self, rng: HashRng, limit: int) -> int:
        """Draw the number of content tokens, 1 or more; it may exceed the limit."""
        mean = self._config.mean_tokens
        if mean is None:
            return 1 + rng.below(limit)
        if mean <= 1.0:
            return 1
        # Inverse of the geometric distribution on 1, 2, ... with this mean; 1 - random() is in (0, 1].
        return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))
