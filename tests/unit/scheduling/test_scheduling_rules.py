"""Scheduling rules, against cases worked by hand."""

from collections.abc import MutableSequence
from typing import Any

import pytest

from flexmarl.core.errors import CapacityError
from flexmarl.core.ids import AgentName, InstanceId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.scheduling import (
    InstanceLoad,
    PolicyDemand,
    ReadySample,
    SlotAction,
    admit_first_come,
    allocate_largest_backlog,
    cut_by_tokens,
    cut_in_order,
    cut_into_updates,
    dispatch_least_loaded,
    taper_tokens,
)

pytestmark = pytest.mark.unit


def load(name: str, version: int, num_tokens: int) -> InstanceLoad:
    return InstanceLoad(instance_id=InstanceId(name), policy_version=version, num_outstanding_tokens=num_tokens)


def key(query: int, trajectory: int) -> TrajectoryKey:
    return TrajectoryKey(0, query, trajectory)


def ready(trajectory: int, num_tokens: int) -> ReadySample:
    return ReadySample(key=SampleKey(0, 0, trajectory, AgentName("a"), 0, 0), num_tokens=num_tokens)


def demand(
    policy: str,
    *,
    tokens: int = 0,
    is_needed: bool = False,
    waiting_s: float = 0.0,
    slot: int | None = None,
    is_idle: bool = False,
    is_leaving: bool = False,
) -> PolicyDemand:
    return PolicyDemand(
        policy=PolicyName(policy),
        num_backlog_tokens=tokens,
        is_needed=is_needed,
        waiting_s=waiting_s,
        slot=slot,
        is_idle=is_idle,
        is_leaving=is_leaving,
    )


def decided(*demands: PolicyDemand, num_slots: int, ageing: float = 1000.0) -> list[tuple[str, int, str]]:
    decisions = allocate_largest_backlog(demands, num_slots=num_slots, ageing_tokens_per_s=ageing)
    return [(decision.policy, decision.slot, decision.action.value) for decision in decisions]


# --- dispatch ---------------------------------------------------------------------------------------------------------


def test_dispatch_takes_the_least_loaded_of_those_that_serve_the_version() -> None:
    loads = [load("c", 3, 10), load("a", 2, 0), load("b", 3, 9), load("d", 4, 0)]
    assert dispatch_least_loaded(loads, min_version=3, max_version=3) == "b"
    assert dispatch_least_loaded(loads, min_version=2, max_version=3) == "a"
    assert dispatch_least_loaded(loads, min_version=4, max_version=9) == "d"


def test_dispatch_breaks_ties_by_the_smallest_id() -> None:
    assert dispatch_least_loaded([load("z", 1, 5), load("m", 1, 5)], min_version=1, max_version=1) == "m"


def test_dispatch_says_that_no_instance_serves_the_version() -> None:
    with pytest.raises(CapacityError, match=r"0 of 2 instances serve a policy_version in \[5, 6\]"):
        dispatch_least_loaded([load("a", 4, 0), load("b", 7, 0)], min_version=5, max_version=6)
    with pytest.raises(CapacityError, match="0 of 0 instances"):
        dispatch_least_loaded([], min_version=0, max_version=0)


# --- admission --------------------------------------------------------------------------------------------------------

WAITING = [key(query, trajectory) for query in (7, 3) for trajectory in range(3)]


@pytest.mark.parametrize(
    ("running", "inter", "intra", "expected"),
    [
        ({}, None, None, WAITING),
        ({}, 1, None, WAITING[:3]),
        ({}, None, 2, [WAITING[0], WAITING[1], WAITING[3], WAITING[4]]),
        ({}, 1, 1, WAITING[:1]),
        ({(0, 3): 1}, 1, None, WAITING[3:]),
        ({(0, 3): 1}, 1, 2, WAITING[3:4]),
        ({(0, 3): 2}, 2, 2, WAITING[:2]),
        ({(0, 9): 1}, 1, None, []),
        ({(0, 9): 0}, 1, None, WAITING[:3]),
        ({(1, 3): 1}, 1, None, []),
        ({(1, 3): 2}, None, 2, [WAITING[0], WAITING[1], WAITING[3], WAITING[4]]),
    ],
)
def test_admission_by_hand(
    running: dict[tuple[int, int], int], inter: int | None, intra: int | None, expected: list[TrajectoryKey]
) -> None:
    assert admit_first_come(WAITING, num_running=running, inter_query=inter, intra_query=intra) == expected


# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_cut_is_ascending_and_stays_within_the_budget() -> None:
    samples = [ready(0, 30), ready(1, 10), ready(2, 20), ready(3, 10), ready(4, 101), ready(5, 70)]
    batches = cut_by_tokens(samples, max_tokens=100)
    # 10 + 10 + 20 + 30 = 70, the next 70 would make 140; 101 is alone whatever the budget.
    assert [[sample.key.trajectory for sample in batch] for batch in batches] == [[1, 3, 2, 0], [5], [4]]


def test_cut_fills_the_budget_exactly() -> None:
    batches = cut_by_tokens([ready(n, 5) for n in range(4)], max_tokens=10)
    assert [len(batch) for batch in batches] == [2, 2]
    assert cut_by_tokens([], max_tokens=10) == []


def test_cut_in_order_keeps_the_order() -> None:
    batches = cut_in_order([ready(0, 30), ready(1, 10), ready(2, 70), ready(3, 5)], max_tokens=80)
    assert [[sample.key.trajectory for sample in batch] for batch in batches] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("num_open", "mean", "expected"),
    [
        (0, 0.0, 800),
        (0, 50.0, 800),
        (16, 100.0, 800),
        (8, 100.0, 800),
        (7, 100.0, 700),
        (3, 100.4, 301),
        (1, 100.0, 100),
        (1, 99.0, 100),
        (5, 0.0, 100),
    ],
)
def test_taper_by_hand(num_open: int, mean: float, expected: int) -> None:
    # Never above 800, nor below 800 / 8 = 100; nothing open: all.
    assert taper_tokens(max_tokens=800, num_open_groups=num_open, mean_group_tokens=mean) == expected
    assert taper_tokens(max_tokens=1, num_open_groups=num_open, mean_group_tokens=mean) == 1


class Reversing:
    """Randomness that reverses what it shuffles."""

    def random(self) -> float:
        raise NotImplementedError

    def below(self, limit: int) -> int:
        raise NotImplementedError

    def shuffle(self, items: MutableSequence[Any]) -> None:
        items.reverse()


def test_updates_are_equal_parts_of_a_shuffle_cut_by_tokens() -> None:
    samples = [ready(n, 10 * (n + 1)) for n in (2, 0, 1, 4, 3)]
    updates = cut_into_updates(samples, num_minibatches=2, max_tokens=80, rng=Reversing())
    # 4, 3, 2 | 1, 0; in the first part 30 + 40 tokens fit together, then 50; in the second all.
    found = [[[sample.key.trajectory for sample in batch] for batch in batches] for batches in updates]
    assert found == [[[2, 3], [4]], [[0, 1]]]


def test_fewer_samples_than_parts_make_fewer_updates() -> None:
    updates = cut_into_updates([ready(0, 1), ready(1, 1)], num_minibatches=5, max_tokens=9, rng=Reversing())
    assert [[len(batch) for batch in batches] for batches in updates] == [[1], [1]]
    assert cut_into_updates([], num_minibatches=5, max_tokens=9, rng=Reversing()) == []


# --- allocation -------------------------------------------------------------------------------------------------------


def test_free_slots_go_to_the_largest_backlogs() -> None:
    demands = [demand("a", tokens=10), demand("b", tokens=30), demand("c", tokens=20)]
    assert decided(*demands, num_slots=2) == [("b", 0, "activate"), ("c", 1, "activate")]


def test_waiting_counts_as_backlog() -> None:
    # 5 + 1000 * 0.1 = 105 against 104 + 0.
    demands = [demand("a", tokens=104), demand("b", tokens=5, waiting_s=0.1)]
    assert decided(*demands, num_slots=1) == [("b", 0, "activate")]
    assert decided(*demands, num_slots=1, ageing=900.0) == [("a", 0, "activate")]


def test_a_policy_without_backlog_takes_a_slot_only_if_it_is_needed() -> None:
    assert decided(demand("a"), num_slots=1) == []
    assert decided(demand("a", is_needed=True), num_slots=1) == [("a", 0, "activate")]


def test_an_idle_holder_leaves_only_for_somebody_that_waits() -> None:
    idle = demand("a", slot=0, is_idle=True)
    assert decided(idle, num_slots=1) == []
    assert decided(idle, demand("b", tokens=1), num_slots=1) == [("a", 0, "suspend")]
    assert decided(idle, demand("b", tokens=1), num_slots=2) == [("b", 1, "activate")]


@pytest.mark.parametrize(
    "holder",
    [
        demand("a", slot=0),
        demand("a", slot=0, is_idle=True, tokens=1),
        demand("a", slot=0, is_idle=True, is_needed=True),
    ],
)
def test_a_holder_with_work_stays(holder: PolicyDemand) -> None:
    assert decided(holder, demand("b", tokens=10**9, waiting_s=10**6), num_slots=1) == []


def test_a_slot_that_is_being_left_satisfies_one_that_waits() -> None:
    leaving = demand("a", slot=0, is_leaving=True)
    idle = demand("b", slot=1, is_idle=True)
    assert decided(leaving, idle, demand("c", tokens=1), num_slots=2) == []
    assert decided(leaving, idle, demand("c", tokens=1), demand("d", tokens=1), num_slots=2) == [("b", 1, "suspend")]


def test_no_more_leave_than_wait() -> None:
    idle = [demand(name, slot=slot, is_idle=True) for slot, name in enumerate("abc")]
    assert decided(*idle, demand("d", tokens=1), num_slots=3) == [("a", 0, "suspend")]


def test_reasons_are_given() -> None:
    activate = allocate_largest_backlog([demand("a", tokens=12)], num_slots=1)[0]
    assert (activate.action, activate.reason) == (SlotAction.ACTIVATE, "backlog 12")
    idle = [demand("a", slot=0, is_idle=True), demand("b", tokens=1)]
    assert allocate_largest_backlog(idle, num_slots=1)[0].reason == "idle while others wait"
