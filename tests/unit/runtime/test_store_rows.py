"""Rows keep their content on the store's socket, and what is no row is refused by its type."""

from collections.abc import Mapping
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import AgentName, HolderId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import Lease
from flexmarl.core.records import FinishReason, Sample, TokenColumn, TurnRow, VersionSpan
from flexmarl.runtime.local.store_rows import (
    decode_granted,
    decode_trajectories,
    decode_trajectory,
    encode_granted,
    encode_trajectory,
)
from flexmarl.store import PackedBatch, PackedTrajectory, pack_turn
from flexmarl.store.packing import pack_values

pytestmark = pytest.mark.unit

POLICY = PolicyName("red")
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**40)
names = st.text(max_size=8)


@st.composite
def turns(draw: st.DrawFn) -> TurnRow:
    response = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
    return TurnRow(
        key=SampleKey(draw(counts), draw(counts), draw(counts), AgentName(draw(names)), draw(counts), draw(counts)),
        attempt=draw(counts),
        policy=POLICY,
        policy_version=draw(counts),
        weights_version=draw(counts),
        prompt_tokens=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))),
        response_tokens=tuple(response),
        logprobs=tuple(draw(st.lists(finite, min_size=len(response), max_size=len(response)))),
        temperature=draw(finite),
        finish_reason=draw(st.sampled_from(FinishReason)),
        version_spans=(VersionSpan(start=0, end=len(response), policy_version=draw(st.integers(0, 2**31 - 1))),),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> PackedTrajectory:
    rows = draw(st.lists(turns(), max_size=3))
    num_rows = len(rows)
    values = st.dictionaries(
        names, st.one_of(st.integers(-(2**63), 2**63 - 1), finite, st.booleans(), names), max_size=2
    )
    return PackedTrajectory(
        trajectory=TrajectoryKey(draw(counts), draw(counts), draw(counts)),
        record=draw(st.text()),
        turns=tuple(map(pack_turn, rows)),
        rewards=tuple(draw(st.lists(finite, min_size=num_rows, max_size=num_rows))),
        advantages=tuple(draw(st.lists(finite, min_size=num_rows, max_size=num_rows))),
        columns=tuple(draw(st.lists(values, min_size=num_rows, max_size=num_rows))),
    )


def sent(plain: object) -> object:
    """Return plain data as it arrives at the other end."""
    received: object = msgpack.unpackb(
        msgpack.packb(plain, unicode_errors="surrogatepass"), unicode_errors="surrogatepass", strict_map_key=False
    )
    return received


@given(packed=trajectories())
def test_a_trajectory_arrives_as_it_was_sent(packed: PackedTrajectory) -> None:
    assert decode_trajectory(sent(encode_trajectory(packed))) == packed


@given(rows=st.lists(turns(), max_size=3), numbers=st.tuples(finite, finite), tokens=st.lists(finite, max_size=3))
def test_a_lease_arrives_as_it_was_sent(rows: list[TurnRow], numbers: tuple[float, float], tokens: list[float]) -> None:
    columns = {TokenColumn.OLD_LOGPROBS: tuple(tokens)}
    samples = [Sample(turn=row, advantage=numbers[0], reward=numbers[1], token_columns=columns) for row in rows]
    batch = batch_of(rows, numbers, {TokenColumn.OLD_LOGPROBS: [pack_values(tokens)] * len(rows)})
    lease = Lease(
        lease_id=7,
        policy=POLICY,
        holder=HolderId("red#0"),
        micro_batch_id="m0",
        keys=tuple(row.key for row in rows),
    )
    granted = decode_granted(sent(encode_granted((replace(lease, keys=()), batch))))
    assert granted is not None
    assert (granted[0], granted[1].samples()) == (lease, samples)
    for number, row in enumerate(rows):
        assert tuple(granted[1].prompt_tokens(number)) == row.prompt_tokens
        assert tuple(granted[1].response_tokens(number)) == row.response_tokens
        assert tuple(granted[1].logprobs(number)) == row.logprobs
        assert (granted[1].advantage(number), granted[1].reward(number)) == numbers
    assert decode_granted(sent(encode_granted(None))) is None


def batch_of(
    rows: list[TurnRow], numbers: tuple[float, float], token_columns: Mapping[TokenColumn, list[bytes | None]]
) -> PackedBatch:
    """Return rows with bytes of something else before each body."""
    content, packed = b"", []
    for row in rows:
        begin, turn = len(content) + 3, pack_turn(row)
        content += b"\xff\xff\xff" + turn.body
        key = row.key
        packed.append(
            (
                *(key.step, key.query, key.trajectory, key.agent, key.branch, key.turn),
                *(row.attempt, row.policy_version, row.weights_version, row.temperature, row.finish_reason.value),
                *(*numbers, begin, len(content)),
            )
        )
    return PackedBatch(policy=POLICY, rows=packed, content=content, token_columns=token_columns)


GOOD_TURN = [0, 1, 2, "solver", 0, 0, 0, "red", 0, 0, 1.0, "stop", b"\0" * 12]
GOOD = [0, 1, 2, "{}", [GOOD_TURN], [1.0], [0.5], [{}]]


def changed(plain: list[object], place: int, value: object) -> list[object]:
    return [*plain[:place], value, *plain[place + 1 :]]


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (None, "trajectory is"),
        ([], "trajectory is"),
        (changed(GOOD, 0, True), "trajectory is"),
        (changed(GOOD, 3, b"{}"), "trajectory is"),
        (changed(GOOD, 4, [None]), "turn is"),
        (changed(GOOD, 4, [changed(GOOD_TURN, 12, "text")]), "turn is"),
        (changed(GOOD, 4, [changed(GOOD_TURN, 10, 1)]), "turn is"),
        (changed(GOOD, 4, [changed(GOOD_TURN, 11, "bored")]), "bored.*stop, length"),
        (changed(GOOD, 5, []), "rewards.*expected 1 of float"),
        (changed(GOOD, 6, ["high"]), "advantages.*expected 1 of float"),
        (changed(GOOD, 7, [[]]), "columns.*expected 1 of dict"),
    ],
)
def test_g10_what_is_no_trajectory_is_refused(plain: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decode_trajectory(plain)


@pytest.mark.parametrize("plain", [None, [], [GOOD], {"trajectories": []}, [[], []]])
def test_g10_what_is_no_list_of_trajectories_is_refused(plain: object) -> None:
    with pytest.raises(ConfigError):
        decode_trajectories(plain)
