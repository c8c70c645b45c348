"""Several updates per step: the plan that was agreed, one publication, and the same weights whatever dies."""

import asyncio
from typing import Any

import pytest
from trainer_lab import UPDATE_S, Killer, Lab, Result, is_the_same, matches, run

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import BackendError
from flexmarl.core.events import AllocationDecided, MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import ObjectKey, PolicyName, SampleKey
from flexmarl.core.messages import Activated, CacheSealed, GradientAccumulated, UpdateApplied, WorkerReady
from flexmarl.core.records import Denominators, TokenColumn
from flexmarl.core.rng import HashRng, derive_seed

pytestmark = pytest.mark.unit

OLD = TokenColumn.OLD_LOGPROBS
TWO_BY_TWO = AlgorithmConfig(num_epochs=2, num_minibatches=2)
P0 = PolicyName("p0")


def passes_run(*args: Any, algorithm: AlgorithmConfig = TWO_BY_TWO, **settings: Any) -> Result:
    return run(*args, algorithm=algorithm, columns=[OLD], **settings)


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    return passes_run()


def test_g2_every_sample_is_used_once_per_epoch_in_seeded_order(undisturbed: Result) -> None:
    # One sample per micro-batch (micro_batch_tokens=1). Five samples in two parts: three, then two.
    leased = [record.keys for record in undisturbed.of(MicroBatchLeased)]
    assert all(len(keys) == 1 for keys in leased)
    trained = [keys[0] for keys in leased]
    for step in (0, 1):
        for epoch in (0, 1):
            order = [SampleKey(step, 0, number, key.agent, 0, 0) for number, key in enumerate(trained[:5])]
            HashRng(derive_seed(0, "minibatches", step, "p0", epoch)).shuffle(order)
            # Within a part, shorter ones come first: trajectory n has n + 1 tokens.
            expected = sorted(order[:3]) + sorted(order[3:])
            start = 10 * step + 5 * epoch
            assert trained[start : start + 5] == expected


def test_the_commit_says_what_was_done(undisturbed: Result) -> None:
    commit = undisturbed.commits[1].policies[P0]
    assert commit.update_sizes == (3, 2, 3, 2)
    assert commit.num_passes == 2
    # 1 + 2 + 3 + 4 + 5 response tokens, each sample counted once.
    assert commit.denominators == Denominators(num_samples=5, num_tokens=15)
    assert commit.micro_batches == tuple(f"p0/s1/m{number}" for number in range(10))
    assert commit.weights_version == 2
    assert len({digests["p0"] for digests in undisturbed.digests}) == 2
    metrics = undisturbed.metrics[1]["p0"]
    assert metrics["num_updates_sum"] == 4.0
    assert metrics["agent.p0.trained_samples_sum"] == 10.0


def test_g4_only_the_last_update_of_a_step_is_published(undisturbed: Result) -> None:
    updates = undisturbed.of(UpdateApplied)
    assert [update.policy_version for update in updates] == [1] * 4 + [2] * 4
    assert [bool(update.weights_digest) for update in updates] == 2 * [False, False, False, True]
    assert not undisturbed.of(CacheSealed)


def test_it_never_streams() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if isinstance(record, MicroBatchLeased) and record.micro_batch_id.endswith("/m0"):
            seen.append(lab.num_updates_asked)

    seen: list[int] = []
    passes_run(on_emit)
    assert seen == [1, 2]


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(num_epochs=3), AlgorithmConfig(num_minibatches=7)])
def test_epochs_without_minibatches_and_more_minibatches_than_samples(algorithm: AlgorithmConfig) -> None:
    commit = passes_run(algorithm=algorithm).commits[0].policies[P0]
    expected = {3: (5, 5, 5), 1: (1, 1, 1, 1, 1)}[algorithm.num_epochs]
    assert commit.update_sizes == expected
    assert commit.denominators == Denominators(num_samples=5, num_tokens=15)


def test_cuts_within_an_update_change_no_bit(undisturbed: Result) -> None:
    # Integer gradients: neither the number of micro-batches nor their order within an update can show.
    assert passes_run(micro_batch_tokens=1000).digests == undisturbed.digests


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("what", "count"),
    [(what, count) for what in ("store.lease", GradientAccumulated, "store.acknowledge") for count in (1, 3, 4, 6, 10)]
    + [(UpdateApplied, count) for count in range(1, 8)]
    + [(Activated, 1)],
)
def test_g2_a_death_between_updates_starts_the_sequence_again(
    undisturbed: Result, what: type[Any] | str, count: int, is_late: bool
) -> None:
    found = passes_run(Killer(what, count, is_late=is_late))
    is_the_same(found, undisturbed)
    assert len(found.of(WorkerRestarted)) == 1


def test_g2_a_death_repeats_the_whole_step_under_new_names(undisturbed: Result) -> None:
    found = passes_run(Killer(UpdateApplied, 2, is_late=True), num_steps=1)
    leased = found.of(MicroBatchLeased)
    # Five of pass 0; the first of pass 1 was asked for; then all ten.
    assert len(leased) == 16
    assert len({record.micro_batch_id for record in leased}) == 16
    assert found.commits[0].policies[P0].micro_batches == tuple(f"p0/s0/m{number}" for number in range(6, 16))
    assert found.digests == undisturbed.digests[:1]


def test_g4_a_death_between_publishing_and_reporting_leaves_nothing_published(undisturbed: Result) -> None:
    weights = ObjectKey("weights", "p0", 1)
    is_published: list[bool] = []
    num_acknowledged = 0

    def kill(lab: Lab) -> None:
        is_published.append(lab.runtime.objects.info(weights) is not None)
        lab.kill()

    def on_emit(record: object, lab: Lab) -> None:
        nonlocal num_acknowledged
        num_acknowledged += matches(record, "store.acknowledge")
        if num_acknowledged == 10 and matches(record, "store.acknowledge"):
            # The last update takes UPDATE_S; its objects are written at once, its fact comes at the end.
            asyncio.get_running_loop().call_later(UPDATE_S / 2, kill, lab)
        if isinstance(record, WorkerReady):
            is_published.append(lab.runtime.objects.info(weights) is not None)

    found = passes_run(on_emit)
    is_the_same(found, undisturbed)
    assert is_published == [False, True, False]


def test_g7_a_sequence_that_never_ends_stops_the_run() -> None:
    def on_emit(record: object, lab: Lab) -> None:
        if isinstance(record, UpdateApplied):
            asyncio.get_running_loop().call_soon(lab.kill)

    with pytest.raises(BackendError, match=r"ended 3 times \(training.max_attempts=3\) with .* p0/s0/m11 in flight"):
        passes_run(on_emit, max_attempts=3)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_g6_policies_with_several_updates_share_slots_as_if_each_was_alone(num_slots: int) -> None:
    policies = ["p0", "p1", "p2"]
    shared = passes_run(policies=policies, num_slots=num_slots)
    for policy in policies:
        alone = passes_run(policies=[policy])
        assert [digests[policy] for digests in shared.digests] == [digests[policy] for digests in alone.digests]
    holders: dict[int, str] = {}
    for record in shared.records:
        if isinstance(record, AllocationDecided) and record.action == "activate":
            holders[record.slot] = record.policy
        elif isinstance(record, MicroBatchLeased):
            assert record.policy in holders.values()
