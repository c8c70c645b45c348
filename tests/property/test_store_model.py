"""The store against a model that is a dict of rows: any order of calls, deaths and stalls of holders and of the owner.

Longer than a module should be: a state machine is one class.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flexmarl.core.errors import CapacityError, ConfigError, FencedError, FlexMARLError, InvariantError, StoreError
from flexmarl.core.ids import AgentName, HolderId, ObjectKey, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, Lease, PolicyColumns
from flexmarl.core.records import (
    CommitRecord,
    Denominators,
    DispatchRecord,
    FinishedTrajectory,
    FinishReason,
    OutcomeRecord,
    PolicyCommit,
    Sample,
    Seal,
    StepExtension,
    TokenColumn,
    TokenValues,
    TrajectoryFailure,
    TurnColumns,
    TurnRow,
    VersionSpan,
)
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.property

T = TypeVar("T")

RED, BLUE = POLICIES = (PolicyName("red"), PolicyName("blue"))
POLICY_OF = {AgentName("solver"): RED, AgentName("checker"): BLUE, AgentName("critic"): BLUE}
COLUMNS = {
    RED: PolicyColumns(scalars={"level": "int"}, required=frozenset({"level"})),
    BLUE: PolicyColumns(required=frozenset({TokenColumn.OLD_LOGPROBS})),
}
NUM_QUERIES = 2
NUM_TRAJECTORIES = 2
TRAJECTORIES = [(query, trajectory) for query in range(NUM_QUERIES) for trajectory in range(NUM_TRAJECTORIES + 1)]
"""The last of each query is dispatched by an extension only."""
SEGMENT_BYTES = 600
"""A few turns: the log has several segments."""
FILLED = (0.5, 1.0)
"""Advantage and reward; `put_finished` gives the same."""
SCORES = (-0.25, -4.0)

trajectories = st.sampled_from(TRAJECTORIES)
agents = st.sampled_from(sorted(POLICY_OF))
turns = st.integers(0, 1)
policies = st.sampled_from(POLICIES)
slots = st.integers(0, 1)
picks = st.sets(st.integers(0, 7), min_size=1)


async def inline_call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    return function(*args)


@dataclass(kw_only=True)
class Row:
    """What the model knows of a row."""

    row: TurnRow
    status: str = "partial"
    is_filled: bool = False
    is_scored: bool = False
    has_outcome: bool = False
    lease_id: int | None = None
    num_passes: int = 0

    def complete(self) -> bool:
        """Become ready when nothing is missing; return whether it just did."""
        is_complete = self.is_filled and self.has_outcome and (self.is_scored or self.row.policy == RED)
        if self.status == "partial" and is_complete:
            self.status = "ready"
            return True
        return False

    def sample(self) -> Sample:
        tokens = {TokenColumn.OLD_LOGPROBS: SCORES} if self.is_scored else {}
        return Sample(turn=self.row, advantage=FILLED[0], reward=FILLED[1], token_columns=tokens)


@dataclass(kw_only=True)
class Work:
    """A lease of the model."""

    lease: Lease
    status: str = "active"


@dataclass(kw_only=True)
class Committed:
    """A committed step of the model."""

    record: CommitRecord
    trained: dict[PolicyName, list[SampleKey]]
    micro_batches: dict[tuple[PolicyName, str], list[Sample]] = field(default_factory=dict)
    """In the order in which they were trained."""


def turn_row(key: SampleKey, attempt: int, content: int, *, version_offset: int = 0) -> TurnRow:
    version = key.step + version_offset
    return TurnRow(
        key=key,
        attempt=attempt,
        policy=POLICY_OF[key.agent],
        policy_version=max(version, 0),
        weights_version=0,
        prompt_tokens=(1,),
        response_tokens=(attempt, content),
        logprobs=(-0.5, -float(content)),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=2, policy_version=version),),
    )


class StoreMachine(RuleBasedStateMachine):
    """Rules call store and model with the same arguments, legal or not, and compare."""

    @initialize(is_warm=st.sampled_from((True, True, True, False)))
    def start(self, is_warm: bool) -> None:
        """A warm machine begins each step with rows that are ready, so that more of its rules find something to do."""
        self.is_warm = is_warm
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.loop = asyncio.new_event_loop()
        self.open_store()
        self.step = -1
        self.num_seals = 0
        self.num_micro_batches = 0
        self.newest_lease_id = 0
        self.pruned_version = 0
        self.committed: dict[int, Committed] = {}
        self.incarnations = [0, 0]
        self.fenced: list[HolderId] = []
        """Holders that stalled: they are taken for dead, and come back."""
        self.stale_leases: list[Lease] = []
        """What they think that they hold."""
        self.next_step()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def open_store(self) -> None:
        self.store = self.run(SqliteStore.open(self.folder, inline_call, COLUMNS))
        assert self.store._index is not None
        self.store._index.payload._segment_bytes = SEGMENT_BYTES

    def next_step(self) -> None:
        self.step += 1
        self.rows: dict[tuple[SampleKey, int], Row] = {}
        self.attempts: dict[TrajectoryKey, int] = {}
        self.ended: dict[TrajectoryKey, OutcomeRecord | TrajectoryFailure] = {}
        self.extended: set[int] = set()
        self.leases: list[Work] = []
        self.caches: dict[HolderId, dict[PolicyName, list[SampleKey]]] = {}
        """Gradient caches: rows in the memory of each holder, once per pass."""
        self.seals: dict[PolicyName, tuple[Seal, list[SampleKey]]] = {}
        """Current seal of each policy with the rows in it."""
        dispatch = DispatchRecord(
            step=self.step,
            min_version=self.step,
            max_version=self.step,
            queries=tuple(range(NUM_QUERIES)),
            num_trajectories=NUM_TRAJECTORIES,
        )
        self.run(self.store.open_step(dispatch))
        if self.is_warm:
            self.put_finished({(0, 0), (1, 1)}, {(agent, turn) for agent in POLICY_OF for turn in range(2)}, 0)
            self.fill_all(BLUE)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
            self.loop.close()
            shutil.rmtree(self.folder)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def expect(self, coroutine: Coroutine[Any, Any, T], error: type[FlexMARLError] | None) -> T | None:
        """Run a call that must succeed, or raise exactly `error`."""
        if error is None:
            return self.run(coroutine)
        with pytest.raises(FlexMARLError) as caught:
            self.run(coroutine)
        assert type(caught.value) is error, caught.value
        return None

    def holder(self, slot: int) -> HolderId:
        return HolderId(f"h{slot}#{self.incarnations[slot]}")

    def live(self, key: SampleKey) -> Row:
        return self.rows[key, self.attempts[key.trajectory_key]]

    def live_rows(self, policy: PolicyName, *statuses: str) -> list[Row]:
        found = [row for (key, attempt), row in self.rows.items() if self.attempts[key.trajectory_key] == attempt]
        found = [row for row in found if row.row.policy == policy and row.status in (statuses or (row.status,))]
        return sorted(found, key=lambda row: row.row.key)

    def rows_of(self, key: TrajectoryKey, attempt: int) -> list[Row]:
        return [
            row for (sample, number), row in self.rows.items() if sample.trajectory_key == key and number == attempt
        ]

    def key_of(self, trajectory: tuple[int, int], agent: AgentName, turn: int) -> SampleKey:
        return SampleKey(self.step, *trajectory, agent, 0, turn)

    def is_dispatched(self, key: TrajectoryKey) -> bool:
        return key.trajectory < NUM_TRAJECTORIES or key.query in self.extended

    def attempt_error(self, key: TrajectoryKey, attempt: int) -> type[FlexMARLError] | None:
        newest = self.attempts.get(key, -1)
        if attempt > newest:
            return InvariantError
        return FencedError if attempt < newest else None

    @staticmethod
    def pick(rows: Sequence[Row], wanted: set[int]) -> list[Row]:
        return [row for number, row in enumerate(rows) if number in wanted]

    # --- trajectories -------------------------------------------------------------------------------------------------

    @rule(query=st.integers(0, NUM_QUERIES), first=st.sampled_from((NUM_TRAJECTORIES,) * 3 + (NUM_TRAJECTORIES - 1,)))
    def extend(self, query: int, first: int) -> None:
        record = StepExtension(step=self.step, query=query, first_trajectory=first, num_trajectories=1)
        is_legal = query < NUM_QUERIES and first == NUM_TRAJECTORIES
        self.expect(self.store.extend_step(record), None if is_legal else InvariantError)
        if is_legal:
            self.extended.add(query)

    @rule(trajectory=trajectories)
    def begin_attempt(self, trajectory: tuple[int, int]) -> None:
        key = TrajectoryKey(self.step, *trajectory)
        is_legal = key not in self.ended and self.is_dispatched(key)
        attempt = self.expect(self.store.begin_attempt(key), None if is_legal else InvariantError)
        if attempt is None:
            return
        assert attempt == self.attempts.get(key, -1) + 1
        self.attempts[key] = attempt
        for (sample, _), row in self.rows.items():
            if sample.trajectory_key == key:
                row.status = "superseded"

    @rule(
        trajectory=trajectories,
        agent=agents,
        turn=turns,
        age=st.sampled_from((0, 0, 0, 0, 1, -1)),
        content=st.integers(0, 1),
        version_offset=st.sampled_from((0, 0, 0, 0, 0, 1, -1)),
    )
    def put_turn(
        self, trajectory: tuple[int, int], agent: AgentName, turn: int, age: int, content: int, version_offset: int
    ) -> None:
        key = self.key_of(trajectory, agent, turn)
        attempt = max(self.attempts.get(key.trajectory_key, -1) - age, 0)
        row = turn_row(key, attempt, content, version_offset=version_offset)
        error = self.attempt_error(key.trajectory_key, attempt)
        stored = self.rows.get((key, attempt))
        if error is None and stored is not None:
            error = None if stored.row == row else InvariantError
        elif error is None and key.trajectory_key in self.ended:
            error = FencedError
        elif error is None and version_offset != 0:
            error = InvariantError
        self.expect(self.store.put_turn(row), error)
        if error is None and stored is None:
            self.rows[key, attempt] = Row(row=row)

    @rule(
        trajectory=trajectories,
        age=st.sampled_from((0, 0, 0, 1)),
        fault=st.sampled_from(("", "", "", "absent", "unheard", "no column")),
    )
    def record_outcome(self, trajectory: tuple[int, int], age: int, fault: str) -> None:
        key = TrajectoryKey(self.step, *trajectory)
        attempt = max(self.attempts.get(key, -1) - age, 0)
        held = sorted(row.row.key for row in self.rows_of(key, attempt))
        listed = list(held)
        if fault == "absent":
            listed.append(SampleKey(self.step, *trajectory, AgentName("solver"), 9, 0))
        unheard = [listed.pop()] if fault == "unheard" and listed else []
        record = self.outcome(key, attempt, listed, with_columns=fault != "no column")
        error = self.attempt_error(key, attempt)
        is_repeat = self.ended.get(key) == record
        if error is None and not is_repeat:
            if key in self.ended or fault == "absent":
                error = InvariantError
            elif fault == "no column" and any(POLICY_OF[sample.agent] == RED for sample in listed):
                error = ConfigError
        self.expect(self.store.record_outcome(record), error)
        if error is not None or is_repeat:
            return
        self.ended[key] = record
        for sample in held:
            row = self.rows[sample, attempt]
            if sample in unheard and row.status == "partial":
                row.status = "masked"
            row.has_outcome = True
            row.complete()

    @staticmethod
    def outcome(
        key: TrajectoryKey, attempt: int, listed: Sequence[SampleKey], *, with_columns: bool = True
    ) -> OutcomeRecord:
        red = [sample for sample in listed if POLICY_OF[sample.agent] == RED and with_columns]
        return OutcomeRecord(
            trajectory=key,
            attempt=attempt,
            rewards={sample.agent: FILLED[1] for sample in listed},
            turns=tuple(listed),
            turn_columns=tuple(TurnColumns(key=sample, values={"level": sample.turn}) for sample in red),
        )

    @rule(
        trajectory=trajectories,
        wanted=st.sets(st.tuples(agents, turns), min_size=1, max_size=4),
        is_filled=st.booleans(),
    )
    def play(self, trajectory: tuple[int, int], wanted: set[tuple[AgentName, int]], is_filled: bool) -> None:
        """Run an attempt from its begin to its outcome, so that there is something to train."""
        key = TrajectoryKey(self.step, *trajectory)
        if key in self.ended or not self.is_dispatched(key):
            return
        self.begin_attempt(trajectory)
        for agent, turn in sorted(wanted):
            self.put_turn(trajectory, agent, turn, age=0, content=0, version_offset=0)
        self.record_outcome(trajectory, age=0, fault="")
        for policy in POLICIES if is_filled else ():
            self.fill_all(policy)

    @rule(
        chosen=st.sets(trajectories, min_size=1, max_size=3),
        wanted=st.sets(st.tuples(agents, turns), min_size=1, max_size=3),
        content=st.sampled_from((0, 0, 0, 1)),
    )
    def put_finished(self, chosen: set[tuple[int, int]], wanted: set[tuple[AgentName, int]], content: int) -> None:
        """Put whole trajectories in one call; those that are there already must be the same."""
        finished = []
        for trajectory in sorted(chosen):
            keys = sorted(self.key_of(trajectory, agent, turn) for agent, turn in wanted)
            finished.append(
                FinishedTrajectory(
                    outcome=self.outcome(keys[0].trajectory_key, 0, keys),
                    turns=tuple(turn_row(key, 0, content) for key in keys),
                    advantages=(FILLED[0],) * len(keys),
                )
            )
        is_legal = all(self.may_put(each) for each in finished)
        self.expect(self.store.put_finished(finished), None if is_legal else InvariantError)
        for each in finished if is_legal else []:
            key = each.outcome.trajectory
            if key not in self.ended:
                self.attempts[key] = 0
                self.ended[key] = each.outcome
                for turn in each.turns:
                    row = self.rows[turn.key, 0] = Row(row=turn, is_filled=True, has_outcome=True)
                    row.complete()

    def may_put(self, finished: FinishedTrajectory) -> bool:
        key = finished.outcome.trajectory
        if not self.is_dispatched(key):
            return False
        if key not in self.attempts:
            return True
        stored = [self.rows.get((turn.key, 0)) for turn in finished.turns]
        is_same = all(row and row.row == turn for row, turn in zip(stored, finished.turns, strict=True))
        return (
            self.attempts[key] == 0
            and self.ended.get(key) == finished.outcome
            and is_same
            and all(row and row.is_filled for row in stored)
        )

    @precondition(lambda self: self.attempts)
    @rule(trajectory=trajectories)
    def record_failure(self, trajectory: tuple[int, int]) -> None:
        key = TrajectoryKey(self.step, *trajectory)
        attempt = self.attempts.get(key, 0)
        record = TrajectoryFailure(trajectory=key, attempt=attempt, kind="timeout", message="")
        is_repeat = self.ended.get(key) == record
        is_legal = key in self.attempts and (is_repeat or key not in self.ended)
        self.expect(self.store.record_failure(record), None if is_legal else InvariantError)
        if not is_legal or is_repeat:
            return
        self.ended[key] = record
        for row in self.rows_of(key, attempt):
            if row.status == "partial":
                row.status = "failed"

    # --- data columns -------------------------------------------------------------------------------------------------

    @rule(policy=policies, wanted=picks, value=st.sampled_from((0.5, 0.5, 0.5, 0.25)))
    def fill(self, policy: PolicyName, wanted: set[int], value: float) -> None:
        rows = self.pick(self.live_rows(policy), wanted)
        is_legal = all(
            (row.is_filled and value == 0.5) or (not row.is_filled and row.status in ("partial", "masked"))
            for row in rows
        )
        if value != 0.5 and rows:
            is_legal = False
            if not any(row.is_filled or row.status == "failed" for row in rows):
                return  # A first filling with another value is legal; the model knows one value only.
        values = [AdvantageValue(key=row.row.key, advantage=value, reward=FILLED[1]) for row in rows]
        self.expect(self.store.fill(policy, values), None if is_legal else InvariantError)
        for row in rows if is_legal else []:
            row.is_filled = True
            row.complete()

    @rule(wanted=picks, values=st.sampled_from((SCORES, SCORES, SCORES, (-0.25, -5.0), SCORES[:1])))
    def fill_tokens(self, wanted: set[int], values: tuple[float, ...]) -> None:
        rows = self.pick(self.live_rows(BLUE), wanted)
        fillable = ("partial", "ready", "masked", "failed")
        if len(values) == 2 and values != SCORES and not any(row.is_scored for row in rows):
            return  # A first filling with another value is legal; the model knows one value only.
        is_legal = all(row.is_scored or row.status in fillable for row in rows) and (values == SCORES or not rows)
        given = [TokenValues(key=row.row.key, values=values) for row in rows]
        call = self.store.fill_tokens(BLUE, TokenColumn.OLD_LOGPROBS, given)
        self.expect(call, None if is_legal else InvariantError)
        for row in rows if is_legal else []:
            row.is_scored = True
            row.complete()

    @rule(policy=policies)
    def fill_all(self, policy: PolicyName) -> None:
        rows = self.live_rows(policy)
        self.fill(policy, {n for n, row in enumerate(rows) if row.status in ("partial", "masked")}, 0.5)
        if policy == BLUE:
            self.check_ready(policy)
            self.fill_tokens({n for n, row in enumerate(rows) if row.status == "partial"}, SCORES)

    @precondition(lambda self: self.rows)
    @rule(policy=policies, wanted=st.sets(st.integers(0, 7), max_size=2))
    def mask(self, policy: PolicyName, wanted: set[int]) -> None:
        rows = self.pick(self.live_rows(policy), wanted)
        if any(row.status == "masked" for row in rows):
            return  # Masked with another reason perhaps; the unit tests have that.
        is_legal = all(row.status in ("partial", "ready") for row in rows)
        call = self.store.mask(policy, [row.row.key for row in rows], "truncated")
        self.expect(call, None if is_legal else InvariantError)
        for row in rows if is_legal else []:
            row.status = "masked"

    # --- training -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(row.status == "ready" for row in self.rows.values()))
    @rule(
        policy=policies,
        slot=slots,
        wanted=picks,
        num_passes=st.integers(0, 2),
        then=st.sampled_from(("", "", "seal", "seal and kill", "release", "stall", "kill_owner")),
    )
    def train(self, policy: PolicyName, slot: int, wanted: set[int], num_passes: int, then: str) -> None:
        """Lease, acknowledge so often, then seal or die."""
        num_leases = len(self.leases)
        self.lease(policy, slot, wanted, from_all=False)
        if len(self.leases) == num_leases:
            return
        rows = [self.live(key) for key in self.leases[-1].lease.keys]
        for number in range(num_passes):
            self.acknowledge_one(self.leases[-1])
            if number + 1 < num_passes:
                self.try_lease(policy, self.holder(slot), rows, number + 1, None)
        if num_passes > 0:
            self.try_lease(policy, self.holder(1 - slot), rows, num_passes, CapacityError)
            self.try_lease(policy, self.holder(slot), rows, num_passes + 1, CapacityError)
        if then.startswith("seal"):
            self.seal(policy, slot, is_stale=False)
        if "kill" in then:
            self.kill_owner()
        elif then in ("release", "stall"):
            self.lose_holder(slot, is_fenced=then == "stall")

    @precondition(lambda self: self.rows)
    @rule(policy=policies, slot=slots, wanted=picks, from_all=st.booleans())
    def lease(self, policy: PolicyName, slot: int, wanted: set[int], from_all: bool) -> None:
        rows = self.pick(self.live_rows(policy) if from_all else self.live_rows(policy, "ready"), wanted)
        is_legal = all(row.status == "ready" for row in rows)
        self.try_lease(policy, self.holder(slot), list(reversed(rows)), 0, None if is_legal else CapacityError)

    @precondition(lambda self: any(row.status == "acknowledged" for row in self.rows.values()))
    @rule(
        policy=policies, slot=slots, wanted=picks, num_passes=st.integers(1, 2), are_own=st.sampled_from((True, False))
    )
    def lease_again(self, policy: PolicyName, slot: int, wanted: set[int], num_passes: int, are_own: bool) -> None:
        """Use acknowledged samples once more; only their own holder may."""
        holder = self.holder(slot)
        own = {work.lease.lease_id for work in self.leases if work.lease.holder == holder}
        rows = self.live_rows(policy, "acknowledged", "ready")
        if are_own:
            rows = [row for row in rows if row.lease_id in own and row.num_passes == num_passes]
        rows = self.pick(rows, wanted)
        is_legal = all(
            row.status == "acknowledged" and row.num_passes == num_passes and row.lease_id in own for row in rows
        )
        self.try_lease(policy, holder, rows, num_passes, None if is_legal else CapacityError)

    def try_lease(
        self,
        policy: PolicyName,
        holder: HolderId,
        rows: Sequence[Row],
        num_passes: int,
        error: type[FlexMARLError] | None,
    ) -> None:
        if not rows:
            return
        micro_batch_id, keys = f"m{self.num_micro_batches}", [row.row.key for row in rows]
        call = self.store.lease(policy, holder, micro_batch_id, keys, num_passes_done=num_passes)
        granted = self.expect(call, error)
        if granted is not None:
            self.granted(*granted, rows)

    def granted(self, lease: Lease, samples: Sequence[Sample], rows: Sequence[Row]) -> None:
        """What was leased is what the model has, and the fencing token has risen."""
        self.num_micro_batches += 1
        assert list(samples) == [row.sample() for row in rows]
        assert list(lease.keys) == [row.row.key for row in rows]
        assert lease.lease_id > self.newest_lease_id
        self.newest_lease_id = lease.lease_id
        self.leases.append(Work(lease=lease))
        for row in rows:
            row.status, row.lease_id = "leased", lease.lease_id

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), max_rows=st.integers(1, 3))
    def acknowledge_and_claim(self, data: st.DataObject, max_rows: int) -> None:
        work = data.draw(st.sampled_from(self.leases))
        policy, holder = work.lease.policy, work.lease.holder
        rows = self.live_rows(policy, "ready")[:max_rows]
        claim = self.store.claim(
            policy,
            self.step,
            holder,
            f"m{self.num_micro_batches}",
            max_rows=max_rows,
            timeout_s=0.0,
            acknowledging=work.lease,
        )
        if work.status == "released" or holder in self.fenced:
            self.expect(claim, FencedError)
            return
        granted = self.run(claim)
        self.acknowledge_one(work)  # once more: it changes nothing
        assert (granted is None) == (not rows)
        if granted is not None:
            self.granted(*granted, rows)

    @rule(policy=policies, slot=slots, max_rows=st.integers(1, 3))
    def claim(self, policy: PolicyName, slot: int, max_rows: int) -> None:
        rows = self.live_rows(policy, "ready")[:max_rows]
        micro_batch_id = f"m{self.num_micro_batches}"
        granted = self.run(
            self.store.claim(policy, self.step, self.holder(slot), micro_batch_id, max_rows=max_rows, timeout_s=0.0)
        )
        assert (granted is None) == (not rows)
        if granted is not None:
            self.granted(*granted, rows)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.acknowledge_one(data.draw(st.sampled_from(self.leases)))

    def acknowledge_one(self, work: Work) -> None:
        self.expect(self.store.acknowledge(work.lease), FencedError if work.status == "released" else None)
        if work.status != "active":
            return
        work.status = "acknowledged"
        cache = self.caches.setdefault(work.lease.holder, {}).setdefault(work.lease.policy, [])
        cache.extend(work.lease.keys)
        for key in work.lease.keys:
            row = self.live(key)
            row.status = "acknowledged"
            row.num_passes += 1

    @precondition(lambda self: self.leases)
    @rule(slot=slots, is_fenced=st.booleans())
    def lose_holder(self, slot: int, is_fenced: bool) -> None:
        """A holder died, or is only taken for dead: then another takes its place, and it will come back."""
        holder = self.holder(slot)
        held = [work.lease for work in self.leases if work.lease.holder == holder]
        lose = self.store.fence if is_fenced else self.store.release
        assert self.run(lose(holder)) == self.die(holder)
        if is_fenced:
            self.stale_leases += held
            self.fenced.append(holder)
            self.incarnations[slot] += 1

    @precondition(lambda self: self.fenced)
    @rule(data=st.data(), policy=policies)
    def come_back(self, data: st.DataObject, policy: PolicyName) -> None:
        """A holder that had stalled goes on where it was; nothing that it does counts."""
        holder = data.draw(st.sampled_from(self.fenced))
        for row in self.live_rows(policy, "ready")[:1]:
            self.try_lease(policy, holder, [row], 0, FencedError)
        claim = self.store.claim(policy, self.step, holder, "late", max_rows=2, timeout_s=60.0)
        self.expect(claim, FencedError)
        current = self.seals.get(policy)
        leases = [lease for lease in self.stale_leases if lease.holder == holder]
        for lease in leases:
            work = next((work for work in self.leases if work.lease == lease), None)
            is_over = work is None or work.status == "released"
            if is_over and lease.keys[0].step == self.step:
                self.expect(self.store.acknowledge(lease), FencedError)
        ids = tuple(lease.micro_batch_id for lease in leases if lease.policy == policy)
        seal = self.next_seal(policy, current[0] if current else None, ids)
        self.expect(self.store.seal(holder, seal), FencedError)

    def die(self, holder: HolderId) -> list[SampleKey]:
        """Lose a holder's cache; return its rows that are in no seal."""
        lost: set[SampleKey] = set()
        for work in self.leases:
            if work.lease.holder == holder and work.status in ("active", "acknowledged"):
                work.status = "released"
                lost.update(work.lease.keys)
        self.caches.pop(holder, None)
        self.back_to_ready(lost)
        return sorted(lost)

    def back_to_ready(self, keys: set[SampleKey]) -> None:
        for key in keys:
            row = self.live(key)
            assert row.status in ("leased", "acknowledged", "sealed")
            row.status, row.lease_id, row.num_passes = "ready", None, 0

    def next_seal(
        self, policy: PolicyName, current: Seal | None, added: Sequence[str], *, is_stale: bool = False
    ) -> Seal:
        self.num_seals += 1
        predecessor = current.object_key if current else None
        return Seal(
            policy=policy,
            step=self.step,
            object_key=ObjectKey("seal", policy, self.num_seals),
            predecessor=ObjectKey("seal", policy, -1) if is_stale else predecessor,
            micro_batches=(*(current.micro_batches if current else ()), *added),
            denominators=Denominators(),
        )

    @precondition(lambda self: self.leases)
    @rule(policy=policies, slot=slots, is_stale=st.sampled_from((False, False, False, True)))
    def seal(self, policy: PolicyName, slot: int, is_stale: bool) -> None:
        """Seal what the holder has in memory, on top of the current seal, or of one that is not current."""
        holder = self.holder(slot)
        added = [w for w in self.leases if (w.lease.policy, w.lease.holder) == (policy, holder)]
        added = [work for work in added if work.status == "acknowledged"]
        current, sealed = self.seals.get(policy, (None, []))
        new = self.next_seal(policy, current, [work.lease.micro_batch_id for work in added], is_stale=is_stale)
        # A cache in the middle of several passes is not sealed.
        is_whole = all(
            self.live(key).status == "acknowledged" and self.live(key).lease_id == work.lease.lease_id
            for work in added
            for key in work.lease.keys
        )
        is_legal = is_whole and not is_stale
        self.expect(self.store.seal(holder, new), None if is_legal else InvariantError)
        if not is_legal:
            return
        self.seals[policy] = (new, sealed + self.caches.get(holder, {}).pop(policy, []))
        for work in added:
            work.status = "sealed"
            for key in work.lease.keys:
                self.live(key).status = "sealed"

    # --- steps --------------------------------------------------------------------------------------------------------

    def gradient(self, policy: PolicyName) -> list[SampleKey]:
        """Return every row, as often as it is in the policy's gradient: in its seal, and in the living caches."""
        unsealed = [key for caches in self.caches.values() for key in caches.get(policy, [])]
        return self.seals[policy][1] + unsealed if policy in self.seals else unsealed

    @precondition(lambda self: self.rows)
    @rule(num_passes=st.integers(1, 2))
    def finish_step(self, num_passes: int) -> None:
        """Do what is left to do in the step, and commit it."""
        for key in self.attempts.keys() - self.ended.keys():
            self.record_failure((key.query, key.trajectory))
        for work in self.leases:
            self.acknowledge_one(work)
        is_sealed = any(row.status == "sealed" for row in self.rows.values())
        if any(row.num_passes > (1 if is_sealed else num_passes) for row in self.rows.values()):
            self.kill_owner()  # Every row has as many passes again: none.
            is_sealed = False
        for policy in POLICIES:
            self.fill_all(policy)
            self.claim(policy, 0, max_rows=99)
            for work in self.leases:
                self.acknowledge_one(work)
            if num_passes > 1 and not is_sealed:
                self.level_passes(policy, num_passes)
        dispatched = [TrajectoryKey(self.step, *trajectory) for trajectory in TRAJECTORIES]
        for key in [key for key in dispatched if self.is_dispatched(key) and key not in self.ended]:
            self.commit()  # Refused: a trajectory has not even begun.
            self.begin_attempt((key.query, key.trajectory))
            self.record_failure((key.query, key.trajectory))
        step = self.step
        self.commit()
        assert self.step == step + 1

    def level_passes(self, policy: PolicyName, num_passes: int) -> None:
        """Use what was used less often again, each by its own holder."""
        for holder in [self.holder(slot) for slot in range(2)]:
            own = {work.lease.lease_id for work in self.leases if work.lease.holder == holder}
            rows = [row for row in self.live_rows(policy, "acknowledged") if row.lease_id in own]
            for number in range(1, num_passes):
                rows_left = [row for row in rows if row.num_passes == number]
                for part in (rows_left[:1], rows_left[1:]):
                    self.try_lease(policy, holder, part, number, None)
                    if part:
                        self.acknowledge_one(self.leases[-1])
                    if len({row.num_passes for row in rows}) > 1:
                        self.commit()  # Refused: some samples have had one pass more than others.

    @precondition(lambda self: self.rows)
    @rule()
    def commit(self) -> None:
        alive = [work for work in self.leases if work.status in ("acknowledged", "sealed")]
        trained = [row for row in self.rows.values() if row.status in ("acknowledged", "sealed")]
        record = CommitRecord(
            step=self.step, policy_version=self.step + 1, policies={p: self.part(p, alive, trained) for p in POLICIES}
        )
        dispatched = [TrajectoryKey(self.step, *trajectory) for trajectory in TRAJECTORIES]
        is_legal = (
            all(row.status not in ("partial", "ready", "leased") for row in self.rows.values())
            and all(key in self.ended for key in dispatched if self.is_dispatched(key))
            and all(row.num_passes == record.policies[row.row.policy].num_passes for row in trained)
        )
        self.expect(self.store.commit(record), None if is_legal else InvariantError)
        if not is_legal:
            return
        self.run(self.store.commit(record))
        assert self.run(self.store.last_commit()) == record
        finished: dict[PolicyName, list[SampleKey]] = {}
        for (key, _), row in sorted(self.rows.items()):
            if row.has_outcome and row.status not in ("masked", "superseded"):
                finished.setdefault(row.row.policy, []).append(key)
        assert self.run(self.store.trained_ids(self.step)) == finished
        for policy, part in record.policies.items():
            expected = dict.fromkeys(finished.get(policy, []), part.num_passes)
            assert Counter(self.gradient(policy)) == expected, "not every sample exactly num_passes times"
            assert all(row.row.policy_version == self.step for row in trained)
        samples = {
            (work.lease.policy, work.lease.micro_batch_id): [self.live(key).sample() for key in work.lease.keys]
            for work in alive
        }
        self.committed[self.step] = Committed(record=record, trained=finished, micro_batches=samples)
        self.next_step()

    def part(self, policy: PolicyName, alive: Sequence[Work], trained: Sequence[Row]) -> PolicyCommit:
        ids = tuple(work.lease.micro_batch_id for work in alive if work.lease.policy == policy)
        return PolicyCommit(
            weights_version=self.step + 1,
            weights_digest="",
            denominators=Denominators(),
            micro_batches=ids,
            update_sizes=(len(ids),) if ids else (),
            num_passes=max((row.num_passes for row in trained if row.row.policy == policy), default=1),
        )

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Read a committed step as it was trained; its tokens may be gone when a checkpoint covers them."""
        step = data.draw(st.sampled_from(sorted(self.committed)))
        records = [each.record for number, each in sorted(self.committed.items()) if number >= step]
        assert self.run(self.store.commits_after(step)) == records
        for (policy, micro_batch_id), samples in self.committed[step].micro_batches.items():
            try:
                found = self.run(self.store.micro_batch(policy, step, micro_batch_id))
            except StoreError as error:
                assert step < self.pruned_version, error
            else:
                assert found == samples

    @rule(behind=st.integers(-1, 2))
    def prune(self, behind: int) -> None:
        version = max(self.step - behind, 0)
        self.expect(self.store.prune(version), InvariantError if version > self.step else None)
        if version <= self.step:
            self.pruned_version = max(self.pruned_version, version)

    @rule()
    def kill_owner(self) -> None:
        """Drop the open files as a kill would, and open the store again: caches and seals were in its memory."""
        assert self.store._call is not None
        self.run(self.store._call(self.store._close_blocking))
        for slot in range(2):
            self.die(self.holder(slot))
        sealed = {key for _, keys in self.seals.values() for key in keys}
        for work in self.leases:
            work.status = "released"
        self.seals.clear()
        self.back_to_ready(sealed)
        self.open_store()
        assert (self.store.recovery.num_lost_rows, self.store.recovery.num_unsealed_rows) == (0, len(sealed))
        self.check_open_step()

    def check_open_step(self) -> None:
        """A resumed run finds the step in flight."""
        (stored,) = self.run(self.store.open_steps())
        assert stored.dispatch.step == self.step
        assert {extension.query for extension in stored.extensions} == self.extended
        assert {each.key: each.attempt for each in stored.trajectories} == self.attempts
        for each in stored.trajectories:
            rows = [row.row for row in self.rows_of(each.key, each.attempt)]
            assert list(each.turns) == sorted(rows, key=lambda row: row.key)
            assert (each.outcome or each.failure) == self.ended.get(each.key)
        scored = stored.scored.get(BLUE, {}).get(TokenColumn.OLD_LOGPROBS, ())
        assert {value.key: value.values for value in scored} == {
            row.row.key: SCORES for row in self.live_rows(BLUE) if row.is_scored
        }

    @precondition(lambda self: self.step > 0)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(max(self.step - 1, 0), self.step))
        self.run(self.store.rewind(version))
        self.committed = {step: each for step, each in self.committed.items() if step < version}
        self.stale_leases.clear()
        self.step = version - 1
        self.next_step()

    def check_ready(self, policy: PolicyName) -> None:
        ready = [(row.row.key, 3) for row in self.live_rows(policy, "ready")]
        assert self.run(self.store.ready(policy, self.step)) == ready

    @invariant()
    def store_equals_model(self) -> None:
        progress = self.run(self.store.progress(self.step))
        for policy in POLICIES:
            expected = Counter(row.status for row in self.rows.values() if row.row.policy == policy)
            part = progress.get(policy)
            found = {} if part is None else {name: getattr(part, name) for name in part.__dataclass_fields__}
            assert {name: number for name, number in found.items() if number} == {
                f"num_{status}": number for status, number in expected.items()
            }
            self.check_ready(policy)
            current = self.seals.get(policy)
            assert self.run(self.store.current_seal(policy, self.step)) == (current[0] if current else None)
        for step, each in self.committed.items():
            assert self.run(self.store.trained_ids(step)) == each.trained
        last = self.run(self.store.last_commit())
        assert (last.policy_version if last else 0) == self.step


def test_g2_g3_no_order_of_calls_deaths_and_stalls_loses_a_sample_or_trains_it_twice() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
