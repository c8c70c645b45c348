from collections.abc import Iterator

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    advantage,
    counts,
    dispatch,
    key,
    lease_of,
    make_ready,
    open_store,
    outcome,
    put_trajectory,
    ready_keys,
    run,
    seal_record,
    turn_row,
)

from flexmarl.core.errors import CapacityError, FencedError, InvariantError
from flexmarl.core.ids import HolderId
from flexmarl.core.records import Sample
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.unit

NEXT_HOLDER = HolderId("red#1")
KEYS = [key(query=query) for query in range(4)]


@pytest.fixture
def store() -> Iterator[SqliteStore]:
    """Four ready rows of policy red, one per query."""
    opened = open_store()
    run(opened.open_step(dispatch()))
    run(opened.open_step(dispatch(step=1)))
    for sample in KEYS:
        make_ready(opened, sample)
    yield opened
    run(opened.close())


# --- data columns -----------------------------------------------------------------------------------------------------


def test_ready_rows_come_in_key_order_with_prompt_and_response_tokens() -> None:
    store = open_store()
    run(store.open_step(dispatch(num_queries=11)))
    for sample in (key(query=10), key(query=9), key(query=2, agent="solver", turn=1)):
        make_ready(store, sample)
    assert run(store.ready(RED, 0)) == [
        (key(query=2, turn=1), 5),
        (key(query=9), 5),
        (key(query=10), 5),
    ]
    assert run(store.ready(RED, 1)) == []
    assert run(store.ready(BLUE, 0)) == []
    run(store.close())


def test_filling_the_same_values_again_changes_nothing(store: SqliteStore) -> None:
    run(store.fill(RED, [advantage(KEYS[0])]))
    acknowledge(store, *KEYS)
    run(store.fill(RED, [advantage(sample) for sample in KEYS]))
    assert counts(store) == {"acknowledged": 4}


def test_filling_other_values_names_the_key_and_changes_nothing(store: SqliteStore) -> None:
    fresh = key(query=0, step=1)
    put_trajectory(store, [fresh])
    run(store.record_outcome(outcome(fresh.trajectory_key, [fresh])))
    with pytest.raises(InvariantError, match=r"s0/q1/t0/solver/b0/n0: cannot fill \(1\.0, 0\.75\)"):
        run(store.fill(RED, [advantage(fresh), advantage(KEYS[1], 0.75)]))
    assert ready_keys(store, step=1) == []


def test_filling_a_row_that_is_not_there_names_the_key(store: SqliteStore) -> None:
    with pytest.raises(InvariantError, match=r"s0/q9/t0/solver/b0/n0: cannot fill .* the row is None"):
        run(store.fill(RED, [advantage(key(query=9))]))
    with pytest.raises(InvariantError, match="policy 'blue' has no rows; known: red"):
        run(store.fill(BLUE, [advantage(key(agent="checker"))]))
    run(store.fill(BLUE, []))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_is_our_bug(store: SqliteStore, value: float) -> None:
    with pytest.raises(InvariantError, match=f"s0/q0/t0/solver/b0/n0: advantage {value} .* is not finite"):
        run(store.fill(RED, [advantage(KEYS[0], value)]))


def test_masked_rows_take_data_and_stay_masked(store: SqliteStore) -> None:
    fresh = key(query=0, step=1)
    put_trajectory(store, [fresh])
    run(store.mask(RED, [fresh], "truncated"))
    run(store.record_outcome(outcome(fresh.trajectory_key, [fresh])))
    run(store.fill(RED, [advantage(fresh)]))
    assert counts(store, step=1) == {"masked": 1}


def test_masking_takes_ready_rows_out_and_is_repeatable(store: SqliteStore) -> None:
    run(store.mask(RED, KEYS[:2], "group_of_one"))
    run(store.mask(RED, KEYS[:2], "group_of_one"))
    run(store.mask(RED, [], "nothing"))
    assert ready_keys(store) == KEYS[2:]
    with pytest.raises(InvariantError, match="cannot mask with reason 'truncated'"):
        run(store.mask(RED, KEYS[:1], "truncated"))


def test_g2_a_row_that_somebody_trains_is_not_masked(store: SqliteStore) -> None:
    lease_of(store, KEYS[0])
    with pytest.raises(InvariantError, match="s0/q0/t0/solver/b0/n0: cannot mask"):
        run(store.mask(RED, KEYS, "truncated"))
    assert counts(store) == {"leased": 1, "ready": 3}


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_reads_the_rows_in_the_order_asked_for(store: SqliteStore) -> None:
    lease, samples = run(store.lease(RED, HOLDER, "m0", [KEYS[2], KEYS[0]]))
    assert lease.keys == (KEYS[2], KEYS[0])
    assert (lease.policy, lease.holder, lease.micro_batch_id) == (RED, HOLDER, "m0")
    assert samples == [Sample(turn=turn_row(sample), advantage=0.5, reward=1.0) for sample in (KEYS[2], KEYS[0])]
    assert counts(store) == {"leased": 2, "ready": 2}


def test_lease_ids_rise_over_policies_releases_and_rewinds(store: SqliteStore) -> None:
    first = lease_of(store, KEYS[0]).lease_id
    run(store.release(HOLDER))
    second = lease_of(store, KEYS[0]).lease_id
    run(store.rewind(0))
    run(store.open_step(dispatch()))
    make_ready(store, KEYS[0])
    third = lease_of(store, KEYS[0]).lease_id
    assert first < second < third


def test_g2_a_lease_is_all_or_none(store: SqliteStore) -> None:
    lease_of(store, KEYS[1])
    message = r"micro-batch m1: 2 of 3 rows are not ready: s0/q1/t0/solver/b0/n0 is leased; s0/q9.* is not in the store"
    with pytest.raises(CapacityError, match=message):
        lease_of(store, KEYS[0], KEYS[1], key(query=9), micro_batch_id="m1")
    assert counts(store) == {"leased": 1, "ready": 3}
    assert lease_of(store, KEYS[0], micro_batch_id="m1").lease_id == 2


def test_a_leased_row_is_not_leased_twice(store: SqliteStore) -> None:
    lease_of(store, KEYS[0])
    with pytest.raises(CapacityError, match="is leased"):
        lease_of(store, KEYS[0], holder=NEXT_HOLDER)
    with pytest.raises(CapacityError, match="is leased"):
        lease_of(store, KEYS[0], micro_batch_id="m1", holder=NEXT_HOLDER)


def test_a_micro_batch_id_is_used_again_only_after_release(store: SqliteStore) -> None:
    acknowledge(store, KEYS[0])
    with pytest.raises(InvariantError, match="micro-batch m0 of 'red', step 0, has been leased before"):
        lease_of(store, KEYS[1])
    run(store.release(HOLDER))
    assert lease_of(store, KEYS[1]).micro_batch_id == "m0"


@pytest.mark.parametrize("keys", [[], [KEYS[0], KEYS[0]], [KEYS[0], key(step=1)]])
def test_a_lease_is_of_distinct_rows_of_one_step(store: SqliteStore, keys: list[object]) -> None:
    with pytest.raises(InvariantError, match="micro-batch m0: needs distinct rows of one step"):
        run(store.lease(RED, HOLDER, "m0", keys))  # type: ignore[arg-type]


def test_g2_release_returns_unsealed_rows_of_that_holder_only(store: SqliteStore) -> None:
    acknowledge(store, KEYS[0], micro_batch_id="m0")
    run(store.seal(HOLDER, seal_record(1, ["m0"])))
    acknowledge(store, KEYS[1], micro_batch_id="m1")
    lease_of(store, KEYS[2], micro_batch_id="m2")
    lease_of(store, KEYS[3], micro_batch_id="m3", holder=NEXT_HOLDER)
    assert run(store.release(HOLDER)) == [KEYS[1], KEYS[2]]
    assert run(store.release(HOLDER)) == []
    assert counts(store) == {"sealed": 1, "ready": 2, "leased": 1}
    with pytest.raises(InvariantError, match="micro-batch m0 of 'red', step 0, has been leased before"):
        lease_of(store, KEYS[1], micro_batch_id="m0")


def test_g2_a_released_lease_is_fenced_for_good(store: SqliteStore) -> None:
    stale = lease_of(store, KEYS[0])
    run(store.release(HOLDER))
    with pytest.raises(FencedError, match="lease 1 of red#0 on micro-batch m0 has ended"):
        run(store.acknowledge(stale))
    renewed = lease_of(store, KEYS[0], holder=NEXT_HOLDER)
    with pytest.raises(FencedError, match="lease 1 of red#0"):
        run(store.acknowledge(stale))
    assert counts(store) == {"leased": 1, "ready": 3}
    run(store.acknowledge(renewed))
    run(store.acknowledge(renewed))
    assert counts(store) == {"acknowledged": 1, "ready": 3}


# --- seals ------------------------------------------------------------------------------------------------------------


def test_a_seal_becomes_current_and_seals_its_micro_batches(store: SqliteStore) -> None:
    assert run(store.current_seal(RED, 0)) is None
    acknowledge(store, KEYS[0], KEYS[1], micro_batch_id="m0")
    acknowledge(store, KEYS[2], micro_batch_id="m1")
    first = seal_record(1, ["m0"])
    run(store.seal(HOLDER, first))
    run(store.seal(HOLDER, first))
    assert run(store.current_seal(RED, 0)) == first
    assert run(store.current_seal(RED, 1)) is None
    assert counts(store) == {"sealed": 2, "acknowledged": 1, "ready": 1}
    second = seal_record(2, ["m0", "m1"], predecessor=1)
    run(store.seal(HOLDER, second))
    assert run(store.current_seal(RED, 0)) == second
    assert counts(store) == {"sealed": 3, "ready": 1}


def test_g2_a_seal_that_does_not_continue_the_current_one_is_refused(store: SqliteStore) -> None:
    acknowledge(store, KEYS[0], micro_batch_id="m0")
    run(store.seal(HOLDER, seal_record(1, ["m0"])))
    acknowledge(store, KEYS[1], micro_batch_id="m1")
    with pytest.raises(InvariantError, match=r"seal seal/red/2 .* its predecessor is None, the current seal is"):
        run(store.seal(HOLDER, seal_record(2, ["m1"])))
    with pytest.raises(InvariantError, match="its predecessor is seal/red/7"):
        run(store.seal(HOLDER, seal_record(2, ["m0", "m1"], predecessor=7)))
    with pytest.raises(InvariantError, match=r"leaves out \['m0'\] of its predecessor"):
        run(store.seal(HOLDER, seal_record(2, ["m1"], predecessor=1)))
    assert counts(store) == {"sealed": 1, "acknowledged": 1, "ready": 2}


def test_g2_a_seal_of_a_released_micro_batch_is_fenced(store: SqliteStore) -> None:
    acknowledge(store, KEYS[0], micro_batch_id="m0")
    acknowledge(store, KEYS[1], micro_batch_id="m1", holder=NEXT_HOLDER)
    run(store.release(HOLDER))
    with pytest.raises(FencedError, match="red#0 holds no lease on micro-batch m0"):
        run(store.seal(HOLDER, seal_record(1, ["m0"])))
    with pytest.raises(FencedError, match="red#1 holds no lease on micro-batch m0"):
        run(store.seal(NEXT_HOLDER, seal_record(1, ["m1", "m0"])))
    assert counts(store) == {"ready": 3, "acknowledged": 1}
    assert run(store.current_seal(RED, 0)) is None


def test_a_micro_batch_is_sealed_only_when_acknowledged(store: SqliteStore) -> None:
    lease_of(store, KEYS[0])
    with pytest.raises(InvariantError, match="micro-batch m0 is active, not acknowledged"):
        run(store.seal(HOLDER, seal_record(1, ["m0"])))
