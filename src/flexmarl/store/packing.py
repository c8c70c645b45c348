"""Rows as they travel and lie on disk: the lists of a turn as one string of bytes.

The body of a turn is three counts (prompt tokens, response tokens, version spans), then prompt tokens, response tokens,
log-probs, and start, end and policy_version of each span; all little-endian: int32, but float64 for log-probs. Whoever
has the turn packs it, so that a process that lends the store to others stores and hands out bodies as they are.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from flexmarl.core.errors import ConfigError, InvariantError
from flexmarl.core.ids import PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.records import (
    ColumnScalar,
    FinishedTrajectory,
    FinishReason,
    OutcomeRecord,
    Sample,
    TokenColumn,
    TurnRow,
    VersionSpan,
)
from flexmarl.store.schema import encode_outcome

_COUNTS = struct.Struct("<3I")
_SPAN = struct.Struct("<3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTurn:
    """A TurnRow whose lists are the body of a payload record."""

    key: SampleKey
    attempt: int
    policy: PolicyName
    policy_version: int
    weights_version: int
    temperature: float
    finish_reason: FinishReason
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTrajectory:
    """A FinishedTrajectory, checked as far as that is possible without the store."""

    trajectory: TrajectoryKey
    record: str
    """Its outcome, as `encode_record` writes it."""
    turns: tuple[PackedTurn, ...]
    rewards: tuple[float, ...]
    """Of each turn."""
    advantages: tuple[float, ...]
    columns: tuple[Mapping[str, ColumnScalar], ...]
    """User columns of each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """A Sample whose lists are bodies of payload records."""

    turn: PackedTurn
    advantage: float
    reward: float
    token_columns: Mapping[TokenColumn, bytes] = field(default_factory=dict)


def pack_turn(row: TurnRow) -> PackedTurn:
    """Pack a turn.

    Raises:
        InvariantError: a token id is not an int32, or the numbers of tokens and log-probs differ.
    """
    return PackedTurn(
        key=row.key,
        attempt=row.attempt,
        policy=row.policy,
        policy_version=row.policy_version,
        weights_version=row.weights_version,
        temperature=row.temperature,
        finish_reason=row.finish_reason,
        body=_pack_body(row),
    )


def _pack_body(row: TurnRow) -> bytes:
    prompt, response, logprobs = row.prompt_tokens, row.response_tokens, row.logprobs
    if len(response) != len(logprobs):
        raise InvariantError(f"{row.key}: {len(response)} response tokens with {len(logprobs)} log-probs")
    spans = [each for span in row.version_spans for each in (span.start, span.end, span.policy_version)]
    counts = (len(prompt), len(response), len(row.version_spans))
    try:
        return _body_of(*counts).pack(*counts, *prompt, *response, *logprobs, *spans)
    except struct.error as error:
        raise InvariantError(f"{row.key}: token ids must be int32, log-probs floats: {error}") from error


@lru_cache(maxsize=1024)
def _body_of(num_prompt: int, num_response: int, num_spans: int) -> struct.Struct:
    return struct.Struct(f"<3I{num_prompt + num_response}i{num_response}d{3 * num_spans}i")


def body_counts(packed: PackedTurn) -> tuple[int, int]:
    """Return the numbers of prompt and of response tokens.

    Raises:
        InvariantError: the body is not what `pack_turn` makes.
    """
    body = packed.body
    if len(body) >= _COUNTS.size:
        num_prompt, num_response, num_spans = _COUNTS.unpack_from(body)
        if len(body) == _COUNTS.size + 4 * num_prompt + 12 * num_response + _SPAN.size * num_spans:
            return num_prompt, num_response
    raise InvariantError(f"{packed.key}: {len(body)} bytes are not a packed turn")


def body_places(content: bytes, begin: int = 0) -> tuple[int, int, int, int]:
    """Return where the prompt tokens, response tokens and log-probs of the body at `begin` lie, and where they end."""
    num_prompt, num_response, _ = _COUNTS.unpack_from(content, begin)
    first = begin + _COUNTS.size
    start = first + 4 * num_prompt
    middle = start + 4 * num_response
    return first, start, middle, middle + 8 * num_response


def newest_version(packed: PackedTurn) -> int:
    """Return the newest policy_version that generated a token of the turn."""
    body = packed.body
    num_prompt, num_response, num_spans = _COUNTS.unpack_from(body)
    offset = _COUNTS.size + 4 * num_prompt + 12 * num_response
    if num_spans == 1:
        return int(_SPAN.unpack_from(body, offset)[2])
    versions = [_SPAN.unpack_from(body, offset + _SPAN.size * number)[2] for number in range(num_spans)]
    return max(versions, default=packed.policy_version)


def unpack_turn(packed: PackedTurn) -> TurnRow:
    """Return the turn that `pack_turn` packed."""
    body = packed.body
    num_prompt, num_response, num_spans = _COUNTS.unpack_from(body)
    begin, start, middle, offset = body_places(body)
    spans = [_SPAN.unpack_from(body, offset + _SPAN.size * number) for number in range(num_spans)]
    return TurnRow(
        key=packed.key,
        attempt=packed.attempt,
        policy=packed.policy,
        policy_version=packed.policy_version,
        weights_version=packed.weights_version,
        prompt_tokens=struct.unpack_from(f"<{num_prompt}i", body, begin),
        response_tokens=struct.unpack_from(f"<{num_response}i", body, start),
        logprobs=struct.unpack_from(f"<{num_response}d", body, middle),
        temperature=packed.temperature,
        finish_reason=packed.finish_reason,
        version_spans=tuple(VersionSpan(start=start, end=stop, policy_version=v) for start, stop, v in spans),
    )


def pack_values(values: Sequence[float]) -> bytes:
    """Return the body of the record that holds a token column of one turn."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_values(body: bytes) -> tuple[float, ...]:
    """Return what `pack_values` packed."""
    return struct.unpack(f"<{len(body) // 8}d", body)


def unpack_sample(packed: PackedSample) -> Sample:
    """Return a sample with its lists."""
    return Sample(
        turn=unpack_turn(packed.turn),
        advantage=packed.advantage,
        reward=packed.reward,
        token_columns={column: unpack_values(body) for column, body in packed.token_columns.items()},
    )


def pack_finished(finished: FinishedTrajectory) -> PackedTrajectory:
    """Check and pack a whole trajectory.

    Raises:
        ConfigError: a reward is missing or not finite.
        InvariantError: it is not a first attempt, or its turns are not those of its outcome.
    """
    outcome, turns = finished.outcome, finished.turns
    check_rewards(outcome)
    key = outcome.trajectory
    if outcome.attempt != 0 or any(turn.attempt != 0 for turn in turns):
        raise InvariantError(f"{key}: a trajectory that is put whole has attempt 0 only")
    keys = tuple(turn.key for turn in turns)
    is_same = len(set(keys)) == len(keys) and (keys == outcome.turns or set(keys) == set(outcome.turns))
    if not is_same or len(finished.advantages) != len(turns):
        raise InvariantError(
            f"{key}: {len(turns)} turns with {len(finished.advantages)} advantages, but its outcome lists "
            f"{', '.join(map(str, outcome.turns)) or 'none'}"
        )
    if not all(map(math.isfinite, finished.advantages)):
        raise InvariantError(f"{key}: an advantage of {finished.advantages} is not finite")
    columns = {each.key: each.values for each in outcome.turn_columns}
    return PackedTrajectory(
        trajectory=key,
        record=encode_outcome(outcome),
        turns=tuple(map(pack_turn, turns)),
        rewards=tuple(_rewards(outcome, turns)),
        advantages=finished.advantages,
        columns=tuple(columns.get(turn.key, {}) for turn in turns) if columns else ({},) * len(turns),
    )


def _rewards(outcome: OutcomeRecord, turns: Sequence[TurnRow]) -> list[float]:
    rewards = [outcome.rewards.get(turn.key.agent) for turn in turns]
    if own := {each.key: each.reward for each in outcome.turn_rewards}:
        rewards = [own.get(turn.key, reward) for turn, reward in zip(turns, rewards, strict=True)]
    for turn, reward in zip(turns, rewards, strict=True):
        if reward is None:
            raise ConfigError(
                f"{turn.key}: neither the turn nor its agent {turn.key.agent!r} has a reward in the outcome: give one"
            )
    return [reward for reward in rewards if reward is not None]


def check_rewards(outcome: OutcomeRecord) -> None:
    """Refuse rewards that are not numbers.

    Raises:
        ConfigError: one is not finite.
    """
    if all(map(math.isfinite, outcome.rewards.values())) and not outcome.turn_rewards:
        return
    given = [(f"agent {agent!r}", reward) for agent, reward in outcome.rewards.items()]
    given += [(f"turn {turn.key} of agent {turn.key.agent!r}", turn.reward) for turn in outcome.turn_rewards]
    for whose, reward in given:
        if not math.isfinite(reward):
            raise ConfigError(
                f"{outcome.trajectory}: the reward of {whose} is {reward}, expected a finite number: "
                "fix the reward function, or raise in it to make the trajectory a failure"
            )
