import dataclasses
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import BLUE, RED, advantage, key, outcome, turn_row

from flexmarl.core.errors import ConfigError, InvariantError
from flexmarl.core.records import FinishedTrajectory, TurnColumns, TurnReward, TurnRow, VersionSpan
from flexmarl.store.packing import (
    body_counts,
    newest_version,
    pack_finished,
    pack_turn,
    pack_values,
    unpack_turn,
    unpack_values,
)
from flexmarl.store.schema import encode_outcome, encode_record

pytestmark = pytest.mark.unit

SOLVER, CHECKER = key(agent="solver"), key(agent="checker")
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(tuple)


@settings(max_examples=30)
@given(prompt=TOKENS, response=TOKENS, logprobs=st.data(), spans=st.lists(st.tuples(*[st.integers(0, 99)] * 3)))
def test_a_turn_comes_back_bit_for_bit(
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    logprobs: st.DataObject,
    spans: list[tuple[int, int, int]],
) -> None:
    drawn = logprobs.draw(st.lists(st.floats(allow_nan=False), min_size=len(response), max_size=len(response)))
    row = dataclasses.replace(
        turn_row(SOLVER),
        prompt_tokens=prompt,
        response_tokens=response,
        logprobs=tuple(drawn),
        version_spans=tuple(VersionSpan(start=a, end=b, policy_version=v) for a, b, v in spans),
    )
    packed = pack_turn(row)
    again = unpack_turn(packed)
    assert again == row
    assert [value.hex() for value in again.logprobs] == [value.hex() for value in row.logprobs]
    assert body_counts(packed) == (len(prompt), len(response))
    assert newest_version(packed) == max((v for _, _, v in spans), default=row.policy_version)


def test_the_body_is_counts_then_little_endian_arrays() -> None:
    packed = pack_turn(turn_row(SOLVER, tokens=(0, 151_643)))
    expected = struct.pack("<3I", 2, 2, 1) + struct.pack("<4i", 1, 2, 0, 151_643)
    assert packed.body == expected + struct.pack("<2d", -0.0, -0.1 * 151_643) + struct.pack("<3i", 0, 2, 0)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 1.5])
def test_a_token_that_is_no_int32_names_the_turn(token: int) -> None:
    row = dataclasses.replace(turn_row(SOLVER), prompt_tokens=(1, token))
    with pytest.raises(InvariantError, match="s0/q0/t0/solver/b0/n0: token ids must be int32"):
        pack_turn(row)


def test_each_response_token_has_a_logprob() -> None:
    row = dataclasses.replace(turn_row(SOLVER), logprobs=(-0.1,))
    with pytest.raises(InvariantError, match="s0/q0/t0/solver/b0/n0: 3 response tokens with 1 log-probs"):
        pack_turn(row)


@pytest.mark.parametrize("change", [b"", b"123", b"\x01" * 40])
def test_a_body_of_something_else_is_refused(change: bytes) -> None:
    packed = dataclasses.replace(pack_turn(turn_row(SOLVER)), body=change)
    with pytest.raises(InvariantError, match="bytes are not a packed turn"):
        body_counts(packed)


def test_values_come_back_bit_for_bit() -> None:
    assert unpack_values(pack_values((0.1, -3.0, 1e-300))) == (0.1, -3.0, 1e-300)


# --- whole trajectories -----------------------------------------------------------------------------------------------


def _finished(*rows: TurnRow, **changes: object) -> FinishedTrajectory:
    record = outcome(rows[0].key.trajectory_key, [row.key for row in rows])
    return FinishedTrajectory(
        outcome=dataclasses.replace(record, **changes),  # type: ignore[arg-type]
        turns=rows,
        advantages=tuple(advantage(row.key).advantage for row in rows),
    )


def test_the_reward_of_a_turn_is_its_own_or_that_of_its_agent() -> None:
    rows = (turn_row(SOLVER), turn_row(key(turn=1)), turn_row(CHECKER))
    packed = pack_finished(
        _finished(
            *rows,
            rewards={"solver": 0.25, "checker": 2.0},
            turn_rewards=(TurnReward(key=key(turn=1), reward=-1.0),),
            turn_columns=(TurnColumns(key=CHECKER, values={"level": 3}),),
        )
    )
    assert packed.rewards == (0.25, -1.0, 2.0)
    assert packed.columns == ({}, {}, {"level": 3})
    assert [turn.policy for turn in packed.turns] == [RED, RED, BLUE]


def test_an_outcome_is_written_as_every_record_is() -> None:
    bare = outcome(SOLVER.trajectory_key, [SOLVER])
    full = dataclasses.replace(
        bare,
        turns=(CHECKER, SOLVER),
        success=True,
        metrics={"b": 1.5, "a": 2.0},
        turn_rewards=(TurnReward(key=SOLVER, reward=-1.0),),
        turn_columns=(TurnColumns(key=CHECKER, values={"level": 3}),),
    )
    assert encode_outcome(bare) == encode_record(bare)
    assert encode_outcome(full) == encode_record(full)


def test_g10_a_turn_without_any_reward_names_it_and_the_fix() -> None:
    with pytest.raises(
        ConfigError, match="s0/q0/t0/solver/b0/n0: neither the turn nor its agent 'solver' has a reward"
    ):
        pack_finished(_finished(turn_row(SOLVER), rewards={}))
    with pytest.raises(ConfigError, match="s0/q0/t0: the reward of agent 'solver' is nan"):
        pack_finished(_finished(turn_row(SOLVER), rewards={"solver": float("nan")}))


def test_a_trajectory_is_whole_and_a_first_attempt() -> None:
    whole = _finished(turn_row(SOLVER), turn_row(CHECKER))
    for broken in (
        dataclasses.replace(whole, turns=whole.turns[:1], advantages=(0.5,)),
        dataclasses.replace(whole, advantages=(0.5,)),
        dataclasses.replace(whole, turns=(*whole.turns[:1], whole.turns[0])),
    ):
        with pytest.raises(InvariantError, match=r"s0/q0/t0: \d turns with \d advantages, but its outcome lists"):
            pack_finished(broken)
    with pytest.raises(InvariantError, match="has attempt 0 only"):
        pack_finished(_finished(turn_row(SOLVER, attempt=1)))
    with pytest.raises(InvariantError, match="s0/q0/t0: an advantage of .* is not finite"):
        pack_finished(dataclasses.replace(whole, advantages=(0.5, float("inf"))))
