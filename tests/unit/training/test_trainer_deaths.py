"""Trainers under virtual time: deaths at every point, shared slots, and what a seal saves; always the same weights."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from trainer_lab import TOKEN_S, UPDATE_S, Killer, Lab, Result, is_the_same, matches, run, wait

from flexmarl.core.errors import BackendError
from flexmarl.core.events import AllocationDecided, MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.messages import (
    Activated,
    CacheSealed,
    GradientAccumulated,
    StatePublished,
    UpdateApplied,
    WorkerReady,
)
from flexmarl.runtime.simulated import SimulatedRuntime, run_virtual
from flexmarl.scheduling import ReadySample

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    return run()


# --- deaths -----------------------------------------------------------------------------------------------------------


POINTS: list[tuple[str, type[Any] | str]] = [
    ("ready to activate", WorkerReady),
    ("activated", Activated),
    ("first state published", StatePublished),
    ("lease in flight", MicroBatchLeased),
    ("lease granted", "store.lease"),
    ("backward done, not acknowledged", GradientAccumulated),
    ("acknowledged", "store.acknowledge"),
    ("cache sealed, not recorded", CacheSealed),
    ("seal recorded", "store.seal"),
    ("update done, not committed", UpdateApplied),
]


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("what", "count"), [(what, count) for _, what in POINTS for count in (1, 2, 3)])
def test_g2_a_death_at_a_point_of_the_protocol(
    undisturbed: Result, what: type[Any] | str, count: int, is_late: bool
) -> None:
    killer = Killer(what, count, is_late=is_late)
    found = run(killer)
    is_the_same(found, undisturbed)
    # The last update is the end of the run: nobody is started after it.
    assert len(found.of(WorkerRestarted)) == (1 if killer.has_struck and (what, count) != (UpdateApplied, 2) else 0)


@pytest.mark.parametrize("first_s", [0.004 + 0.1 * number for number in range(15)])
def test_g2_a_death_at_any_time(undisturbed: Result, first_s: float) -> None:
    # A micro-batch takes 0.03 s and more, an update 0.5 s: the increments fall into each of them.
    assert first_s < undisturbed.duration_s < 1.5 + 1e-9
    for time_s in (first_s, first_s + 0.033, first_s + 0.067):

        def on_emit(record: object, lab: Lab, *, time_s: float = time_s) -> None:
            if len(lab.sink.events) == 1:
                asyncio.get_running_loop().call_at(time_s, lab.kill)

        found = run(on_emit)
        is_the_same(found, undisturbed)
        assert len(found.of(WorkerRestarted)) == (1 if time_s < undisturbed.duration_s else 0)


def test_g2_a_death_repeats_what_was_not_sealed_and_only_that(undisturbed: Result) -> None:
    # seal_every=2, five micro-batches: a death at the fourth backward finds two sealed, one acknowledged, one leased.
    seen = 0

    def on_emit(record: object, lab: Lab) -> None:
        nonlocal seen
        if isinstance(record, GradientAccumulated):
            seen += 1
            if seen == 4:
                lab.kill()

    found = run(on_emit, num_steps=1)
    leased = [record.keys for record in found.of(MicroBatchLeased)]
    assert [keys[0].trajectory for keys in leased] == [0, 1, 2, 3, 2, 3, 4]
    assert len({record.micro_batch_id for record in found.of(MicroBatchLeased)}) == 7
    assert found.digests == undisturbed.digests[:1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_death_between_writing_a_seal_and_reporting_it_leaves_no_object(undisturbed: Result, count: int) -> None:
    lost = ObjectKey("seal", "p0", count)
    is_there: list[bool] = []

    async def main(runtime: SimulatedRuntime) -> Result:
        lab = Lab(runtime, ["p0"], lambda record, lab: None)
        post = lab.inbox.post

        def swallow(source: str, fact: object, handler: Callable[[], None]) -> None:
            if isinstance(fact, CacheSealed) and fact.object_key == lost:
                is_there.append(lab.runtime.objects.info(lost) is not None)
                lab.kill()
                return
            if isinstance(fact, WorkerReady):
                is_there.append(lab.runtime.objects.info(lost) is not None)
            post(source, fact, handler)

        lab.inbox.post = swallow  # type: ignore[method-assign]
        return await lab.run(2)

    is_the_same(run_virtual(main), undisturbed)
    assert is_there == [False, True, False]


@pytest.mark.parametrize("seal_every", [1, 2, 5, 100])
def test_g1_seals_change_no_bit(undisturbed: Result, seal_every: int) -> None:
    is_the_same(run(seal_every=seal_every), undisturbed)


@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 1000])
def test_g1_cuts_change_no_bit(undisturbed: Result, micro_batch_tokens: int) -> None:
    is_the_same(run(micro_batch_tokens=micro_batch_tokens), undisturbed)


def test_g7_a_micro_batch_that_kills_its_process_group_ends_the_run_and_names_the_rows() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if isinstance(record, MicroBatchLeased) and record.keys[0].trajectory == 3:
            asyncio.get_running_loop().call_soon(lab.kill)
            asyncio.get_running_loop().call_later(TOKEN_S, lab.kill)

    with pytest.raises(BackendError) as caught:
        run(on_emit, max_attempts=3)
    text = str(caught.value)
    assert "process group of policy p0 ended 3 times" in text
    assert "training.max_attempts=3" in text


def test_g7_a_process_group_that_cannot_start_ends_the_run() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if isinstance(record, WorkerReady):
            lab.kill()

    with pytest.raises(BackendError, match="process group of policy p0 ended 3 times .*signal SIGKILL"):
        run(on_emit)


def test_g7_a_command_without_an_end_gets_its_process_group_killed(undisturbed: Result) -> None:
    # An update takes UPDATE_S; with a shorter time-out it never ends.
    # The samples that were not sealed are trained again before each try: that is no progress.
    with pytest.raises(BackendError, match="ended 3 times .* with ApplyUpdate in flight; .*signal SIGKILL"):
        run(micro_batch_timeout_s=UPDATE_S / 2)
    is_the_same(run(micro_batch_timeout_s=UPDATE_S * 2), undisturbed)


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_serial", [False, True])
@pytest.mark.parametrize("num_policies", [2, 3])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_g6_policies_that_share_slots_train_as_if_each_was_alone(
    num_policies: int, num_slots: int, is_serial: bool
) -> None:
    policies = [f"p{number}" for number in range(num_policies)]
    shared = run(policies=policies, num_slots=num_slots, is_serial=is_serial)
    for policy in policies:
        alone = run(policies=[policy])
        assert [digests[policy] for digests in shared.digests] == [digests[policy] for digests in alone.digests]
        assert [keys[PolicyName(policy)] for keys in shared.trained] == [
            keys[PolicyName(policy)] for keys in alone.trained
        ]
    assert_slots_are_exclusive(shared, num_slots)


def assert_slots_are_exclusive(result: Result, num_slots: int) -> None:
    """A slot is given away only after its holder was told to leave it; a busy policy is never told."""
    holders: dict[int, str] = {}
    for record in result.of(AllocationDecided):
        assert 0 <= record.slot < num_slots
        if record.action == "activate":
            assert record.slot not in holders
            holders[record.slot] = record.policy
        else:
            assert holders.pop(record.slot) == record.policy


@pytest.mark.parametrize("what", ["store.seal", "store.acknowledge", Activated, UpdateApplied])
def test_g6_a_death_while_slots_are_shared(what: type[Any] | str) -> None:
    policies = ["p0", "p1", "p2"]
    expected = run(policies=policies)
    for count in range(1, 9):
        seen = 0

        def on_emit(record: object, lab: Lab, *, count: int = count) -> None:
            nonlocal seen
            if matches(record, what):
                seen += 1
                if seen == count:
                    for policy in policies:
                        if policy in lab.runtime.newest:
                            lab.kill(policy)

        is_the_same(run(on_emit, policies=policies, num_slots=1), expected)


def test_a_suspension_seals_first_and_activation_continues_from_the_seal() -> None:
    async def main(runtime: SimulatedRuntime) -> Result:
        lab = Lab(runtime, ["p0", "p1"], lambda record, lab: None, num_slots=1, seal_every=100)

        async def in_turns(step: int, *, is_serial: bool = False) -> None:
            ready = await lab.write_rows(step)
            lab.engine.begin_step(step, may_train=True)
            for policy, part in (("p0", slice(0, 3)), ("p1", slice(0, 4)), ("p0", slice(3, 5)), ("p1", slice(4, 5))):
                lab.engine.add_ready(PolicyName(policy), ready[PolicyName(policy)][part])
                # Ten seconds later it has long been idle; nobody else has waited for its slot.
                await lab.until(lambda done: wait(lab, done))
            await lab.until(lambda done: lab.engine.update(step + 1, done))
            lab.result.digests.append({policy: update.digest for policy, update in lab.engine.updates().items()})

        lab.step = in_turns  # type: ignore[method-assign]
        return await lab.run(1, is_serial=False)

    result = run_virtual(main)
    first = next(place for place, record in enumerate(result.records) if isinstance(record, MicroBatchLeased))
    story = [
        f"{getattr(record, 'action', 'seal')} {record.policy}"
        for record in result.records[first:]
        if isinstance(record, AllocationDecided | CacheSealed)
    ]
    # Who has the slot when the first samples come is of no concern; from then on:
    turns = ["seal p0", "suspend p0", "activate p1", "seal p1", "suspend p1", "activate p0", "seal p0", "suspend p0"]
    assert story[: len(turns)] == turns
    assert result.digests == run(policies=["p0", "p1"], num_steps=1).digests


def test_a_policy_without_samples_keeps_its_weights() -> None:
    async def main(runtime: SimulatedRuntime) -> None:
        lab = Lab(runtime, ["p0", "p1"], lambda record, lab: None)
        write_rows = lab.write_rows

        async def only_p0(step: int) -> dict[PolicyName, list[ReadySample]]:
            ready = await write_rows(step)
            await lab.store.mask(PolicyName("p1"), [sample.key for sample in ready[PolicyName("p1")]], "test")
            return {**ready, PolicyName("p1"): []}

        lab.write_rows = only_p0  # type: ignore[method-assign]
        result = await lab.run(2, is_serial=False)
        assert len({digests["p1"] for digests in result.digests}) == 1
        assert len({digests["p0"] for digests in result.digests}) == 2
        update = lab.engine.updates()[PolicyName("p1")]
        assert (update.weights_version, update.micro_batches) == (0, ())

    run_virtual(main)
