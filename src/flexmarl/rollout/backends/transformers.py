"""The embedded engine: continuous batching over a Hugging Face causal model.

A fixed number of slots decodes together. A finished sequence leaves at once; waiting ones enter every `admit_every`
steps, and whenever no sequence runs.

Invariants:
    * The tokens of a request depend on its prompt, its options, its seed and the weights, not on its company or the
      moment it entered, up to the last float bits of batched matrix products.
    * Every added request is answered once, unless it is cancelled.
"""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexmarl.core.errors import BackendError
from flexmarl.core.ids import ObjectKey, RequestId
from flexmarl.core.messages import Generated, GenerationFailed, GenerationFailureKind
from flexmarl.core.protocols import BackendStep, CompletionStamp, ObjectPlane
from flexmarl.core.records import GenerationRequest
from flexmarl.models import FlatParameters, new_causal_lm
from flexmarl.rollout.backends.forward import Forward, HuggingFaceForward
from flexmarl.rollout.backends.kv_cache import SlotCache
from flexmarl.rollout.backends.llama import BLOCK_TOKENS, LlamaForward
from flexmarl.rollout.backends.passes import decode_pass, prefill_pass
from flexmarl.rollout.backends.requests import check_request
from flexmarl.rollout.backends.sampling import draw_tokens
from flexmarl.rollout.backends.slots import SlotTable

MAX_PREFILL_TOKENS = 8192
"""Tokens, padding included, of one prefill pass: bounds its memory."""


class TransformersBackend:
    """An InferenceBackend over a model folder. Its weights are undefined until `load_weights`."""

    def __init__(
        self,
        model_folder: Path,
        objects: ObjectPlane,
        *,
        num_slots: int = 64,
        admit_every: int = 1,
    ) -> None:
        """Build the model of a folder; its weights come with `load_weights`.

        Raises:
            ConfigError: a layer of the model is not full attention.
            BackendError: the folder holds no causal model.
        """
        model: Any = new_causal_lm(model_folder)
        self._objects = objects
        self._admit_every = admit_every
        self._parameters = FlatParameters(model)
        config = model.config
        self._context_tokens = int(config.max_position_embeddings)
        self._vocabulary_size = int(config.vocab_size)
        self._cache = new_slot_cache(model, num_slots)
        self._forward = new_forward(model)
        self._slots = SlotTable(num_slots=num_slots, vocabulary_size=self._vocabulary_size)
        self._waiting: deque[GenerationRequest] = deque()
        self._steps_since_admission = 0

    def load_weights(self, weights: ObjectKey) -> str:
        """See InferenceBackend."""
        if self.num_unfinished:
            raise BackendError(f"weights {weights} arrived while {self.num_unfinished} requests are unfinished")
        self._parameters.copy_from(self._objects.packed(weights))
        self._forward.refresh()
        return self._parameters.digest()

    def add(self, request: GenerationRequest) -> None:
        """See InferenceBackend."""
        check_request(request, context_tokens=self._context_tokens, vocabulary_size=self._vocabulary_size)
        self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request_id: RequestId) -> None:
        """See InferenceBackend."""
        slot = self._slots.slot_of(request_id)
        if slot is not None:
            self._leave(slot)
        else:
            self._waiting = deque(request for request in self._waiting if request.request_id != request_id)

    @property
    def num_unfinished(self) -> int:
        """See InferenceBackend."""
        return len(self._waiting) + self._slots.num_live

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return self._slots.num_live

    @torch.inference_mode()
    def step(self, describe: CompletionStamp) -> BackendStep:
        """See InferenceBackend. A request with a log-prob that is not finite fails alone.

        Raises:
            BackendError: the forward pass failed; which request is to blame is not known.
        """
        answers: list[Generated | GenerationFailed] = []
        try:
            self._admit(describe, answers)
            if self._slots.num_live:
                tokens, positions = self._slots.feed()
                num_columns = int(positions.max()) + 1
                inputs = decode_pass(self._cache, torch.from_numpy(tokens), torch.from_numpy(positions), num_columns)
                self._draw(0, self._forward(inputs), describe, answers)
        except (RuntimeError, IndexError, ValueError) as error:
            raise BackendError(
                f"the engine failed with {self._slots.num_live} running sequences: {type(error).__name__}: {error}"
            ) from error
        return BackendStep(answers=tuple(answers))

    def _admit(self, describe: CompletionStamp, answers: list[Generated | GenerationFailed]) -> None:
        self._steps_since_admission += 1
        if self._slots.num_live and self._steps_since_admission < self._admit_every:
            return
        self._steps_since_admission = 0
        while self._waiting and self._slots.num_free:
            newcomers = self._next_newcomers()
            first = self._slots.num_live
            self._slots.enter(newcomers, context_tokens=self._context_tokens)
            self._cache.reserve(max(self._num_columns_needed(request) for request in newcomers))
            inputs, rows = prefill_pass(self._cache, [request.prompt_tokens for request in newcomers], first)
            self._draw(first, self._forward(inputs)[rows], describe, answers)

    def _next_newcomers(self) -> list[GenerationRequest]:
        """Take waiting requests, first come first, as many as fit into slots and one prefill pass."""
        newcomers = [self._waiting.popleft()]
        longest = len(newcomers[0].prompt_tokens)
        while self._waiting and len(newcomers) < self._slots.num_free:
            longest = max(longest, len(self._waiting[0].prompt_tokens))
            if longest * (len(newcomers) + 1) > MAX_PREFILL_TOKENS:
                break
            newcomers.append(self._waiting.popleft())
        return newcomers

    def _num_columns_needed(self, request: GenerationRequest) -> int:
        return min(len(request.prompt_tokens) + request.sampling.max_new_tokens, self._context_tokens)

    def _draw(
        self, first: int, logits: Tensor, describe: CompletionStamp, answers: list[Generated | GenerationFailed]
    ) -> None:
        """Draw a token for each live slot from `first` and answer the sequences that end with it."""
        tokens, logprobs = draw_tokens(logits, self._slots.sampling(first))
        finished = self._slots.append(first, tokens.numpy(), logprobs.numpy())
        # From the back, so that the slot that moves into a freed one is never one that is still to be freed.
        for slot in reversed(finished):
            answers.append(self._answer(slot, describe))
            self._leave(slot)

    def _answer(self, slot: int, describe: CompletionStamp) -> Generated | GenerationFailed:
        request = self._slots.request(slot)
        tokens, logprobs, is_stopped = self._slots.result(slot)
        if np.isfinite(logprobs[-1]):
            return Generated(completion=describe(request, tokens, logprobs, is_stopped=is_stopped))
        self._cache.clear(slot)
        return GenerationFailed(
            request_id=request.request_id,
            failure_kind=GenerationFailureKind.ENGINE,
            message=f"new token {len(tokens) - 1} has log-prob {logprobs[-1]}: the logits are not finite",
        )

    def _leave(self, slot: int) -> None:
        moved = self._slots.leave(slot)
        if moved != slot:
            self._cache.move(moved, slot, self._slots.num_cached(slot))


def new_forward(model: Any) -> Forward:
    """Return the fastest forward for a Hugging Face model."""
    return LlamaForward(model) if LlamaForward.serves(model) else HuggingFaceForward(model)


def new_slot_cache(model: Any, num_slots: int) -> SlotCache:
    """Return an empty cache for a Hugging Face model."""
    config = model.config
    num_heads = config.num_attention_heads
    return SlotCache(
        num_layers=config.num_hidden_layers,
        num_slots=num_slots,
        num_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=model.dtype,
        device=model.device,
        block_tokens=BLOCK_TOKENS if LlamaForward.serves(model) else None,
    )
