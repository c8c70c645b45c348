"""Scheduling rules: what holds for any input."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.errors import CapacityError
from flexmarl.core.ids import AgentName, InstanceId, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.rng import HashRng
from flexmarl.scheduling import (
    InstanceLoad,
    PolicyDemand,
    ReadySample,
    SlotAction,
    admit_first_come,
    allocate_largest_backlog,
    cut_by_tokens,
    cut_into_updates,
    dispatch_least_loaded,
    taper_tokens,
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
    queries=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=24),
    inter=st.none() | st.integers(1, 4),
    intra=st.none() | st.integers(1, 4),
    data=st.data(),
)
def test_admission_keeps_its_bounds_and_lets_everything_in(
    queries: list[tuple[int, int]], inter: int | None, intra: int | None, data: st.DataObject
) -> None:
    waiting = [TrajectoryKey(step, query, place) for place, (step, query) in enumerate(queries)]
    running: list[TrajectoryKey] = []
    started: list[TrajectoryKey] = []
    while waiting:
        counts = Counter(map(query_of, running))
        admitted = admit_first_come(waiting, num_running=counts, inter_query=inter, intra_query=intra)
        assert [key for key in waiting if key in set(admitted)] == admitted
        for place, key in enumerate(waiting):
            if key not in admitted:
                # First come, first served: only those before it, and those that run, stand in its way.
                before = Counter(
                    query_of(each) for each in (*running, *waiting[:place]) if each in (*running, *admitted)
                )
                is_query_full = intra is not None and before[query_of(key)] >= intra
                is_run_full = inter is not None and before[query_of(key)] == 0 and len(before) >= inter
                assert is_query_full or is_run_full
        running += admitted
        started += admitted
        waiting = [key for key in waiting if key not in admitted]
        counts = Counter(map(query_of, running))
        assert inter is None or len(counts) <= inter
        assert intra is None or max(counts.values(), default=0) <= intra
        assert running, "nothing runs, but something waits"
        running.remove(data.draw(st.sampled_from(running)))
    assert sorted(started) == sorted(TrajectoryKey(step, query, place) for place, (step, query) in enumerate(queries))


def query_of(key: TrajectoryKey) -> tuple[int, int]:
    return key.step, key.query


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


@given(
    max_tokens=st.integers(1, 10_000),
    mean=st.floats(0, 5_000),
    groups=st.lists(st.integers(0, 60), min_size=2, max_size=2).map(sorted),
)
def test_taper_stays_in_its_bounds_and_falls_with_the_open_groups(
    max_tokens: int, mean: float, groups: list[int]
) -> None:
    few, many = groups
    budget = taper_tokens(max_tokens=max_tokens, num_open_groups=few, mean_group_tokens=mean)
    assert max(1, round(max_tokens / 8)) <= budget <= max_tokens
    if few == 0:
        assert budget == max_tokens
    else:
        # Never more than what is expected to come, but for the lower bound.
        assert budget <= max(few * mean + 0.5, round(max_tokens / 8), 1)
        assert budget <= taper_tokens(max_tokens=max_tokens, num_open_groups=many, mean_group_tokens=mean)


@given(
    sizes=st.lists(st.integers(1, 40), max_size=30),
    num_minibatches=st.integers(1, 8),
    max_tokens=st.integers(1, 60),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_g2_a_pass_uses_every_sample_once_in_parts_of_equal_size(
    sizes: list[int], num_minibatches: int, max_tokens: int, seed: int, data: st.DataObject
) -> None:
    samples = [
        ReadySample(key=SampleKey(0, 0, place, AgentName("a"), 0, 0), num_tokens=size)
        for place, size in enumerate(sizes)
    ]
    updates = cut_into_updates(samples, num_minibatches=num_minibatches, max_tokens=max_tokens, rng=HashRng(seed))
    used = [sample.key for batches in updates for batch in batches for sample in batch]
    assert sorted(used) == [sample.key for sample in samples]
    assert len(updates) == min(num_minibatches, len(samples))
    part_sizes = [sum(len(batch) for batch in batches) for batches in updates]
    assert part_sizes == sorted(part_sizes, reverse=True)
    assert max(part_sizes, default=0) - min(part_sizes, default=0) <= 1
    for batches in updates:
        assert cut_by_tokens([sample for batch in batches for sample in batch], max_tokens=max_tokens) == batches
    # The order in which samples became ready does not matter.
    shuffled = data.draw(st.permutations(samples))
    again = cut_into_updates(shuffled, num_minibatches=num_minibatches, max_tokens=max_tokens, rng=HashRng(seed))
    assert again == updates


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
    """A policy of the closed loop: it gets work, holds a slot, works, seals, updates, idles, leaves."""

    name: PolicyName
    has_passes: bool
    """Its samples wait for the end of the step, and are then worked through in one go."""
    samples: int = 0
    scores: int = 0
    must_update: bool = False
    is_unsealed: bool = False
    slot: int | None = None
    busy_for: int = 0
    leaving_for: int = 0
    waiting_since: int = 0
    waits: list[int] = field(default_factory=list)

    def demand(self, now: int, *, is_step_over: bool) -> PolicyDemand:
        may_train = is_step_over or not self.has_passes
        return PolicyDemand(
            policy=self.name,
            num_backlog_tokens=self.scores + (self.samples if may_train else 0),
            is_needed=self.must_update and is_step_over,
            waiting_s=float(now - self.waiting_since) if self.slot is None else 0.0,
            slot=self.slot,
            is_idle=self.slot is not None and self.busy_for == 0 and self.leaving_for == 0,
            is_leaving=self.leaving_for > 0,
        )

    def take(self, tokens: int, now: int, *, is_score: bool) -> None:
        if not self.demand(now, is_step_over=False).wants_slot and self.slot is None:
            self.waiting_since = now
        if is_score:
            self.scores += tokens
        else:
            self.samples += tokens
            self.must_update = True

    def suspend(self) -> None:
        """Seal first, which keeps it busy; when it is asked again, leave."""
        if self.is_unsealed:
            self.is_unsealed = False
            self.busy_for = 1
        else:
            self.leaving_for = 2

    def work(self, now: int, *, is_step_over: bool) -> None:
        """One turn: score, else train, else update."""
        if self.leaving_for:
            self.leaving_for -= 1
            if self.leaving_for == 0:
                self.slot = None
                self.waiting_since = now
        elif self.busy_for:
            self.busy_for -= 1
        elif self.slot is not None and self.scores:
            self.scores = 0
            self.busy_for = 1
        elif self.slot is not None and self.samples and (is_step_over or not self.has_passes):
            self.samples = 0
            self.busy_for = 2 if self.has_passes else 1
            self.is_unsealed = not self.has_passes
            self.must_update = not self.has_passes
        elif self.slot is not None and self.must_update and is_step_over and not self.samples:
            self.busy_for = 1
            self.must_update = self.is_unsealed = False


MAX_ARRIVAL = 50


@given(
    passes=st.lists(st.booleans(), min_size=1, max_size=4),
    num_slots=st.integers(1, 3),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, MAX_ARRIVAL), st.booleans()), max_size=30),
)
def test_g7_in_a_closed_loop_all_work_is_done_and_nobody_starves(
    passes: list[bool], num_slots: int, arrivals: list[tuple[int, int, bool]]
) -> None:
    policies = [ModelPolicy(PolicyName(f"p{number}"), has_passes) for number, has_passes in enumerate(passes)]
    pending = list(arrivals)
    for now in range(20 * len(arrivals) + 40 * len(policies)):
        if pending:
            place, tokens, is_score = pending.pop()
            policies[place % len(policies)].take(tokens, now, is_score=is_score)
        is_step_over = not pending
        if now == max(len(arrivals) - 1, 0):
            for policy in policies:
                if not policy.demand(now, is_step_over=False).wants_slot:
                    policy.waiting_since = now  # only now may it want one
        demands = [policy.demand(now, is_step_over=is_step_over) for policy in policies]
        for decision in allocate_largest_backlog(demands, num_slots=num_slots):
            policy = next(p for p in policies if p.name == decision.policy)
            if decision.action is SlotAction.ACTIVATE:
                assert decision.slot not in [p.slot for p in policies]
                policy.slot = decision.slot
                policy.waits.append(now - policy.waiting_since)
            else:
                policy.suspend()
        for policy in policies:
            policy.work(now, is_step_over=is_step_over)
        if is_step_over and not any(p.samples or p.scores or p.must_update for p in policies):
            break
    assert not any(policy.samples or policy.scores or policy.must_update for policy in policies)
    # A policy works while it holds a slot, then idles, seals (2 turns) and leaves (3): nobody waits longer than all
    # arrivals and some such rounds of every policy take.
    assert max((wait for p in policies for wait in p.waits), default=0) <= 3 * len(arrivals) + 12 * len(policies)
