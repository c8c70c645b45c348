"""Rows, and a store whose calls run at once: without an event loop, so that a test is a plain function."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
from flexmarl.runtime.simulated import VirtualTimeLoop
from flexmarl.store import SqliteStore

T = TypeVar("T")

RED = PolicyName("red")
BLUE = PolicyName("blue")
HOLDER = HolderId("red#0")
POLICY_OF = {"solver": RED, "checker": BLUE}


async def inline_call(function: Callable[..., T], *args: object, cost_s: float = 0.0) -> T:
    return function(*args)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine."""
    return asyncio.run(coroutine)


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine for which waiting takes no time; the clock starts at 0 s."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def open_store(folder: Path | None = None) -> SqliteStore:
    return run(SqliteStore.open(folder, inline_call))


def key(
    *, step: int = 0, query: int = 0, trajectory: int = 0, agent: str = "solver", branch: int = 0, turn: int = 0
) -> SampleKey:
    return SampleKey(step, query, trajectory, AgentName(agent), branch, turn)


def turn_row(sample: SampleKey, *, attempt: int = 0, tokens: tuple[int, ...] = (7, 8, 9)) -> TurnRow:
    return TurnRow(
        key=sample,
        attempt=attempt,
        policy=POLICY_OF[sample.agent],
        policy_version=sample.step,
        weights_version=sample.step,
        prompt_tokens=(1, 2),
        response_tokens=tokens,
        logprobs=tuple(-0.1 * token for token in tokens),
        temperature=0.7,
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan(start=0, end=len(tokens), policy_version=sample.step),),
    )


def dispatch(step: int = 0, num_queries: int = 4, num_trajectories: int = 1) -> DispatchRecord:
    return DispatchRecord(
        step=step,
        min_version=step,
        max_version=step,
        queries=tuple(range(num_queries)),
        num_trajectories=num_trajectories,
    )


def outcome(
    trajectory: TrajectoryKey, turns: Sequence[SampleKey], *, attempt: int = 0, reward: float = 1.0
) -> OutcomeRecord:
    rewards = {sample.agent: reward for sample in turns}
    return OutcomeRecord(trajectory=trajectory, attempt=attempt, rewards=rewards, turns=tuple(sorted(turns)))


def advantage(sample: SampleKey, value: float = 0.5) -> AdvantageValue:
    return AdvantageValue(key=sample, advantage=value, reward=1.0)


def put_trajectory(store: SqliteStore, turns: Sequence[SampleKey]) -> int:
    """Run one attempt of the trajectory of `turns` up to before its outcome."""
    attempt = run(store.begin_attempt(turns[0].trajectory_key))
    for sample in turns:
        run(store.put_turn(turn_row(sample, attempt=attempt)))
    return attempt


def make_ready(store: SqliteStore, *turns: SampleKey) -> None:
    """Make the rows of one trajectory ready."""
    attempt = put_trajectory(store, turns)
    run(store.record_outcome(outcome(turns[0].trajectory_key, turns, attempt=attempt)))
    for sample in turns:
        run(store.fill(POLICY_OF[sample.agent], [advantage(sample)]))


def lease_of(store: SqliteStore, *keys: SampleKey, micro_batch_id: str = "m0", holder: HolderId = HOLDER) -> Lease:
    return run(store.lease(POLICY_OF[keys[0].agent], holder, micro_batch_id, keys))[0]


def acknowledge(store: SqliteStore, *keys: SampleKey, micro_batch_id: str = "m0", holder: HolderId = HOLDER) -> Lease:
    lease = lease_of(store, *keys, micro_batch_id=micro_batch_id, holder=holder)
    run(store.acknowledge(lease))
    return lease


def seal_record(
    number: int,
    micro_batches: Sequence[str],
    *,
    predecessor: int | None = None,
    policy: PolicyName = RED,
    step: int = 0,
) -> Seal:
    return Seal(
        policy=policy,
        step=step,
        object_key=ObjectKey("seal", policy, number),
        predecessor=None if predecessor is None else ObjectKey("seal", policy, predecessor),
        micro_batches=tuple(micro_batches),
        denominators=Denominators(num_samples=len(micro_batches)),
    )


def commit_record(micro_batches: Mapping[str, Sequence[str]], step: int = 0) -> CommitRecord:
    policies = {
        PolicyName(policy): PolicyCommit(
            weights_version=step + 1,
            weights_digest=f"{policy}-{step + 1}",
            denominators=Denominators(num_samples=len(ids)),
            micro_batches=tuple(ids),
            update_sizes=(len(ids),) if ids else (),
        )
        for policy, ids in micro_batches.items()
    }
    return CommitRecord(step=step, policy_version=step + 1, policies=policies)


def commit(store: SqliteStore, record: CommitRecord) -> None:
    """Commit a step in which every trajectory that was not begun has failed."""
    fail_the_rest(store, record.step)
    run(store.commit(record))


def fail_the_rest(store: SqliteStore, step: int = 0) -> None:
    """Record a failure for each trajectory of an open step that was not begun."""
    for stored in run(store.open_steps()):
        begun = {each.key for each in stored.trajectories}
        added = [trajectory for extension in stored.extensions for trajectory in extension.trajectories()]
        for trajectory in [*stored.dispatch.trajectories(), *added]:
            if trajectory.step == step and trajectory not in begun:
                attempt = run(store.begin_attempt(trajectory))
                failure = TrajectoryFailure(trajectory=trajectory, attempt=attempt, kind="not_run", message="")
                run(store.record_failure(failure))


def counts(store: SqliteStore, policy: PolicyName = RED, step: int = 0) -> dict[str, int]:
    """Return the numbers of rows by status, without the zeros."""
    progress = run(store.progress(step)).get(policy)
    if progress is None:
        return {}
    names = [name for name in progress.__dataclass_fields__ if getattr(progress, name)]
    return {name.removeprefix("num_"): getattr(progress, name) for name in names}


def ready_keys(store: SqliteStore, policy: PolicyName = RED, step: int = 0) -> list[SampleKey]:
    return [sample for sample, _ in run(store.ready(policy, step))]
