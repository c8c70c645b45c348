"""The store against a model that is a dict of rows: any order of calls, deaths of holders and of the owner included.

Longer than a module should be: a state machine is one class.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
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

from flexmarl.core.errors import CapacityError, FencedError, FlexMARLError, InvariantError
from flexmarl.core.ids import AgentName, HolderId, ObjectKey, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, Lease
from flexmarl.core.records import (
    CommitRecord,
    Denominators,
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    PolicyCommit,
    Seal,
    TrajectoryFailure,
    TurnRow,
    VersionSpan,
)
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.property

T = TypeVar("T")

POLICIES = (PolicyName("red"), PolicyName("blue"))
POLICY_OF = {AgentName("solver"): POLICIES[0], AgentName("checker"): POLICIES[1], AgentName("critic"): POLICIES[1]}
HOLDERS = (HolderId("h#0"), HolderId("h#1"))
TRAJECTORIES = [(query, trajectory) for query in range(2) for trajectory in range(2)]

trajectories = st.sampled_from(TRAJECTORIES)
agents = st.sampled_from(sorted(POLICY_OF))
turns = st.integers(0, 1)
policies = st.sampled_from(POLICIES)
holders = st.sampled_from(HOLDERS)


async def inline_call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    return function(*args)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine."""
    return asyncio.run(coroutine)


@dataclass(kw_only=True)
class Row:
    """What the model knows of a row."""

    row: TurnRow
    status: str = "partial"
    is_filled: bool = False
    has_outcome: bool = False

    def complete(self) -> None:
        if self.status == "partial" and self.is_filled and self.has_outcome:
            self.status = "ready"


@dataclass(kw_only=True)
class Work:
    """A lease of the model."""

    lease: Lease
    status: str = "active"


def turn_row(key: SampleKey, attempt: int, content: int) -> TurnRow:
    return TurnRow(
        key=key,
        attempt=attempt,
        policy=POLICY_OF[key.agent],
        policy_version=key.step,
        weights_version=0,
        prompt_tokens=(1,),
        response_tokens=(attempt, content),
        logprobs=(-0.5, -float(content)),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=2, policy_version=key.step),),
    )


class StoreMachine(RuleBasedStateMachine):
    """Rules call store and model with the same arguments, legal or not, and compare."""

    @initialize()
    def start(self) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.store = run(SqliteStore.open(self.folder, inline_call))
        self.step = -1
        self.num_seals = 0
        self.num_leases = 0
        self.trained: dict[int, dict[PolicyName, list[SampleKey]]] = {}
        """Rows by committed step: what the gradients of the model's holders and seals held."""
        self.next_step()

    def next_step(self) -> None:
        self.step += 1
        self.rows: dict[tuple[SampleKey, int], Row] = {}
        self.attempts: dict[TrajectoryKey, int] = {}
        self.ended: dict[TrajectoryKey, str] = {}
        self.leases: list[Work] = []
        self.caches: dict[HolderId, dict[PolicyName, list[SampleKey]]] = {}
        """Gradient caches: rows in the memory of each holder."""
        self.seals: dict[PolicyName, tuple[Seal, list[SampleKey]]] = {}
        """Current seal of each policy with the rows in it."""
        run(
            self.store.open_step(
                DispatchRecord(step=self.step, policy_version=self.step, queries=(0, 1), num_trajectories=2)
            )
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            run(self.store.close())
            shutil.rmtree(self.folder)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def expect(self, coroutine: Coroutine[Any, Any, T], error: type[FlexMARLError] | None) -> T | None:
        """Run a call that must succeed, or raise exactly `error`."""
        if error is None:
            return run(coroutine)
        with pytest.raises(FlexMARLError) as caught:
            run(coroutine)
        assert type(caught.value) is error, caught.value
        return None

    def live(self, key: SampleKey) -> Row | None:
        return self.rows.get((key, self.attempts.get(key.trajectory_key, -1)))

    def live_keys(self, policy: PolicyName, *statuses: str) -> list[SampleKey]:
        return sorted(
            key
            for (key, _), row in self.rows.items()
            if row.row.policy == policy and row.status in (statuses or (row.status,)) and row.status != "superseded"
        )

    def key_of(self, trajectory: tuple[int, int], agent: AgentName, turn: int) -> SampleKey:
        return SampleKey(self.step, *trajectory, agent, 0, turn)

    def attempt_error(self, key: TrajectoryKey, attempt: int) -> type[FlexMARLError] | None:
        newest = self.attempts.get(key, -1)
        if attempt > newest:
            return InvariantError
        return FencedError if attempt < newest else None

    # --- trajectories -------------------------------------------------------------------------------------------------

    @rule(trajectory=trajectories)
    def begin_attempt(self, trajectory: tuple[int, int]) -> None:
        key = TrajectoryKey(self.step, *trajectory)
        attempt = self.expect(self.store.begin_attempt(key), InvariantError if key in self.ended else None)
        if key in self.ended:
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
    )
    def put_turn(self, trajectory: tuple[int, int], agent: AgentName, turn: int, age: int, content: int) -> None:
        key = self.key_of(trajectory, agent, turn)
        attempt = max(self.attempts.get(key.trajectory_key, -1) - age, 0)
        row = turn_row(key, attempt, content)
        error = self.attempt_error(key.trajectory_key, attempt)
        stored = self.rows.get((key, attempt))
        if error is None and stored is not None:
            error = None if stored.row == row else InvariantError
        elif error is None and key.trajectory_key in self.ended:
            error = FencedError
        self.expect(self.store.put_turn(row), error)
        if error is None and stored is None:
            self.rows[key, attempt] = Row(row=row)

    @rule(
        trajectory=trajectories,
        age=st.sampled_from((0, 0, 0, 1)),
        fault=st.sampled_from(("", "", "", "absent", "unheard")),
    )
    def record_outcome(self, trajectory: tuple[int, int], age: int, fault: str) -> None:
        key = TrajectoryKey(self.step, *trajectory)
        attempt = max(self.attempts.get(key, -1) - age, 0)
        held = sorted(sample for sample, number in self.rows if sample.trajectory_key == key and number == attempt)
        listed = list(held)
        if fault == "absent":
            listed.append(SampleKey(self.step, *trajectory, AgentName("solver"), 9, 0))
        unheard = [listed.pop()] if fault == "unheard" and listed else []
        rewards = {sample.agent: 1.0 for sample in listed}
        record = OutcomeRecord(trajectory=key, attempt=attempt, rewards=rewards, turns=tuple(listed))
        error = self.attempt_error(key, attempt)
        is_repeat = self.ended.get(key) == repr(record)
        if error is None and not is_repeat and (key in self.ended or fault == "absent"):
            error = InvariantError
        self.expect(self.store.record_outcome(record), error)
        if error is not None or is_repeat:
            return
        self.ended[key] = repr(record)
        for sample in held:
            row = self.rows[sample, attempt]
            if sample in unheard and row.status == "partial":
                row.status = "masked"
            row.has_outcome = True
            row.complete()

    @rule(
        trajectory=trajectories,
        wanted=st.sets(st.tuples(agents, turns), min_size=1, max_size=4),
        is_filled=st.booleans(),
    )
    def play(self, trajectory: tuple[int, int], wanted: set[tuple[AgentName, int]], is_filled: bool) -> None:
        """Run an attempt from its begin to its outcome, so that there is something to train."""
        if TrajectoryKey(self.step, *trajectory) in self.ended:
            return
        self.begin_attempt(trajectory)
        for agent, turn in sorted(wanted):
            self.put_turn(trajectory, agent, turn, age=0, content=0)
        self.record_outcome(trajectory, age=0, fault="")
        for policy in POLICIES if is_filled else ():
            self.fill_all(policy)

    @precondition(lambda self: self.attempts)
    @rule(trajectory=trajectories)
    def record_failure(self, trajectory: tuple[int, int]) -> None:
        key = TrajectoryKey(self.step, *trajectory)
        attempt = self.attempts.get(key, 0)
        record = TrajectoryFailure(trajectory=key, attempt=attempt, kind="timeout", message="")
        is_repeat = self.ended.get(key) == repr(record)
        is_legal = key in self.attempts and (is_repeat or key not in self.ended)
        self.expect(self.store.record_failure(record), None if is_legal else InvariantError)
        if not is_legal or is_repeat:
            return
        self.ended[key] = repr(record)
        for (sample, number), row in self.rows.items():
            if sample.trajectory_key == key and number == attempt and row.status == "partial":
                row.status = "failed"

    # --- data columns -------------------------------------------------------------------------------------------------

    @rule(policy=policies, wanted=st.sets(st.integers(0, 7)), value=st.sampled_from((0.5, 0.5, 0.5, 0.25)))
    def fill(self, policy: PolicyName, wanted: set[int], value: float) -> None:
        keys = self.pick(self.live_keys(policy), wanted)
        values = [AdvantageValue(key=key, advantage=value, reward=1.0) for key in keys]
        rows = [row for key in keys if (row := self.live(key)) is not None]
        is_legal = all(
            (row.is_filled and value == 0.5) or (not row.is_filled and row.status in ("partial", "masked"))
            for row in rows
        )
        if value != 0.5:
            is_legal = is_legal and not keys
            if not is_legal and not any(row.is_filled or row.status == "failed" for row in rows):
                return  # A first filling with another value is legal; the model knows one value only.
        self.expect(self.store.fill(policy, values), None if is_legal else InvariantError)
        for row in rows if is_legal else []:
            row.is_filled = True
            row.complete()

    @rule(policy=policies)
    def fill_all(self, policy: PolicyName) -> None:
        keys = self.live_keys(policy, "partial", "masked")
        self.fill(policy, {number for number, key in enumerate(self.live_keys(policy)) if key in keys}, 0.5)

    @precondition(lambda self: self.rows)
    @rule(policy=policies, wanted=st.sets(st.integers(0, 7), max_size=2))
    def mask(self, policy: PolicyName, wanted: set[int]) -> None:
        rows = [row for key in self.pick(self.live_keys(policy), wanted) if (row := self.live(key)) is not None]
        if any(row.status == "masked" for row in rows):
            return  # Masked with another reason perhaps; the unit tests have that.
        is_legal = all(row.status in ("partial", "ready") for row in rows)
        keys = [row.row.key for row in rows]
        self.expect(self.store.mask(policy, keys, "truncated"), None if is_legal else InvariantError)
        for row in rows if is_legal else []:
            row.status = "masked"

    @staticmethod
    def pick(keys: Sequence[SampleKey], wanted: set[int]) -> list[SampleKey]:
        return [key for number, key in enumerate(keys) if number in wanted]

    # --- training -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(row.status == "ready" for row in self.rows.values()))
    @rule(data=st.data(), holder=holders, wanted=st.sets(st.integers(0, 3), min_size=1), until=st.integers(0, 2))
    def train(self, data: st.DataObject, holder: HolderId, wanted: set[int], until: int) -> None:
        """Lease ready rows; then, perhaps, acknowledge them; then, perhaps, seal the holder's cache."""
        policy = data.draw(st.sampled_from([policy for policy in POLICIES if self.live_keys(policy, "ready")]))
        num_leases = len(self.leases)
        self.lease(policy, holder, wanted, from_all=False)
        if until > 0 and len(self.leases) > num_leases:
            self.acknowledge_one(self.leases[-1])
        if until > 1:
            self.seal(policy, holder, is_stale=False)

    @precondition(lambda self: self.rows)
    @rule(policy=policies, holder=holders, wanted=st.sets(st.integers(0, 3), min_size=1), from_all=st.booleans())
    def lease(self, policy: PolicyName, holder: HolderId, wanted: set[int], from_all: bool) -> None:
        keys = self.pick(self.live_keys(policy) if from_all else self.live_keys(policy, "ready"), wanted)
        if not keys:
            return
        rows = [row for key in keys if (row := self.live(key)) is not None]
        is_legal = all(row.status == "ready" for row in rows)
        micro_batch_id = f"m{self.num_leases}"
        granted = self.expect(
            self.store.lease(policy, holder, micro_batch_id, keys), None if is_legal else CapacityError
        )
        if granted is None:
            return
        lease, samples = granted
        self.num_leases += 1
        assert [sample.turn for sample in samples] == [row.row for row in rows]
        assert {(sample.advantage, sample.reward) for sample in samples} == {(0.5, 1.0)}
        assert all(lease.lease_id > work.lease.lease_id for work in self.leases)
        self.leases.append(Work(lease=lease))
        for row in rows:
            row.status = "leased"

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
        self.set_status(work.lease.keys, "acknowledged")

    def set_status(self, keys: Sequence[SampleKey], status: str) -> None:
        for key in keys:
            row = self.live(key)
            assert row is not None
            row.status = status

    @precondition(lambda self: self.leases)
    @rule(holder=holders)
    def release(self, holder: HolderId) -> None:
        assert run(self.store.release(holder)) == self.die(holder)

    def die(self, holder: HolderId) -> list[SampleKey]:
        """Lose a holder's cache; return its rows that are in no seal."""
        lost: list[SampleKey] = []
        for work in self.leases:
            if work.lease.holder == holder and work.status in ("active", "acknowledged"):
                work.status = "released"
                lost += work.lease.keys
        self.caches.pop(holder, None)
        self.set_status(lost, "ready")
        return sorted(lost)

    @precondition(lambda self: self.leases)
    @rule(policy=policies, holder=holders, is_stale=st.sampled_from((False, False, False, True)))
    def seal(self, policy: PolicyName, holder: HolderId, is_stale: bool) -> None:
        """Seal what the holder has in memory, on top of the current seal, or of one that is not current."""
        added = [w for w in self.leases if (w.lease.policy, w.lease.holder) == (policy, holder)]
        added = [work for work in added if work.status == "acknowledged"]
        current, sealed = self.seals.get(policy, (None, []))
        self.num_seals += 1
        predecessor = current.object_key if current else None
        new = Seal(
            policy=policy,
            step=self.step,
            object_key=ObjectKey("seal", policy, self.num_seals),
            predecessor=ObjectKey("seal", policy, -1) if is_stale else predecessor,
            micro_batches=(*(current.micro_batches if current else ()), *(w.lease.micro_batch_id for w in added)),
            denominators=Denominators(),
        )
        self.expect(self.store.seal(holder, new), InvariantError if is_stale else None)
        if is_stale:
            return
        self.seals[policy] = (new, sealed + self.caches.get(holder, {}).pop(policy, []))
        for work in added:
            work.status = "sealed"
            self.set_status(work.lease.keys, "sealed")

    # --- steps --------------------------------------------------------------------------------------------------------

    def gradient(self, policy: PolicyName) -> list[SampleKey]:
        """Return every row, as often as it is in the policy's gradient: in its seal, and in the living caches."""
        unsealed = [key for caches in self.caches.values() for key in caches.get(policy, [])]
        return self.seals[policy][1] + unsealed if policy in self.seals else unsealed

    @precondition(lambda self: self.leases)
    @rule()
    def finish_step(self) -> None:
        """Do what is left to do in the step, and commit it."""
        for key in [key for key in self.attempts if key not in self.ended]:
            self.record_failure((key.query, key.trajectory))
        for work in self.leases:
            self.acknowledge_one(work)
        for policy in POLICIES:
            self.fill_all(policy)
            self.lease(policy, HOLDERS[0], set(range(len(self.rows))), from_all=False)
            if self.leases:
                self.acknowledge_one(self.leases[-1])
        step = self.step
        self.commit()
        assert self.step == step + 1

    @precondition(lambda self: self.rows)
    @rule()
    def commit(self) -> None:
        alive = [work for work in self.leases if work.status in ("acknowledged", "sealed")]
        record = CommitRecord(
            step=self.step,
            policy_version=self.step + 1,
            policies={
                policy: PolicyCommit(
                    weights_version=self.step + 1,
                    weights_digest="",
                    denominators=Denominators(),
                    micro_batches=tuple(w.lease.micro_batch_id for w in alive if w.lease.policy == policy),
                )
                for policy in POLICIES
            },
        )
        is_blocked = any(row.status in ("partial", "ready", "leased") for row in self.rows.values())
        self.expect(self.store.commit(record), InvariantError if is_blocked else None)
        if is_blocked:
            return
        run(self.store.commit(record))
        assert run(self.store.last_commit()) == record
        finished: dict[PolicyName, list[SampleKey]] = {}
        for (key, _), row in self.rows.items():
            if row.has_outcome and row.status not in ("masked", "superseded"):
                finished.setdefault(row.row.policy, []).append(key)
        in_gradient = {policy: sorted(self.gradient(policy)) for policy in POLICIES if self.gradient(policy)}
        trained = run(self.store.trained_ids(self.step))
        assert trained == {policy: sorted(keys) for policy, keys in finished.items()}
        assert trained == in_gradient
        assert all(number == 1 for keys in trained.values() for number in Counter(keys).values())
        self.trained[self.step] = trained
        self.next_step()

    @precondition(lambda self: self.leases)
    @rule()
    def kill_owner(self) -> None:
        """Drop the open files as a kill would, and open the store again."""
        run(self.store._call(self.store._close_blocking))
        for holder in HOLDERS:
            self.die(holder)
        self.store = run(SqliteStore.open(self.folder, inline_call))
        assert self.store.recovery.num_lost_rows == 0

    @precondition(lambda self: self.step > 0)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(max(self.step - 1, 0), self.step))
        run(self.store.rewind(version))
        self.trained = {step: keys for step, keys in self.trained.items() if step < version}
        self.step = version - 1
        self.next_step()

    @invariant()
    def store_equals_model(self) -> None:
        for policy in POLICIES:
            expected = Counter(row.status for row in self.rows.values() if row.row.policy == policy)
            part = run(self.store.progress(self.step)).get(policy)
            found = {} if part is None else {name: getattr(part, name) for name in part.__dataclass_fields__}
            assert {name: number for name, number in found.items() if number} == {
                f"num_{status}": number for status, number in expected.items()
            }
            assert run(self.store.ready(policy, self.step)) == [(key, 3) for key in self.live_keys(policy, "ready")]
            current = self.seals.get(policy)
            assert run(self.store.current_seal(policy, self.step)) == (current[0] if current else None)
        for step, trained in self.trained.items():
            assert run(self.store.trained_ids(step)) == trained
        last = run(self.store.last_commit())
        assert (last.policy_version if last else 0) == self.step


def test_g2_no_order_of_calls_and_deaths_loses_a_sample_or_trains_it_twice() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
