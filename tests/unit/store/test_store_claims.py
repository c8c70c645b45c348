"""Claims that wait, holders that are fenced, and further passes over the same samples."""

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    advantage,
    commit,
    commit_record,
    counts,
    dispatch,
    fail_the_rest,
    inline_call,
    key,
    lease_of,
    make_ready,
    open_store,
    outcome,
    ready_keys,
    run,
    run_virtually,
    seal_record,
    turn_row,
)

from flexmarl.core.errors import CapacityError, FencedError, InvariantError
from flexmarl.core.ids import HolderId
from flexmarl.core.protocols import Lease
from flexmarl.core.records import FinishedTrajectory, Sample
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.unit

NEXT_HOLDER = HolderId("red#1")
KEYS = [key(query=query) for query in range(4)]
Claim = Coroutine[Any, Any, tuple[Lease, list[Sample]] | None]


@pytest.fixture
def store() -> Iterator[SqliteStore]:
    """Four ready rows of policy red, one per query."""
    opened = open_store()
    run(opened.open_step(dispatch()))
    for sample in KEYS:
        make_ready(opened, sample)
    yield opened
    run(opened.close())


def claim(
    store: SqliteStore,
    micro_batch_id: str = "m0",
    *,
    max_rows: int = 2,
    timeout_s: float = 0.0,
    holder: HolderId = HOLDER,
) -> Claim:
    return store.claim(RED, 0, holder, micro_batch_id, max_rows=max_rows, timeout_s=timeout_s)


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_takes_the_first_ready_rows_in_key_order(store: SqliteStore) -> None:
    lease_of(store, KEYS[1], micro_batch_id="m9")
    claimed = run(claim(store))
    assert claimed is not None
    lease, samples = claimed
    assert lease.keys == (KEYS[0], KEYS[2])
    assert samples == [Sample(turn=turn_row(sample), advantage=0.5, reward=1.0) for sample in lease.keys]
    run(store.acknowledge(lease))
    rest = run(claim(store, "m1", max_rows=9))
    assert rest is not None
    assert rest[0].keys == (KEYS[3],)
    assert run(claim(store, "m2")) is None
    assert counts(store) == {"leased": 2, "acknowledged": 2}


def test_g2_a_claim_acknowledges_the_lease_before_it_in_one_transaction(store: SqliteStore) -> None:
    def next_claim(micro_batch_id: str, lease: Lease, holder: HolderId = HOLDER) -> tuple[Lease, list[Sample]] | None:
        return run(store.claim(RED, 0, holder, micro_batch_id, max_rows=2, timeout_s=0.0, acknowledging=lease))

    first = run(claim(store))
    assert first is not None
    statements: list[str] = []
    assert store._index is not None
    store._index.connection.set_trace_callback(statements.append)
    second = next_claim("m1", first[0])
    store._index.connection.set_trace_callback(None)
    assert sum(statement.startswith("COMMIT") for statement in statements) == 1
    assert second is not None
    assert counts(store) == {"acknowledged": 2, "leased": 2}
    # Also when there is no row; a second time it changes nothing.
    assert next_claim("m2", second[0]) is None
    assert next_claim("m2", second[0]) is None
    assert counts(store) == {"acknowledged": 4}
    run(store.fence(HOLDER))
    with pytest.raises(FencedError, match="has ended"):
        next_claim("m3", second[0], NEXT_HOLDER)
    assert counts(store) == {"ready": 4}


def test_g2_a_claim_that_fails_acknowledges_nothing(store: SqliteStore) -> None:
    granted = run(claim(store))
    assert granted is not None
    with pytest.raises(InvariantError, match="has been leased before"):
        run(store.claim(RED, 0, HOLDER, "m0", max_rows=1, timeout_s=0.0, acknowledging=granted[0]))
    assert counts(store) == {"leased": 2, "ready": 2}


def test_a_claim_of_a_used_micro_batch_id_or_of_nothing_is_our_bug(store: SqliteStore) -> None:
    run(claim(store))
    with pytest.raises(InvariantError, match="micro-batch m0 of 'red', step 0, has been leased before"):
        run(claim(store))
    with pytest.raises(InvariantError, match="micro-batch m1: claim of 0 rows, expected at least 1"):
        run(claim(store, "m1", max_rows=0))


async def filled_later(store: SqliteStore) -> None:
    await asyncio.sleep(40.0)
    await store.fill(RED, [advantage(KEYS[0])])


async def put_later(store: SqliteStore) -> None:
    await asyncio.sleep(40.0)
    record = outcome(KEYS[1].trajectory_key, [KEYS[1]])
    finished = FinishedTrajectory(outcome=record, turns=(turn_row(KEYS[1]),), advantages=(0.5,))
    await store.put_finished([finished])


async def released_later(store: SqliteStore) -> None:
    await store.fill(RED, [advantage(KEYS[0])])
    await store.lease(RED, NEXT_HOLDER, "m9", [KEYS[0]])
    await asyncio.sleep(40.0)
    await store.release(NEXT_HOLDER)


@pytest.mark.parametrize("make_ready_later", [filled_later, put_later, released_later])
def test_a_claim_wakes_the_moment_that_a_row_is_ready(make_ready_later: Any) -> None:
    async def scenario() -> float:
        store = await SqliteStore.open(None, inline_call)
        await store.open_step(dispatch())
        await store.begin_attempt(KEYS[0].trajectory_key)
        await store.put_turn(turn_row(KEYS[0]))
        await store.record_outcome(outcome(KEYS[0].trajectory_key, [KEYS[0]]))
        later = asyncio.create_task(make_ready_later(store))
        await asyncio.sleep(1.0)
        claimed = await claim(store, timeout_s=60.0)
        assert claimed is not None
        assert len(claimed[1]) == 1
        await later
        now_s = asyncio.get_running_loop().time()
        await store.close()
        return now_s

    assert run_virtually(scenario()) == pytest.approx(40.0)


def test_a_claim_gives_up_at_its_deadline_without_looking_again_and_again() -> None:
    calls = 0

    async def counting_call(function: Any, *args: object, cost_s: float = 0.0) -> Any:
        nonlocal calls
        calls += 1
        return function(*args)

    async def scenario() -> float:
        nonlocal calls
        store = await SqliteStore.open(None, counting_call)
        calls = 0
        assert await claim(store, timeout_s=3600.0) is None
        assert calls == 1
        now_s = asyncio.get_running_loop().time()
        await store.close()
        return now_s

    started_s = time.monotonic()
    assert run_virtually(scenario()) == pytest.approx(3600.0)
    assert time.monotonic() - started_s < 10.0


def test_g2_many_claims_that_wait_share_no_row() -> None:
    async def scenario() -> list[Any]:
        store = await SqliteStore.open(None, inline_call)
        await store.open_step(dispatch(num_queries=6))
        claims = [
            asyncio.create_task(claim(store, f"m{n}", timeout_s=5.0, holder=HolderId(f"h#{n}"))) for n in range(4)
        ]
        await asyncio.sleep(1.0)
        for query in range(5):
            sample = key(query=query)
            record = outcome(sample.trajectory_key, [sample])
            await store.put_finished([FinishedTrajectory(outcome=record, turns=(turn_row(sample),), advantages=(0.5,))])
        claimed = await asyncio.gather(*claims)
        await store.close()
        return claimed

    claimed = [each for each in run_virtually(scenario()) if each is not None]
    keys = [sample for lease, _ in claimed for sample in lease.keys]
    assert len(keys) == len(set(keys)) >= 4


def test_g7_closing_the_store_ends_claims_that_wait() -> None:
    async def scenario() -> None:
        store = await SqliteStore.open(None, inline_call)
        waiting = asyncio.create_task(claim(store, timeout_s=60.0))
        await asyncio.sleep(1.0)
        await store.close()
        with pytest.raises(InvariantError, match="the store was closed before claim"):
            await waiting

    run_virtually(scenario())


# --- fenced holders ---------------------------------------------------------------------------------------------------


def test_g2_a_fenced_holder_gives_its_rows_back_and_nothing_that_it_does_counts(store: SqliteStore) -> None:
    acknowledge(store, KEYS[0], micro_batch_id="m0")
    run(store.seal(HOLDER, seal_record(1, ["m0"])))
    acknowledge(store, KEYS[1], micro_batch_id="m1")
    late = lease_of(store, KEYS[2], micro_batch_id="m2")
    assert run(store.fence(HOLDER)) == [KEYS[1], KEYS[2]]
    assert run(store.fence(HOLDER)) == []
    assert counts(store) == {"sealed": 1, "ready": 3}
    with pytest.raises(FencedError, match="lease 3 of red#0 on micro-batch m2 has ended"):
        run(store.acknowledge(late))
    for act in (
        store.lease(RED, HOLDER, "m3", [KEYS[1]]),
        claim(store, "m3"),
        store.seal(HOLDER, seal_record(2, ["m0"], predecessor=1)),
    ):
        with pytest.raises(FencedError, match="red#0 has been fenced: it was dead, or taken for dead"):
            run(act)
    assert lease_of(store, *KEYS[1:], micro_batch_id="m1", holder=NEXT_HOLDER).holder == NEXT_HOLDER


def test_g7_a_holder_that_is_fenced_while_it_waits_is_told_at_once() -> None:
    async def scenario() -> float:
        store = await SqliteStore.open(None, inline_call)
        waiting = asyncio.create_task(claim(store, timeout_s=60.0))
        await asyncio.sleep(1.0)
        await store.fence(HOLDER)
        with pytest.raises(FencedError, match="red#0 has been fenced"):
            await waiting
        now_s = asyncio.get_running_loop().time()
        await store.close()
        return now_s

    assert run_virtually(scenario()) == pytest.approx(1.0)


def test_g2_a_holder_stays_fenced_when_the_store_is_opened_again(tmp_path: Any) -> None:
    store = open_store(tmp_path)
    run(store.fence(HOLDER))
    run(store.close())
    store = open_store(tmp_path)
    with pytest.raises(FencedError):
        run(claim(store))
    run(store.close())


# --- further passes ---------------------------------------------------------------------------------------------------


def again(store: SqliteStore, *keys: Any, micro_batch_id: str, num_passes: int = 1, holder: HolderId = HOLDER) -> Lease:
    lease, _ = run(store.lease(RED, holder, micro_batch_id, keys, num_passes_done=num_passes))
    run(store.acknowledge(lease))
    return lease


def test_g2_samples_are_used_again_in_other_cuts_and_committed_with_their_number_of_passes(store: SqliteStore) -> None:
    acknowledge(store, KEYS[0], KEYS[1], micro_batch_id="m0")
    acknowledge(store, KEYS[2], KEYS[3], micro_batch_id="m1")
    again(store, KEYS[3], KEYS[0], micro_batch_id="m2")
    record = commit_record({"red": ["m0", "m1", "m2", "m3"]})
    part = dataclasses.replace(record.policies[RED], num_passes=2, update_sizes=(2, 2))
    record = dataclasses.replace(record, policies={RED: part})
    fail_the_rest(store)
    with pytest.raises(InvariantError, match=r"differ in micro-batches \['m3'\]"):
        run(store.commit(record))
    again(store, KEYS[1], KEYS[2], micro_batch_id="m3")
    for changed, message in (
        ({"num_passes": 1}, "s0/q0/t0/solver/b0/n0 was used 2 times, not 1"),
        ({"update_sizes": (4, 1)}, r"update_sizes \(4, 1\) of 4 micro-batches"),
        ({"update_sizes": ()}, r"update_sizes \(\) of 4 micro-batches"),
        ({"micro_batches": ("m0", "m1", "m2", "m3", "m3"), "update_sizes": (5,)}, "differ in micro-batches"),
    ):
        wrong = dataclasses.replace(part, **changed)
        with pytest.raises(InvariantError, match=message):
            run(store.commit(dataclasses.replace(record, policies={RED: wrong})))
    run(store.commit(record))
    assert counts(store) == {"committed": 4}
    in_order = {m: [s.turn.key for s in run(store.micro_batch(RED, 0, m))] for m in ("m0", "m2", "m3")}
    assert in_order == {"m0": KEYS[:2], "m2": [KEYS[3], KEYS[0]], "m3": KEYS[1:3]}


def test_g2_a_commit_in_the_middle_of_a_pass_is_refused(store: SqliteStore) -> None:
    acknowledge(store, *KEYS, micro_batch_id="m0")
    again(store, *KEYS[:3], micro_batch_id="m1")
    record = commit_record({"red": ["m0", "m1"]})
    part = dataclasses.replace(record.policies[RED], num_passes=2)
    with pytest.raises(InvariantError, match="s0/q3/t0/solver/b0/n0 was used 1 times, not 2"):
        commit(store, dataclasses.replace(record, policies={RED: part}))


def test_g2_only_its_holder_uses_a_sample_again_and_only_in_its_turn(store: SqliteStore) -> None:
    acknowledge(store, *KEYS[:2], micro_batch_id="m0")
    message = r"micro-batch m1: 1 of 1 rows are not acknowledged by the holder for 1 passes: .* is acknowledged \(1 p"
    with pytest.raises(CapacityError, match=message):
        again(store, KEYS[0], micro_batch_id="m1", holder=NEXT_HOLDER)
    with pytest.raises(CapacityError, match="for 2 passes"):
        again(store, KEYS[0], micro_batch_id="m1", num_passes=2)
    with pytest.raises(CapacityError, match=r"s0/q2/t0/solver/b0/n0 is ready \(0 passes\)"):
        again(store, KEYS[0], KEYS[2], micro_batch_id="m1")
    with pytest.raises(CapacityError, match="is acknowledged"):
        lease_of(store, KEYS[0], micro_batch_id="m1")
    assert counts(store) == {"acknowledged": 2, "ready": 2}


def test_g2_a_release_undoes_every_pass_of_the_holder(store: SqliteStore) -> None:
    first = acknowledge(store, *KEYS, micro_batch_id="m0")
    again(store, *KEYS[:2], micro_batch_id="m1")
    late, _ = run(store.lease(RED, HOLDER, "m2", KEYS[2:3], num_passes_done=1))
    assert run(store.release(HOLDER)) == KEYS
    assert ready_keys(store) == KEYS
    for lease in (first, late):
        with pytest.raises(FencedError):
            run(store.acknowledge(lease))
    acknowledge(store, *KEYS, micro_batch_id="m0", holder=NEXT_HOLDER)
    commit(store, commit_record({"red": ["m0"]}))


def test_g2_a_cache_in_the_middle_of_several_passes_is_not_sealed(store: SqliteStore) -> None:
    acknowledge(store, *KEYS, micro_batch_id="m0")
    again(store, *KEYS[:2], micro_batch_id="m1")
    with pytest.raises(InvariantError, match="lease 1: 2 of 4 rows could move to sealed"):
        run(store.seal(HOLDER, seal_record(1, ["m0", "m1"])))
    assert counts(store) == {"acknowledged": 4}


def test_a_policy_without_rows_has_nothing_to_claim(store: SqliteStore) -> None:
    assert run(store.claim(BLUE, 0, HOLDER, "m0", max_rows=1, timeout_s=0.0)) is None
