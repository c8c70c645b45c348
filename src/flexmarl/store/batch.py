"""Rows as training gets them: columns over one string of bytes, unpacked where somebody wants that."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.core.records import FinishReason, Sample, TokenColumn
from flexmarl.store.packing import PackedSample, PackedTurn, body_places, unpack_sample

BatchRow = tuple[int, int, int, str, int, int, int, int, int, float, str, float, float, int, int]
"""Key (6), attempt, policy_version, weights_version, temperature, finish_reason, advantage, reward, and where the body
of the turn begins and ends in the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Samples of one policy, in order. Numbers come as views of the content, which tensors can be made from."""

    policy: PolicyName
    rows: Sequence[BatchRow]
    content: bytes
    """Has the bodies of the turns (`packing.py`), perhaps with other bytes between them."""
    token_columns: Mapping[TokenColumn, Sequence[bytes | None]] = field(default_factory=dict)
    """By row; a column that no row has is left out."""

    def __len__(self) -> int:
        return len(self.rows)

    def key(self, row: int) -> SampleKey:
        """Return the key of a row."""
        return SampleKey(*self.rows[row][:6])  # type: ignore[arg-type]

    def keys(self) -> tuple[SampleKey, ...]:
        """Return the keys of all rows."""
        return tuple(SampleKey(*row[:6]) for row in self.rows)  # type: ignore[arg-type]

    def prompt_tokens(self, row: int) -> memoryview:
        """Return the prompt's token ids, int32."""
        return self._view(row, 0).cast("i")

    def response_tokens(self, row: int) -> memoryview:
        """Return the response's token ids, int32."""
        return self._view(row, 1).cast("i")

    def logprobs(self, row: int) -> "memoryview[float]":
        """Return the log-probs of the response's tokens, float64."""
        return self._view(row, 2).cast("d")

    def _view(self, row: int, number: int) -> memoryview:
        assert sys.byteorder == "little", "bodies are little-endian"
        begin = self.rows[row][13]
        start, stop = body_places(self.content, begin)[number : number + 2]
        return memoryview(self.content)[start:stop]

    def advantage(self, row: int) -> float:
        """Return the advantage of a row."""
        return self.rows[row][11]

    def reward(self, row: int) -> float:
        """Return the reward of a row."""
        return self.rows[row][12]

    def sample(self, row: int) -> Sample:
        """Return a row with its lists."""
        values: Any = self.rows[row]
        turn = PackedTurn(
            key=self.key(row),
            attempt=values[6],
            policy=self.policy,
            policy_version=values[7],
            weights_version=values[8],
            temperature=values[9],
            finish_reason=FinishReason(values[10]),
            body=self.content[values[13] : values[14]],
        )
        tokens = {column: body for column, bodies in self.token_columns.items() if (body := bodies[row]) is not None}
        return unpack_sample(PackedSample(turn=turn, advantage=values[11], reward=values[12], token_columns=tokens))

    def samples(self) -> list[Sample]:
        """Return all rows with their lists."""
        return [self.sample(row) for row in range(len(self.rows))]
