"""What every `ExperienceStore` must do, as checks that know nothing of how it does it.

A plug-in store (`store.kind: plugin`) runs them in its own tests:

    @pytest.mark.parametrize("check", STORE_CHECKS)
    def test_contract(check):
        asyncio.run(check(make_store))

where `make_store` is an async function that takes the declared columns per policy and returns a new, empty store. A
check raises AssertionError when the store does not do what the protocol says.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexmarl.core.errors import CapacityError, ConfigError, FencedError, FlexMARLError, InvariantError
from flexmarl.core.ids import AgentName, HolderId, ObjectKey, PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import AdvantageValue, ExperienceStore, PolicyColumns
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

MakeStore = Callable[[Mapping[PolicyName, PolicyColumns]], Awaitable[ExperienceStore]]
Check = Callable[[MakeStore], Coroutine[Any, Any, None]]

RED, BLUE = PolicyName("red"), PolicyName("blue")
HOLDER, NEXT_HOLDER = HolderId("red#0"), HolderId("red#1")
_POLICY_OF = {AgentName("solver"): RED, AgentName("checker"): BLUE}
_COLUMNS = {
    RED: PolicyColumns(scalars={"level": "int"}, required=frozenset({"level"})),
    BLUE: PolicyColumns(required=frozenset({TokenColumn.OLD_LOGPROBS})),
}
_SCORES = (-0.25, -4.0)


def _key(query: int, agent: str = "solver", *, trajectory: int = 0, step: int = 0) -> SampleKey:
    return SampleKey(step, query, trajectory, AgentName(agent), 0, 0)


def _turn(key: SampleKey, attempt: int = 0) -> TurnRow:
    return TurnRow(
        key=key,
        attempt=attempt,
        policy=_POLICY_OF[key.agent],
        policy_version=key.step,
        weights_version=key.step,
        prompt_tokens=(1, 2, 3),
        response_tokens=(attempt, key.query),
        logprobs=(-0.5, -1.5),
        temperature=0.5,
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan(start=0, end=2, policy_version=key.step),),
    )


def _sample(key: SampleKey, attempt: int = 0) -> Sample:
    tokens = {TokenColumn.OLD_LOGPROBS: _SCORES} if _POLICY_OF[key.agent] == BLUE else {}
    return Sample(turn=_turn(key, attempt), advantage=0.5, reward=1.0, token_columns=tokens)


def _outcome(keys: Sequence[SampleKey], attempt: int = 0) -> OutcomeRecord:
    red = [key for key in keys if _POLICY_OF[key.agent] == RED]
    return OutcomeRecord(
        trajectory=keys[0].trajectory_key,
        attempt=attempt,
        rewards={key.agent: 1.0 for key in keys},
        turns=tuple(sorted(keys)),
        turn_columns=tuple(TurnColumns(key=key, values={"level": 1}) for key in red),
    )


def _dispatch(num_queries: int, step: int = 0) -> DispatchRecord:
    queries = tuple(range(num_queries))
    return DispatchRecord(step=step, min_version=step, max_version=step, queries=queries, num_trajectories=1)


async def _opened(make_store: MakeStore, num_queries: int, *ready: SampleKey) -> ExperienceStore:
    """Return a store with one step; the rows `ready`, each of a trajectory of its own, are ready."""
    store = await make_store(_COLUMNS)
    await store.open_step(_dispatch(num_queries))
    for key in ready:
        await _finish(store, [key])
    return store


async def _finish(store: ExperienceStore, keys: Sequence[SampleKey]) -> None:
    attempt = await store.begin_attempt(keys[0].trajectory_key)
    for key in keys:
        await store.put_turn(_turn(key, attempt))
    await store.record_outcome(_outcome(keys, attempt))
    for key in keys:
        policy = _POLICY_OF[key.agent]
        await store.fill(policy, [AdvantageValue(key=key, advantage=0.5, reward=1.0)])
        if policy == BLUE:
            await store.fill_tokens(BLUE, TokenColumn.OLD_LOGPROBS, [TokenValues(key=key, values=_SCORES)])


async def _ready(store: ExperienceStore, policy: PolicyName = RED) -> list[SampleKey]:
    return [key for key, _ in await store.ready(policy, 0)]


async def _train(
    store: ExperienceStore, micro_batch_id: str, *keys: SampleKey, holder: HolderId = HOLDER, num_passes_done: int = 0
) -> None:
    policy = _POLICY_OF[keys[0].agent]
    lease, _ = await store.lease(policy, holder, micro_batch_id, keys, num_passes_done=num_passes_done)
    await store.acknowledge(lease)


def _commit(num_passes: int = 1, step: int = 0, **micro_batches: tuple[str, ...]) -> CommitRecord:
    policies = {
        PolicyName(policy): PolicyCommit(
            weights_version=step + 1,
            weights_digest=f"{policy}-{step}",
            denominators=Denominators(num_samples=len(ids), num_tokens=2 * len(ids)),
            micro_batches=ids,
            update_sizes=(len(ids),),
            num_passes=num_passes,
        )
        for policy, ids in micro_batches.items()
    }
    return CommitRecord(step=step, policy_version=step + 1, policies=policies)


async def _refused(call: Awaitable[Any], error: type[FlexMARLError]) -> None:
    caught: FlexMARLError | None = None
    try:
        await call
    except FlexMARLError as raised:
        caught = raised
    assert type(caught) is error, f"expected {error.__name__}, got {caught!r}"
    assert str(caught), "an error says what is wrong"


# --- checks -----------------------------------------------------------------------------------------------------------


async def check_rows_become_ready_with_outcome_and_every_required_column(make_store: MakeStore) -> None:
    """In any order, and only then; they are read as they were put."""
    solver, checker = _key(0), _key(0, "checker")
    store = await _opened(make_store, 1)
    await _finish(store, [solver, checker])
    assert await store.ready(RED, 0) == [(solver, 5)]
    assert await store.ready(BLUE, 0) == [(checker, 5)]
    for key in (solver, checker):
        lease, samples = await store.lease(_POLICY_OF[key.agent], HOLDER, "m0", [key])
        assert (lease.keys, samples) == ((key,), [_sample(key)])
    await store.close()


async def check_an_outcome_is_whole(make_store: MakeStore) -> None:
    """A missing turn, a missing required column and a reward that is no number refuse all of it."""
    solver, checker = _key(0), _key(0, "checker")
    store = await _opened(make_store, 1)
    await store.begin_attempt(solver.trajectory_key)
    await store.put_turn(_turn(solver))
    await _refused(store.record_outcome(_outcome([solver, checker])), InvariantError)
    await _refused(store.record_outcome(replace(_outcome([solver]), turn_columns=())), ConfigError)
    bad = replace(_outcome([solver]), rewards={solver.agent: float("nan")})
    await _refused(store.record_outcome(bad), ConfigError)
    await store.fill(RED, [AdvantageValue(key=solver, advantage=0.5, reward=1.0)])
    assert await _ready(store) == []
    await store.record_outcome(_outcome([solver]))
    assert await _ready(store) == [solver]
    await store.close()


async def check_repeating_changes_nothing_and_other_content_is_refused(make_store: MakeStore) -> None:
    """Of turns, outcomes, columns and dispatch records."""
    key = _key(0)
    store = await _opened(make_store, 1, key)
    await store.open_step(_dispatch(1))
    await _refused(store.open_step(_dispatch(2)), InvariantError)
    await store.put_turn(_turn(key))
    await _refused(store.put_turn(replace(_turn(key), logprobs=(-0.5, -1.0))), InvariantError)
    await store.record_outcome(_outcome([key]))
    await _refused(store.record_outcome(replace(_outcome([key]), success=True)), InvariantError)
    await store.fill(RED, [AdvantageValue(key=key, advantage=0.5, reward=1.0)])
    await _refused(store.fill(RED, [AdvantageValue(key=key, advantage=0.5, reward=2.0)]), InvariantError)
    assert await _ready(store) == [key]
    await store.close()


async def check_a_new_attempt_supersedes_the_older_one(make_store: MakeStore) -> None:
    """Rows of two attempts are never mixed, and what comes late for the older one is fenced."""
    key = _key(0)
    store = await _opened(make_store, 1)
    await store.begin_attempt(key.trajectory_key)
    await store.put_turn(_turn(key))
    assert await store.begin_attempt(key.trajectory_key) == 1
    await _refused(store.put_turn(_turn(key)), FencedError)
    await _refused(store.record_outcome(_outcome([key])), FencedError)
    await store.put_turn(_turn(key, 1))
    await store.record_outcome(_outcome([key], 1))
    await store.fill(RED, [AdvantageValue(key=key, advantage=0.5, reward=1.0)])
    _, samples = await store.lease(RED, HOLDER, "m0", [key])
    assert samples == [_sample(key, 1)]
    await _refused(store.begin_attempt(key.trajectory_key), InvariantError)
    assert (await store.progress(0))[RED].num_superseded == 1
    await store.close()


async def check_turns_of_other_versions_are_refused(make_store: MakeStore) -> None:
    """A step takes only what its versions generated."""
    key = _key(0)
    store = await _opened(make_store, 1)
    await store.begin_attempt(key.trajectory_key)
    span = VersionSpan(start=0, end=2, policy_version=1)
    await _refused(store.put_turn(replace(_turn(key), version_spans=(span,))), InvariantError)
    await store.close()


async def check_a_lease_is_all_or_none_and_a_released_one_is_fenced(make_store: MakeStore) -> None:
    """No row is leased twice; unsealed work of a holder that is gone is ready again."""
    keys = [_key(query) for query in range(3)]
    store = await _opened(make_store, 3, *keys)
    lease, _ = await store.lease(RED, HOLDER, "m0", keys[:1])
    await _refused(store.lease(RED, NEXT_HOLDER, "m1", keys[:2]), CapacityError)
    await _train(store, "m1", keys[1])
    assert await store.release(HOLDER) == keys[:2]
    await _refused(store.acknowledge(lease), FencedError)
    again, _ = await store.lease(RED, NEXT_HOLDER, "m0", keys)
    assert again.lease_id > lease.lease_id
    await _refused(store.acknowledge(lease), FencedError)
    await store.close()


async def check_a_fenced_holder_does_nothing_any_more(make_store: MakeStore) -> None:
    """Not even when it wakes up late."""
    keys = [_key(query) for query in range(2)]
    store = await _opened(make_store, 2, *keys)
    lease, _ = await store.lease(RED, HOLDER, "m0", keys[:1])
    assert await store.fence(HOLDER) == keys[:1]
    await _refused(store.acknowledge(lease), FencedError)
    await _refused(store.lease(RED, HOLDER, "m1", keys[1:]), FencedError)
    await _refused(store.claim(RED, 0, HOLDER, "m1", max_rows=1, timeout_s=0.0), FencedError)
    assert await _ready(store) == keys
    await store.close()


async def check_a_claim_waits_for_rows_until_its_deadline(make_store: MakeStore) -> None:
    """And takes the first ones in key order."""
    keys = [_key(query) for query in range(3)]
    store = await _opened(make_store, 3)
    assert await store.claim(RED, 0, HOLDER, "m0", max_rows=2, timeout_s=0.01) is None
    waiting = asyncio.ensure_future(store.claim(RED, 0, HOLDER, "m0", max_rows=2, timeout_s=30.0))
    await asyncio.sleep(0)
    whole = [FinishedTrajectory(outcome=_outcome([key]), turns=(_turn(key),), advantages=(0.5,)) for key in keys]
    await store.put_finished(whole)
    claimed = await waiting
    assert claimed is not None
    assert claimed[0].keys == tuple(keys[:2])
    assert claimed[1] == [_sample(key) for key in keys[:2]]
    await store.put_finished(whole)
    assert await _ready(store) == keys[2:]
    await store.close()


async def check_sealed_rows_survive_their_holder(make_store: MakeStore) -> None:
    """A seal continues the current one, and is of its holder's acknowledged micro-batches."""
    keys = [_key(query) for query in range(2)]
    store = await _opened(make_store, 2, *keys)
    await _train(store, "m0", keys[0])
    await _train(store, "m1", keys[1])
    first = Seal(
        policy=RED,
        step=0,
        object_key=ObjectKey("seal", RED, 1),
        predecessor=None,
        micro_batches=("m0",),
        denominators=Denominators(num_samples=1, num_tokens=2),
    )
    await store.seal(HOLDER, first)
    assert await store.current_seal(RED, 0) == first
    await _refused(store.seal(HOLDER, replace(first, object_key=ObjectKey("seal", RED, 2))), InvariantError)
    assert await store.release(HOLDER) == keys[1:]
    progress = (await store.progress(0))[RED]
    assert (progress.num_sealed, progress.num_ready) == (1, 1)
    await store.close()


async def check_all_policies_are_committed_or_none(make_store: MakeStore) -> None:
    """A commit that would lose a sample, a trajectory or a policy changes nothing."""
    solver, checker = _key(0), _key(0, "checker")
    store = await _opened(make_store, 2)
    await _finish(store, [solver, checker])
    await _train(store, "m0", solver)
    record = _commit(red=("m0",), blue=("m0",))
    await _refused(store.commit(record), InvariantError)
    await _train(store, "m0", checker)
    await _refused(store.commit(record), InvariantError)  # query 1 has not ended
    failed = TrajectoryKey(0, 1, 0)
    attempt = await store.begin_attempt(failed)
    failure = TrajectoryFailure(trajectory=failed, attempt=attempt, kind="timeout", message="")
    await store.record_failure(failure)
    await _refused(store.commit(_commit(red=("m0",))), InvariantError)
    assert await store.last_commit() is None
    assert [stored.trajectories[1].failure for stored in await store.open_steps()] == [failure]
    await store.commit(record)
    await store.commit(record)
    assert await store.last_commit() == record
    assert await store.commits_after(0) == [record]
    assert await store.trained_ids(0) == {RED: [solver], BLUE: [checker]}
    assert await store.open_steps() == []
    await store.close()


async def check_further_passes_are_counted_and_replayed_in_order(make_store: MakeStore) -> None:
    """Each sample is used equally often; a committed micro-batch is read as it was trained."""
    keys = [_key(query) for query in range(2)]
    store = await _opened(make_store, 2, *keys)
    await _train(store, "m0", *keys)
    await _refused(store.lease(RED, NEXT_HOLDER, "m1", keys, num_passes_done=1), CapacityError)
    await _train(store, "m1", keys[1], num_passes_done=1)
    await _refused(store.commit(_commit(2, red=("m0", "m1"))), InvariantError)
    await _train(store, "m2", keys[0], num_passes_done=1)
    await store.commit(_commit(2, red=("m0", "m1", "m2")))
    assert await store.micro_batch(RED, 0, "m1") == [_sample(keys[1])]
    assert await store.micro_batch(RED, 0, "m0") == [_sample(key) for key in keys]
    await store.close()


async def check_a_step_is_extended_where_it_ends(make_store: MakeStore) -> None:
    """A trajectory that was not dispatched does not begin."""
    added = _key(0, trajectory=1)
    store = await _opened(make_store, 1)
    await _refused(store.begin_attempt(added.trajectory_key), InvariantError)
    extension = StepExtension(step=0, query=0, first_trajectory=1, num_trajectories=1)
    await _refused(store.extend_step(replace(extension, first_trajectory=2)), InvariantError)
    await store.extend_step(extension)
    await store.extend_step(extension)
    await _finish(store, [added])
    assert await _ready(store) == [added]
    (stored,) = await store.open_steps()
    assert stored.extensions == (extension,)
    await store.close()


async def check_pruning_keeps_keys_and_rewinding_forgets(make_store: MakeStore) -> None:
    """Steps at or after a version run again; those before it stay committed."""
    store = await _opened(make_store, 1, _key(0))
    await _train(store, "m0", _key(0))
    await store.commit(_commit(red=("m0",)))
    await store.open_step(_dispatch(1, step=1))
    await _refused(store.prune(2), InvariantError)
    await store.prune(1)
    assert await store.trained_ids(0) == {RED: [_key(0)]}
    await store.begin_attempt(TrajectoryKey(1, 0, 0))
    await store.rewind(1)
    assert await store.open_steps() == []
    await store.open_step(_dispatch(1, step=1))
    assert await store.begin_attempt(TrajectoryKey(1, 0, 0)) == 0
    await store.rewind(0)
    assert await store.last_commit() is None
    assert await store.trained_ids(0) == {}
    await store.close()


STORE_CHECKS: tuple[Check, ...] = (
    check_rows_become_ready_with_outcome_and_every_required_column,
    check_an_outcome_is_whole,
    check_repeating_changes_nothing_and_other_content_is_refused,
    check_a_new_attempt_supersedes_the_older_one,
    check_turns_of_other_versions_are_refused,
    check_a_lease_is_all_or_none_and_a_released_one_is_fenced,
    check_a_fenced_holder_does_nothing_any_more,
    check_a_claim_waits_for_rows_until_its_deadline,
    check_sealed_rows_survive_their_holder,
    check_all_policies_are_committed_or_none,
    check_further_passes_are_counted_and_replayed_in_order,
    check_a_step_is_extended_where_it_ends,
    check_pruning_keeps_keys_and_rewinding_forgets,
)
