"""A process that writes to a store is killed again and again; what it had been told is done must be there.

This file is also that process: `python test_store_sigkill.py FOLDER ROUND UNTIL` works on the run in FOLDER, step after
step, and prints a line after each call that returned.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import AgentName, HolderId, ObjectKey, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, PolicyColumns
from flexmarl.core.records import (
    CommitRecord,
    Denominators,
    DispatchRecord,
    FinishedTrajectory,
    FinishReason,
    OutcomeRecord,
    PolicyCommit,
    Seal,
    StepExtension,
    TokenColumn,
    TokenValues,
    TrajectoryFailure,
    TurnColumns,
    TurnRow,
    VersionSpan,
)
from flexmarl.store import SqliteStore, unpack_turn
from flexmarl.store.bytes_file import DiskSegments
from flexmarl.store.packing import unpack_values
from flexmarl.store.payload import PayloadEnd

pytestmark = pytest.mark.crash

T = TypeVar("T")

NUM_KILLS = 12
FOREVER = 10**6
TURNS = [("solver", 0), ("checker", 0), ("solver", 1)]
POLICY_OF = {"solver": PolicyName("red"), "checker": PolicyName("blue")}
RED, BLUE = POLICIES = (PolicyName("red"), PolicyName("blue"))
COLUMNS = {
    RED: PolicyColumns(scalars={"level": "int"}, required=frozenset({"level"})),
    BLUE: PolicyColumns(required=frozenset({TokenColumn.OLD_LOGPROBS})),
}
NUM_PASSES = {RED: 2, BLUE: 1}
"""Seals are for the policy that uses each sample once."""
WHOLE = (1, 0)
"""Query and trajectory that is put as a whole in every step."""
FAILS = (1, 1)
"""Query and trajectory that fail in every step."""


async def inline_call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    return function(*args)


def dispatch(step: int) -> DispatchRecord:
    return DispatchRecord(step=step, min_version=step, max_version=step, queries=(0, 1), num_trajectories=2)


def extension(step: int) -> StepExtension:
    return StepExtension(step=step, query=0, first_trajectory=2, num_trajectories=1)


def trajectories(step: int) -> list[TrajectoryKey]:
    return [*dispatch(step).trajectories(), *extension(step).trajectories()]


def keys_of(trajectory: TrajectoryKey) -> list[SampleKey]:
    return [
        SampleKey(trajectory.step, trajectory.query, trajectory.trajectory, AgentName(agent), 0, turn)
        for agent, turn in TURNS
    ]


def finished_keys(step: int, policy: PolicyName) -> list[SampleKey]:
    """Return what a step must train."""
    finished = [key for key in trajectories(step) if (key.query, key.trajectory) != FAILS]
    return sorted(key for each in finished for key in keys_of(each) if POLICY_OF[key.agent] == policy)


def turn_row(key: SampleKey, attempt: int) -> TurnRow:
    """Return a row whose content depends on key and attempt, long enough to be torn."""
    rng = random.Random(f"{key} {attempt}")
    tokens = tuple(rng.randrange(50_000) for _ in range(300))
    return TurnRow(
        key=key,
        attempt=attempt,
        policy=POLICY_OF[key.agent],
        policy_version=key.step,
        weights_version=key.step,
        prompt_tokens=tokens[:100],
        response_tokens=tokens[100:],
        logprobs=tuple(-rng.random() for _ in range(200)),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=200, policy_version=key.step),),
    )


def scores(key: SampleKey) -> tuple[float, ...]:
    return tuple(-value / 64 for value in random.Random(f"score {key}").choices(range(1, 1000), k=200))


# --- the process that is killed ---------------------------------------------------------------------------------------


def done(*fact: object) -> None:
    print(json.dumps(fact), flush=True)


class Writer:
    """Plays orchestrator and process groups; goes on where the round before it was killed."""

    def __init__(self, store: SqliteStore, round_number: int) -> None:
        self.store = store
        self.round = round_number

    async def work(self, until: int) -> None:
        last = await self.store.last_commit()
        for step in range(last.policy_version if last else 0, until):
            await self.store.open_step(dispatch(step))
            done("dispatch", step)
            await self.store.extend_step(extension(step))
            done("extension", step)
            for trajectory in trajectories(step):
                await self.play(trajectory)
            micro_batches = {policy: await self.train(policy, step) for policy in POLICIES}
            await self.store.commit(self.commit_record(step, micro_batches))
            done("commit", step)
            if step % 2 == 1:
                await self.store.prune(step)
                done("prune", step)

    async def play(self, key: TrajectoryKey) -> None:
        if (key.query, key.trajectory) == WHOLE:
            await self.put_whole(key)
            return
        try:
            attempt = await self.store.begin_attempt(key)
        except InvariantError:
            return  # It ended before the kill.
        done("attempt", str(key), attempt)
        for number, sample in enumerate(keys_of(key)):
            await self.store.put_turn(turn_row(sample, attempt))
            done("turn", key.step, key.query, key.trajectory, number, attempt)
        if (key.query, key.trajectory) == FAILS:
            await self.store.record_failure(
                TrajectoryFailure(trajectory=key, attempt=attempt, kind="timeout", message="")
            )
        else:
            await self.store.record_outcome(self.outcome(key, attempt))
        done("end", key.step, key.query, key.trajectory, attempt)

    async def put_whole(self, key: TrajectoryKey) -> None:
        turns = tuple(turn_row(sample, 0) for sample in keys_of(key))
        finished = FinishedTrajectory(outcome=self.outcome(key, 0), turns=turns, advantages=(0.5,) * len(turns))
        await self.store.put_finished([finished])
        for number in range(len(turns)):
            done("turn", key.step, key.query, key.trajectory, number, 0)
        done("end", key.step, key.query, key.trajectory, 0)

    @staticmethod
    def outcome(key: TrajectoryKey, attempt: int) -> OutcomeRecord:
        turns = tuple(sorted(keys_of(key)))
        return OutcomeRecord(
            trajectory=key,
            attempt=attempt,
            rewards={AgentName(agent): 1.0 for agent in POLICY_OF},
            turns=turns,
            turn_columns=tuple(
                TurnColumns(key=turn, values={"level": turn.turn}) for turn in turns if POLICY_OF[turn.agent] == RED
            ),
        )

    async def train(self, policy: PolicyName, step: int) -> list[str]:
        keys = finished_keys(step, policy)
        await self.store.fill(policy, [AdvantageValue(key=key, advantage=0.5, reward=1.0) for key in keys])
        if policy == BLUE:
            values = [TokenValues(key=key, values=scores(key)) for key in keys]
            await self.store.fill_tokens(policy, TokenColumn.OLD_LOGPROBS, values)
            done("scores", step)
        holder = HolderId(f"{policy}#{self.round}")
        seal = None
        micro_batches: list[str] = []
        ready = [key for key, _ in await self.store.ready(policy, step)]
        assert ready == keys
        for num_passes in range(NUM_PASSES[policy]):
            for start in range(0, len(ready), 2):
                micro_batch_id = f"{self.round}-{num_passes}-{start}"
                lease, _ = await self.store.lease(
                    policy, holder, micro_batch_id, ready[start : start + 2], num_passes_done=num_passes
                )
                done("lease", lease.lease_id)
                await self.store.acknowledge(lease)
                micro_batches.append(micro_batch_id)
                done("acknowledge", lease.lease_id)
                if start % 4 == 0 and policy == BLUE:
                    seal = self.next_seal(policy, step, seal, micro_batches)
                    await self.store.seal(holder, seal)
                    done("seal", policy, step, micro_batches)
        return micro_batches

    def next_seal(self, policy: PolicyName, step: int, current: Seal | None, micro_batches: list[str]) -> Seal:
        return Seal(
            policy=policy,
            step=step,
            object_key=ObjectKey("seal", policy, 1000 * self.round + len(micro_batches)),
            predecessor=current.object_key if current else None,
            micro_batches=tuple(micro_batches),
            denominators=Denominators(num_samples=len(micro_batches)),
        )

    @staticmethod
    def commit_record(step: int, micro_batches: dict[PolicyName, list[str]]) -> CommitRecord:
        parts = {
            policy: PolicyCommit(
                weights_version=step + 1,
                weights_digest=f"{policy}-{step}",
                denominators=Denominators(num_samples=len(ids)),
                micro_batches=tuple(ids),
                update_sizes=(len(ids) // NUM_PASSES[policy],) * NUM_PASSES[policy],
                num_passes=NUM_PASSES[policy],
            )
            for policy, ids in micro_batches.items()
        }
        return CommitRecord(step=step, policy_version=step + 1, policies=parts)


async def write(folder: Path, round_number: int, until: int) -> None:
    store = await SqliteStore.open(folder, inline_call, COLUMNS)
    await Writer(store, round_number).work(until)
    await store.close()


# --- the test that kills it -------------------------------------------------------------------------------------------


def run_writer(folder: Path, round_number: int, until: int, kill_after: int | None, delay_s: float) -> list[Any]:
    """Return every fact that the writer had printed, until it ended or was killed."""
    command = [sys.executable, __file__, str(folder), str(round_number), str(until)]
    facts = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            # A kill may cut the last line; then the writer was not done saying so.
            if line.endswith("\n"):
                facts.append(json.loads(line))
            if len(facts) == kill_after:
                time.sleep(delay_s)
                writer.kill()
    assert writer.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return facts


def check_facts(store: SqliteStore, facts: list[Any]) -> None:
    """Whatever the writer was told is done is there, bit for bit."""
    index = store._index
    assert index is not None
    query = "SELECT 1 FROM outcomes WHERE (step, query, trajectory, attempt) = (?,?,?,?)"
    pruned_version = asyncio.run(store.pruned_version())
    for kind, *fact in facts:
        if kind == "turn":
            step, query_number, trajectory, number, attempt = fact
            key = keys_of(TrajectoryKey(step, query_number, trajectory))[number]
            if step >= pruned_version:
                stored = index.tables[POLICY_OF[key.agent]].find_turn(key, attempt)
                assert stored is not None
                assert unpack_turn(stored) == turn_row(key, attempt)
        elif kind == "end":
            assert index.connection.execute(query, fact).fetchone() == (1,)
        elif kind == "extension":
            plan = index.plan(fact[0])
            assert plan is not None
            assert plan.extensions == (extension(fact[0]),)
        elif kind == "scores" and fact[0] >= pruned_version:
            found = index.tables[BLUE].scored(fact[0], TokenColumn.OLD_LOGPROBS)
            assert [(key, unpack_values(body)) for key, body in found] == [
                (key, scores(key)) for key in finished_keys(fact[0], BLUE)
            ]
        elif kind == "commit":
            last = asyncio.run(store.last_commit())
            assert last is not None
            assert last.step >= fact[0]


def check_whole(store: SqliteStore, last_step: int) -> None:
    """Nothing is there by half: rows of outcomes and commits are all in, or none of them is."""
    index = store._index
    assert index is not None
    pruned = index.payload.pruned
    slots = [slot for table in index.tables.values() for _, slot in table.slots_behind(PayloadEnd(0, 0))]
    assert all(index.payload.is_intact(slot) for slot in slots if slot.segment not in pruned)
    assert not pruned.keys() & set(DiskSegments(Path(index.database.name).parent).numbers())
    last = asyncio.run(store.last_commit())
    num_committed = last.policy_version if last else 0
    for step in range(num_committed):
        assert asyncio.run(store.trained_ids(step)) == {policy: finished_keys(step, policy) for policy in POLICIES}
    for step in range(num_committed, last_step + 2):
        assert asyncio.run(store.trained_ids(step)) == {}
    check_replay(store, asyncio.run(store.pruned_version()))
    for table in index.tables.values():
        check_open_rows(store, table.policy, table.name, num_committed)


def check_replay(store: SqliteStore, version: int) -> None:
    """Every committed step that no checkpoint covers can be trained again: each sample as often as before."""
    for record in asyncio.run(store.commits_after(version)):
        for policy, part in record.policies.items():
            used: Counter[SampleKey] = Counter()
            for micro_batch_id in part.micro_batches:
                samples = asyncio.run(store.micro_batch(policy, record.step, micro_batch_id))
                used.update(sample.turn.key for sample in samples)
            assert used == dict.fromkeys(finished_keys(record.step, policy), part.num_passes)


def check_open_rows(store: SqliteStore, policy: PolicyName, table: str, step: int) -> None:
    assert store._index is not None
    connection = store._index.connection

    def count(condition: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {table} AS row WHERE {condition}").fetchone()[0])

    assert count("status IN ('leased', 'acknowledged', 'sealed')") == 0
    assert count("status = 'ready' AND (lease_id IS NOT NULL OR num_passes > 0)") == 0
    ended = (
        "EXISTS (SELECT 1 FROM outcomes o WHERE (o.step, o.query, o.trajectory, o.attempt) = "
        "(row.step, row.query, row.trajectory, row.attempt) AND o.kind = '{}')"
    )
    assert count(f"has_outcome <> {ended.format('outcome')}") == 0
    assert count(f"status IN ('ready', 'committed') AND NOT {ended.format('outcome')}") == 0
    assert count(f"(status = 'failed') <> {ended.format('failure')}") == 0
    newest = (
        "(SELECT max(attempt) FROM attempts a WHERE (a.step, a.query, a.trajectory) = "
        "(row.step, row.query, row.trajectory))"
    )
    assert count(f"(status = 'superseded') <> (attempt < {newest})") == 0
    assert asyncio.run(store.current_seal(policy, step)) is None


def test_g2_g4_what_was_acknowledged_survives_sigkill_and_nothing_is_there_by_half(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rng = random.Random(20)
    facts: list[Any] = []
    for round_number in range(NUM_KILLS):
        facts += run_writer(folder, round_number, FOREVER, rng.randrange(1, 140), rng.random() * 0.003)
        store = asyncio.run(SqliteStore.open(folder, inline_call, COLUMNS))
        assert store.recovery.num_lost_rows == 0
        check_facts(store, facts)
        check_whole(store, last_step=max(fact[1] for fact in facts if fact[0] == "dispatch"))
        asyncio.run(store.close())
    num_steps = max(fact[1] for fact in facts if fact[0] == "dispatch") + 1
    facts += run_writer(folder, NUM_KILLS, num_steps, None, 0.0)
    store = asyncio.run(SqliteStore.open(folder, inline_call, COLUMNS))
    check_facts(store, facts)
    assert asyncio.run(store.pruned_version()) == max(fact[1] for fact in facts if fact[0] == "prune") >= 3
    for step in range(num_steps):
        assert asyncio.run(store.trained_ids(step)) == {policy: finished_keys(step, policy) for policy in POLICIES}
    asyncio.run(store.close())


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
