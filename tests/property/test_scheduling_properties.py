"""Scheduling rules: what holds for any input."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    dispatch_least_loaded,
)

pytestmark = pytest.mark.property


# --- dispatch ---------------------------------------------------------------------------------------------------------


@st.composite
def instance_loads(draw: st.DrawFn) -> list[InstanceLoad]:
    names = draw(st.lists(st.integers(0, 30), unique=True, max_size=8))
    return [
        InstanceLoad(
            instance_id=InstanceId(f"i{name}"),
            policy_version=draw(st.integers(0, 4)),
            num_outstanding_tokens=draw(st.integers(0, 3)),
        )
        for name in names
    ]


@given(loads=instance_loads(), first=st.integers(0, 4), width=st.integers(0, 4), data=st.data())
def test_g8_dispatch_takes_a_least_loaded_instance_within_the_bounds(
    loads: list[InstanceLoad], first: int, width: int, data: st.DataObject
) -> None:
    in_bounds = {load.instance_id: load for load in loads if first <= load.policy_version <= first + width}
    if not in_bounds:
        with pytest.raises(CapacityError):
            dispatch_least_loaded(loads, min_version=first, max_version=first + width)
        return
    chosen = dispatch_least_loaded(loads, min_version=first, max_version=first + width)
    least = min(load.num_outstanding_tokens for load in in_bounds.values())
    assert in_bounds[chosen].num_outstanding_tokens == least
    shuffled = data.draw(st.permutations(loads))
    assert dispatch_least_loaded(shuffled, min_version=first, max_version=first + width) == chosen


# --- admission --------------------------------------------------------------------------------------------------------


@given(
    queries=st.lists(st.integers(0, 5), max_size=24),
    inter=st.none() | st.integers(1, 4),
    intra=st.none() | st.integers(1, 4),
    data=st.data(),
)
def test_admission_keeps_its_bounds_and_lets_everything_in(
    queries: list[int], inter: int | None, intra: int | None, data: st.DataObject
) -> None:
    waiting = [TrajectoryKey(0, query, place) for place, query in enumerate(queries)]
    running: list[TrajectoryKey] = []
    started: list[TrajectoryKey] = []
    while waiting:
        counts = Counter(key.query for key in running)
        admitted = admit_first_come(waiting, num_running=counts, inter_query=inter, intra_query=intra)
        assert [key for key in waiting if key in set(admitted)] == admitted
        for place, key in enumerate(waiting):
            if key not in admitted:
                # First come, first served: only those before it, and those that run, stand in its way.
                before = Counter(each.query for each in (*running, *waiting[:place]) if each in (*running, *admitted))
                is_query_full = intra is not None and before[key.query] >= intra
                is_run_full = inter is not None and before[key.query] == 0 and len(before) >= inter
                assert is_query_full or is_run_full
        running += admitted
        started += admitted
        waiting = [key for key in waiting if key not in admitted]
        counts = Counter(key.query for key in running)
        assert inter is None or len(counts) <= inter
        assert intra is None or max(counts.values(), default=0) <= intra
        assert running, "nothing runs, but something waits"
        running.remove(data.draw(st.sampled_from(running)))
    assert sorted(started) == sorted(TrajectoryKey(0, query, place) for place, query in enumerate(queries))


# --- micro-batches ----------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 40), max_size=30), max_tokens=st.integers(1, 60), data=st.data())
def test_cut_partitions_exactly_within_the_budget(sizes: list[int], max_tokens: int, data: st.DataObject) -> None:
    samples = [
        ReadySample(key=SampleKey(0, 0, place, AgentName("a"), 0, 0), num_tokens=size)
        for place, size in enumerate(sizes)
    ]
    batches = cut_by_tokens(samples, max_tokens=max_tokens)
    assert sorted(sample.key for batch in batches for sample in batch) == [sample.key for sample in samples]
    for batch in batches:
        assert len(batch) == 1 or sum(sample.num_tokens for sample in batch) <= max_tokens
    for batch, following in pairwise(batches):
        # No batch ends before it must.
        assert sum(sample.num_tokens for sample in batch) + following[0].num_tokens > max_tokens
    assert cut_by_tokens(data.draw(st.permutations(samples)), max_tokens=max_tokens) == batches


# --- allocation -------------------------------------------------------------------------------------------------------


@st.composite
def demand_lists(draw: st.DrawFn) -> tuple[list[PolicyDemand], int]:
    num_slots = draw(st.integers(1, 3))
    slots = draw(st.permutations([*range(num_slots), *[None] * draw(st.integers(0, 4))]))
    demands = []
    for place, slot in enumerate(slots):
        state = draw(st.sampled_from(["idle", "busy", "leaving"]))
        demands.append(
            PolicyDemand(
                policy=PolicyName(f"p{place}"),
                num_backlog_tokens=draw(st.integers(0, 3)) * 100,
                is_needed=draw(st.booleans()),
                waiting_s=draw(st.floats(0, 10)),
                slot=slot,
                is_idle=slot is not None and state == "idle",
                is_leaving=slot is not None and state == "leaving",
            )
        )
    keep = draw(st.lists(st.booleans(), min_size=len(demands), max_size=len(demands)))
    return [demand for demand, is_kept in zip(demands, keep, strict=True) if is_kept], num_slots


@given(case=demand_lists(), data=st.data())
def test_allocation_gives_a_slot_to_one_policy_and_suspends_only_the_idle(
    case: tuple[list[PolicyDemand], int], data: st.DataObject
) -> None:
    demands, num_slots = case
    decisions = allocate_largest_backlog(demands, num_slots=num_slots)
    by_policy = {demand.policy: demand for demand in demands}
    held = [demand.slot for demand in demands if demand.slot is not None]
    activated = [decision for decision in decisions if decision.action is SlotAction.ACTIVATE]
    suspended = [decision for decision in decisions if decision.action is SlotAction.SUSPEND]
    assert len({decision.policy for decision in decisions}) == len(decisions)
    slots = held + [decision.slot for decision in activated]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(num_slots))
    for decision in activated:
        demand = by_policy[decision.policy]
        assert demand.slot is None
        assert demand.num_backlog_tokens > 0 or demand.is_needed
    for decision in suspended:
        demand = by_policy[decision.policy]
        assert demand.slot == decision.slot
        assert demand.is_idle
        assert demand.num_backlog_tokens == 0
        assert not demand.is_needed
    num_waiting = sum(demand.slot is None and (demand.num_backlog_tokens > 0 or demand.is_needed) for demand in demands)
    assert len(activated) == min(num_waiting, num_slots - len(held))
    num_leaving = sum(demand.is_leaving for demand in demands)
    assert len(suspended) <= max(0, num_waiting - len(activated) - num_leaving)
    assert allocate_largest_backlog(data.draw(st.permutations(demands)), num_slots=num_slots) == decisions


@dataclass
class ModelPolicy:
    """A policy of the closed loop: it gets work, holds a slot, works, idles, leaves."""

    name: PolicyName
    backlog: int = 0
    slot: int | None = None
    busy_for: int = 0
    leaving_for: int = 0
    waiting_since: int = 0
    waits: list[int] = field(default_factory=list)

    def demand(self, now: int) -> PolicyDemand:
        return PolicyDemand(
            policy=self.name,
            num_backlog_tokens=self.backlog,
            is_needed=False,
            waiting_s=float(now - self.waiting_since) if self.slot is None else 0.0,
            slot=self.slot,
            is_idle=self.slot is not None and self.busy_for == 0 and self.leaving_for == 0,
            is_leaving=self.leaving_for > 0,
        )


MAX_ARRIVAL = 50


@given(
    num_policies=st.integers(1, 4),
    num_slots=st.integers(1, 3),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, MAX_ARRIVAL)), max_size=30),
)
def test_g7_in_a_closed_loop_all_work_is_done_and_nobody_starves(
    num_policies: int, num_slots: int, arrivals: list[tuple[int, int]]
) -> None:
    policies = [ModelPolicy(PolicyName(f"p{number}")) for number in range(num_policies)]
    pending = list(arrivals)
    last = len(arrivals)
    for now in range(20 * len(arrivals) + 20 * num_policies):
        if pending:
            place, tokens = pending.pop()
            policy = policies[place % num_policies]
            if policy.backlog == 0 and policy.slot is None:
                policy.waiting_since = now
            policy.backlog += tokens
        for decision in allocate_largest_backlog([p.demand(now) for p in policies], num_slots=num_slots):
            policy = next(p for p in policies if p.name == decision.policy)
            if decision.action is SlotAction.ACTIVATE:
                assert decision.slot not in [p.slot for p in policies]
                policy.slot = decision.slot
                policy.waits.append(now - policy.waiting_since)
            else:
                policy.leaving_for = 2
        for policy in policies:
            _advance(policy, now)
        if not pending and not any(p.backlog for p in policies):
            break
    assert not any(policy.backlog for policy in policies)
    # A policy works off its backlog while it holds a slot (2 turns), then idles and leaves (3): nobody waits longer
    # than all arrivals and one such round of every policy take.
    assert max((wait for p in policies for wait in p.waits), default=0) <= 3 * last + 6 * num_policies


def _advance(policy: ModelPolicy, now: int) -> None:
    if policy.leaving_for:
        policy.leaving_for -= 1
        if policy.leaving_for == 0:
            policy.slot = None
            policy.waiting_since = now
    elif policy.busy_for:
        policy.busy_for -= 1
    elif policy.slot is not None and policy.backlog:
        policy.backlog = 0
        policy.busy_for = 1
