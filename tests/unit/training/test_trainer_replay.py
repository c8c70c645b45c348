"""The training side of committed steps run again: the recorded bits or an error, whatever dies."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from trainer_lab import Killer, Lab, Result, matches, run

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError, StoreError
from flexmarl.core.events import MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import AgentName, PolicyName, SampleKey
from flexmarl.core.messages import Activated, GradientAccumulated, UpdateApplied, WorkerReady
from flexmarl.core.records import CommitRecord, Denominators, PolicyCommit, TokenColumn
from flexmarl.runtime.simulated import SimulatedRuntime, run_virtual

pytestmark = pytest.mark.unit

P0, P1 = PolicyName("p0"), PolicyName("p1")
ONE_UPDATE = AlgorithmConfig()
FOUR_UPDATES = AlgorithmConfig(num_epochs=2, num_minibatches=2)


def replayed(
    on_emit: Any = lambda record, lab: None,
    *,
    algorithm: AlgorithmConfig = ONE_UPDATE,
    num_policies: int = 2,
    changed: Any = lambda record: record,
    **settings: Any,
) -> tuple[Result, Result]:
    """Run two steps, then replay them in a fresh engine; `changed` may change their records. Returns both."""
    policies = [f"p{number}" for number in range(num_policies)]
    columns = [TokenColumn.OLD_LOGPROBS] if algorithm is FOUR_UPDATES else []

    async def main(runtime: SimulatedRuntime) -> tuple[Result, Result]:
        first = Lab(runtime, policies, lambda record, lab: None, algorithm=algorithm, columns=columns)
        trained = await first.run(2)
        again = Lab(runtime, policies, on_emit, algorithm=algorithm, **settings)
        return trained, await again.replay(first.store, [changed(record) for record in trained.commits])

    return run_virtual(main)


def changed_commit(**fields: Any) -> Any:
    """Return a function that changes fields of policy p1's part of step 1."""

    def change(record: CommitRecord) -> CommitRecord:
        if record.step == 0:
            return record
        return replace(record, policies={**record.policies, P1: replace(record.policies[P1], **fields)})

    return change


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("algorithm", [ONE_UPDATE, FOUR_UPDATES], ids=["one update", "four updates"])
def test_g5_replaying_committed_steps_gives_the_same_weights(algorithm: AlgorithmConfig, num_slots: int) -> None:
    trained, again = replayed(algorithm=algorithm, num_slots=num_slots)
    assert again.digests == trained.digests
    assert again.metrics == trained.metrics
    assert not again.of(MicroBatchLeased)
    # Micro-batches as they were cut, in the order in which they were added.
    for policy in (P0, P1):
        added = [fact.micro_batch_id for fact in again.of(GradientAccumulated) if fact.policy == policy]
        assert added == [name for record in trained.commits for name in record.policies[policy].micro_batches]


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("what", "count"),
    [
        (what, count)
        for what in (WorkerReady, Activated, "store.micro_batch", GradientAccumulated, UpdateApplied)
        for count in (1, 4)
    ],
)
@pytest.mark.parametrize("algorithm", [ONE_UPDATE, FOUR_UPDATES], ids=["one update", "four updates"])
def test_g2_a_death_in_the_middle_of_a_replay(
    algorithm: AlgorithmConfig, what: type[Any] | str, count: int, is_late: bool
) -> None:
    killer = Killer(what, count, is_late=is_late)
    trained, again = replayed(killer, algorithm=algorithm, num_policies=1)
    assert again.digests == trained.digests
    assert again.metrics == trained.metrics
    num_updates = sum(len(record.policies[P0].update_sizes) for record in trained.commits)
    is_after_the_end = what is UpdateApplied and count >= num_updates
    assert len(again.of(WorkerRestarted)) == (1 if killer.has_struck and not is_after_the_end else 0)


def test_g7_a_replay_that_kills_its_process_group_ends_the_run_and_names_the_rows() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if matches(record, "store.micro_batch p0/s1/m2"):
            asyncio.get_running_loop().call_soon(lab.kill)

    with pytest.raises(BackendError, match=r"ended 3 times .* with micro-batch p0/s1/m2 \(rows s1/q0/t2/p0/b0/n0\)"):
        replayed(on_emit, num_policies=1)


def test_a_step_without_samples_of_a_policy_leaves_it_alone() -> None:
    kept = PolicyCommit(weights_version=1, weights_digest="", denominators=Denominators(), micro_batches=())
    trained, again = replayed(
        changed=lambda record: record if record.step == 0 else replace(record, policies={**record.policies, P1: kept})
    )
    assert again.digests[1] == {"p0": trained.digests[1]["p0"], "p1": trained.digests[0]["p1"]}
    assert again.metrics[1]["p1"] == {}


def test_g5_other_weights_than_committed_end_the_run() -> None:
    with pytest.raises(StoreError) as caught:
        replayed(changed=changed_commit(weights_digest="0123"))
    text = str(caught.value)
    assert "replaying step 1 gives policy p1 other weights than were committed: digest " in text
    assert "recorded are 0123 of Denominators(num_samples=5, num_tokens=15)" in text
    assert "training.backend.accumulation=canonical" in text
    assert "checkpoint.replay=false" in text


def test_g5_nobody_hears_that_a_replay_with_other_weights_is_done() -> None:
    calls: list[str] = []

    async def main(runtime: SimulatedRuntime) -> None:
        first = Lab(runtime, ["p0", "p1"], lambda record, lab: None)
        trained = await first.run(2)
        again = Lab(runtime, ["p0", "p1"], lambda record, lab: None)

        async def replay() -> None:
            changed = [changed_commit(weights_digest="0123")(record) for record in trained.commits]

            def start(done: Callable[[], None]) -> None:

                def second() -> None:
                    calls.append("first")
                    again.engine.replay(changed[1], lambda: calls.append("second"))

                again.engine.replay(changed[0], second)

            await again.until(start)

        with pytest.raises(StoreError, match="replaying step 1"):
            await again.run_with(replay, first.store)
        # For whoever reports it: the weights that came out.
        assert again.engine.updates()[P1].digest == trained.digests[1]["p1"]

    run_virtual(main)
    assert calls == ["first"]


def test_g5_other_denominators_than_committed_end_the_run() -> None:
    with pytest.raises(StoreError, match=r"num_tokens=15\), recorded are .* num_tokens=16"):
        replayed(changed=changed_commit(denominators=Denominators(num_samples=5, num_tokens=16)))


def test_a_record_whose_updates_do_not_add_up_is_refused() -> None:
    with pytest.raises(StoreError, match=r"step 1 has 5 micro-batches of policy p1 in updates of \(\): it is damaged"):
        replayed(changed=changed_commit(update_sizes=()))


def test_g5_a_row_that_is_changed_in_the_store_shows() -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        first = Lab(runtime, ["p0"], lambda record, lab: None)
        trained = await first.run(1)
        read = first.store.micro_batch
        key = SampleKey(0, 0, 3, AgentName("p0"), 0, 0)

        async def other_advantage(policy: PolicyName, step: int, micro_batch_id: str) -> Any:
            samples = await read(policy, step, micro_batch_id)
            return [replace(sample, advantage=1.5) if sample.turn.key == key else sample for sample in samples]

        first.store.micro_batch = other_advantage  # type: ignore[method-assign]
        await Lab(runtime, ["p0"], lambda record, lab: None).replay(first.store, trained.commits)

    with pytest.raises(StoreError, match="replaying step 0 gives policy p0 other weights"):
        run_virtual(main)


def test_training_goes_on_after_a_replay() -> None:
    expected = run(num_steps=3).digests

    async def main(runtime: SimulatedRuntime) -> list[dict[str, str]]:
        first = Lab(runtime, ["p0"], lambda record, lab: None)
        trained = await first.run(2)
        again = Lab(runtime, ["p0"], lambda record, lab: None)

        async def replay_and_go_on() -> None:
            for record in trained.commits:
                await again.until(lambda done, record=record: again.engine.replay(record, done))  # type: ignore[misc]
            await again.step(2)

        return (await again.run_with(replay_and_go_on, first.store)).digests

    assert run_virtual(main) == expected[2:]
