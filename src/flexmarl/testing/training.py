"""What tests of training need: samples, a tiny model on disk, an object plane in memory, a clock that stands still."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, SampleKey
from flexmarl.core.layout import PackedObject
from flexmarl.core.protocols import ObjectInfo, Tier
from flexmarl.core.records import FinishReason, Sample, TokenColumn, TurnRow, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

TINY_VOCABULARY = 23
SERVED_BY = InstanceId("policy.0")


def make_sample(
    number: int = 0,
    *,
    prompt: Sequence[int] = (1, 2),
    response: Sequence[int] = (3, 4),
    advantage: float = 1.0,
    reward: float = 0.0,
    temperature: float = 1.0,
    policy: str = "actor",
    agent: str = "solver",
    policy_version: int = 0,
    logprobs: Sequence[float] | None = None,
    token_columns: Mapping[TokenColumn, Sequence[float]] | None = None,
) -> Sample:
    """Return a sample whose key has trajectory `number`; its rollout log-probs are -1 unless given."""
    turn = TurnRow(
        key=SampleKey(0, 0, number, AgentName(agent), 0, 0),
        attempt=0,
        policy=PolicyName(policy),
        policy_version=policy_version,
        weights_version=policy_version,
        prompt_tokens=tuple(prompt),
        response_tokens=tuple(response),
        logprobs=tuple(logprobs if logprobs is not None else [-1.0] * len(response)),
        temperature=temperature,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=len(response), policy_version=policy_version),),
    )
    columns = {column: tuple(values) for column, values in (token_columns or {}).items()}
    return Sample(turn=turn, advantage=advantage, reward=reward, token_columns=columns)


def write_tiny_model(
    folder: Path, *, seed: int = 0, tie: bool = False, kind: str = "llama", spread: float = 0.2
) -> Path:
    """Write a model of two layers and hidden size 16 (`llama` or `gpt2`) and return its folder; it has no tokenizer.

    `spread` is the standard deviation of its weights: wide ones make its tokens unequally likely.
    """
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    config: Any
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=TINY_VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tie,
            initializer_range=spread,
        )
    else:
        config = GPT2Config(
            vocab_size=TINY_VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            initializer_range=spread,
            bos_token_id=0,
            eos_token_id=0,
        )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class StillClock:
    """A clock on which no time passes."""

    def now_s(self) -> float:
        """Return 0."""
        return 0.0


class _Done:
    def __init__(self, info: ObjectInfo) -> None:
        self._info = info

    def result(self, timeout_s: float) -> ObjectInfo:
        """Return what was stored."""
        return self._info


class MemoryObjectPlane:
    """An object plane in the memory of one process. It counts the copies that `set` makes."""

    def __init__(self) -> None:
        """Start without objects."""
        self._objects: dict[ObjectKey, PackedObject] = {}
        self.num_copies = 0

    def set(self, key: ObjectKey, tensors: "Mapping[str, Tensor] | PackedObject", *, tier: Tier = Tier.HOST) -> _Done:
        """Copy a packed object. Raises StoreError when the key has other content."""
        if not isinstance(tensors, PackedObject):
            raise StoreError(f"{key}: only packed objects are kept here")
        stored = PackedObject(layout=tensors.layout, buffer=memoryview(bytes(tensors.buffer)))
        self.num_copies += 1
        if key in self._objects and self._objects[key].digest() != stored.digest():
            raise StoreError(f"{key} exists with other content")
        self._objects[key] = stored
        return _Done(ObjectInfo(key=key, num_bytes=stored.layout.num_bytes, digest=stored.digest()))

    def get(self, key: ObjectKey, *, device: str = "cpu") -> "Mapping[str, Tensor]":
        """Return the tensors, over the stored memory."""
        from flexmarl.objects import as_flat_tensor, unpack

        packed = self.packed(key)
        return unpack(packed.layout, as_flat_tensor(packed.buffer))

    def packed(self, key: ObjectKey) -> PackedObject:
        """Return the stored object. Raises StoreError when there is none."""
        if key not in self._objects:
            raise StoreError(f"{key} does not exist")
        return self._objects[key]

    def info(self, key: ObjectKey) -> ObjectInfo | None:
        """Return what is known of an object."""
        packed = self._objects.get(key)
        if packed is None:
            return None
        return ObjectInfo(key=key, num_bytes=packed.layout.num_bytes, digest=packed.digest())

    def delete(self, key: ObjectKey) -> None:
        """Forget an object."""
        self._objects.pop(key, None)
