"""The embedded engine: continuous batching over a Hugging Face causal model.

A fixed number of slots decodes together. A finished sequence leaves at once; waiting ones enter every `admit_every`
steps, and whenever no sequence runs.

Invariants:
    * The tokens of a request depend on its prompt, its options, its seed and the weights, not on its company or the
      moment it entered, up to the last float bits of batched matrix products; bit for bit when `is_deterministic`.
    * Every added request is answered once, unless it is cancelled.
"""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexmarl.core.errors import BackendError, ConfigError
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
        is_deterministic: bool = False,
    ) -> None:
        """Build the model of a folder; its weights come with `load_weights`.

        With `is_deterministic` the shape of no matrix product depends on the company of a request: prompts are read
        alone, and every decode step computes all slots over the whole context. Which slot a sequence has, and what
        other rows hold, does not change the bits of a product of fixed shape; tests compare them.

        Raises:
            ConfigError: a layer of the model is not full attention, or its kernels cannot be deterministic.
            BackendError: the folder holds no causal model.
        """
        model: Any = new_causal_lm(model_folder)
        self._objects = objects
        self._admit_every = admit_every
        self._is_deterministic = is_deterministic
        self._parameters = FlatParameters(model)
        config = model.config
        self._context_tokens = int(config.max_position_embeddings)
        self._vocabulary_size = int(config.vocab_size)
        self._cache = new_slot_cache(model, num_slots)
        self._forward = new_forward(model)
        self._slots = SlotTable(num_slots=num_slots, vocabulary_size=self._vocabulary_size)
        if is_deterministic:
            _check_kernel_ends(self._forward, config)
            self._cache.reserve(self._context_tokens)
        self._waiting: deque[GenerationRequest] = deque()
        self._steps_since_admission = 0

    def load_weights(self, weights: ObjectKey) -> str:
        """See InferenceBackend: what is cached of unfinished requests stays as the weights before have made it."""
        self._parameters.copy_from(self._objects.packed(weights))
        self._forward.refresh()
        return self._parameters.digest()

    def num_generated(self) -> Mapping[RequestId, int]:
        """See InferenceBackend."""
        return {request.request_id: 0 for request in self._waiting} | self._slots.num_generated()

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
                self._draw(0, self._decode(), describe, answers)
        except (RuntimeError, IndexError, ValueError) as error:
            raise BackendError(
                f"the engine failed with {self._slots.num_live} running sequences: {type(error).__name__}: {error}"
            ) from error
        return BackendStep(answers=tuple(answers))

    def _decode(self) -> Tensor:
        """Feed the newest token of each live slot; return the logits after it, of each slot when deterministic."""
        tokens, positions = self._slots.feed()
        num_columns = int(positions.max()) + 1
        if self._is_deterministic:
            # A free slot writes column 0, which the prompt of the next sequence there overwrites.
            num_columns = self._context_tokens
            free = (0, self._cache.num_slots - len(tokens))
            tokens, positions = np.pad(tokens, free), np.pad(positions, free)
        inputs = decode_pass(self._cache, torch.from_numpy(tokens), torch.from_numpy(positions), num_columns)
        return self._forward(inputs)

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
        if self._is_deterministic:
            return newcomers
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
        """Draw a token for each live slot from `first` and answer the sequences that end with it.

        Rows of `logits` beyond the live slots are drawn for, so that shapes stay as they are, and dropped.
        """
        tokens, logprobs = draw_tokens(logits, self._slots.sampling(first, len(logits)))
        num_drawn = self._slots.num_live - first
        finished = self._slots.append(first, tokens[:num_drawn].numpy(), logprobs[:num_drawn].numpy())
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


def _check_kernel_ends(forward: Forward, config: Any) -> None:
    """Refuse a model whose activations would have other bits in other slots.

    The kernels of activations treat the end of a tensor, what is left of steps of 32 numbers, with other arithmetic.
    The fast forward hands them row by row, transformers hands them the whole batch in one.
    """
    width = getattr(config, "intermediate_size", None)
    if isinstance(forward, HuggingFaceForward) and isinstance(width, int) and width % 32:
        raise ConfigError(
            f"rollout.deterministic=true: the model ({config.model_type}) has intermediate_size {width}, which is no "
            "multiple of 32, so its activations depend on the slot: use another model, or rollout.deterministic=false"
        )


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
