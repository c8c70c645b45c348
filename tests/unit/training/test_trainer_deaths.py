"""Trainers under virtual time: deaths at every point, shared slots, and what a seal saves; always the same weights.

Longer than most: its tests share one harness.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from flexmarl.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from flexmarl.core.errors import BackendError
from flexmarl.core.events import AllocationDecided, MicroBatchLeased, WorkerRestarted
from flexmarl.core.ids import AgentName, PolicyName, SampleKey, WorkerId
from flexmarl.core.messages import (
    Activated,
    CacheSealed,
    GradientAccumulated,
    StatePublished,
    UpdateApplied,
    WorkDone,
    WorkerReady,
)
from flexmarl.core.protocols import AdvantageValue, ServiceKind, WorkerHandle, WorkerSpec
from flexmarl.core.records import (
    CommitRecord,
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    PolicyCommit,
    TurnRow,
    VersionSpan,
)
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.runtime.simulated import SimulatedRuntime, run_virtual
from flexmarl.scheduling import ReadySample
from flexmarl.store import SqliteStore
from flexmarl.testing.events import RecordingSink
from flexmarl.training.engine import TrainingEngine
from flexmarl.training.state import PolicyState, PolicyUpdate

pytestmark = pytest.mark.unit

NUM_TRAJECTORIES = 5
TOKEN_S = 0.01
UPDATE_S = 0.5

OnEmit = Callable[[object, "Lab"], None]


class WatchedSink(RecordingSink):
    """Calls back at each record, before it is handled."""

    def __init__(self, on_emit: Callable[[object], None]) -> None:
        super().__init__()
        self._on_emit = on_emit

    def emit(self, record: object, *, source: str = "orchestrator") -> int:
        seq = super().emit(record, source=source)
        self._on_emit(record)
        return seq


class WatchedRuntime(SimulatedRuntime):
    """Remembers the newest worker of each policy."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        super().__init__(runtime._config)
        self.newest: dict[str, WorkerHandle] = {}

    def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> Any:
        worker = super().start(spec, on_fact)
        self.newest[spec.options["policy"]] = worker
        return worker


@dataclass
class Result:
    """What a run came to."""

    digests: list[dict[str, str]] = field(default_factory=list)
    trained: list[dict[PolicyName, list[SampleKey]]] = field(default_factory=list)
    metrics: list[dict[str, dict[str, float]]] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    duration_s: float = 0.0

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


class Lab:
    """A training engine with its own store, under virtual time."""

    def __init__(self, runtime: SimulatedRuntime, policies: Sequence[str], on_emit: OnEmit, **settings: Any) -> None:
        self.runtime = WatchedRuntime(runtime)
        self.policies = [PolicyName(policy) for policy in policies]
        self.sink = WatchedSink(lambda record: on_emit(record, self))
        self.inbox = OrderedInbox(self.sink)
        self.config = TrainingConfig.model_validate(
            {
                "backend": {"kind": "scripted", "token_s": TOKEN_S, "update_s": UPDATE_S, "num_parameters": 4},
                "micro_batch_tokens": 1,
                "seal_every": 2,
                **settings,
            }
        )
        self.result = Result()

    def kill(self, policy: str = "p0") -> None:
        self.runtime.newest[policy].kill()

    def spec(self, policy: str) -> Callable[[WorkerId], WorkerSpec]:
        options = {
            "policy": policy,
            "model_folder": "",
            "seed": 0,
            "backend": self.config.backend.model_dump(mode="json"),
            "algorithm": AlgorithmConfig().model_dump(mode="json"),
            "optimizer": OptimizerConfig().model_dump(mode="json"),
        }
        return lambda worker_id: WorkerSpec(
            worker_id=worker_id,
            kind=ServiceKind.PROCESS_GROUP,
            factory="flexmarl.training.process_group:build_process_group",
            options=options,
        )

    async def run(self, num_steps: int, *, is_serial: bool) -> Result:
        self.store = await SqliteStore.open(None, self.runtime.call)
        self.engine = TrainingEngine(
            self.config,
            {policy: self.spec(policy) for policy in self.policies},
            runtime=self.runtime,
            inbox=self.inbox,
            events=self.sink,
            store=self.store,
        )
        try:
            state = PolicyState(weights_version=0, state_key=None)
            await self._until(lambda done: self.engine.open(dict.fromkeys(self.policies, state), done))
            for step in range(num_steps):
                await self._step(step, is_serial=is_serial)
            self.result.duration_s = self.runtime.clock.now_s()
        finally:
            self.engine.close()
            await self.inbox.close()
            await self.runtime.close()
            self.result.records = self.sink.records
        return self.result

    async def _until(self, start: Callable[[Callable[[], None]], None]) -> None:
        done = asyncio.Event()
        start(done.set)
        async with asyncio.timeout(10_000.0):
            await self.inbox.run_until(done.is_set)

    async def _step(self, step: int, *, is_serial: bool) -> None:
        ready = await self._write_rows(step)
        self.engine.begin_step(step, may_train=not is_serial)
        for policy, samples in ready.items():
            # In two portions, as groups close.
            self.engine.add_ready(policy, samples[:3])
            self.engine.add_ready(policy, samples[3:])
        if is_serial:
            self.engine.allow_training()
        await self._until(lambda done: self.engine.update(step + 1, done))
        updates = self.engine.updates()
        await self.store.commit(commit_of(step, updates))
        self.result.digests.append({policy: update.digest for policy, update in updates.items()})
        self.result.metrics.append({policy: dict(update.metrics) for policy, update in updates.items()})
        self.result.trained.append(await self.store.trained_ids(step))

    async def _write_rows(self, step: int) -> dict[PolicyName, list[ReadySample]]:
        dispatch = DispatchRecord(step=step, policy_version=step, queries=(0,), num_trajectories=NUM_TRAJECTORIES)
        await self.store.open_step(dispatch)
        ready: dict[PolicyName, list[ReadySample]] = {policy: [] for policy in self.policies}
        for trajectory in dispatch.trajectories():
            attempt = await self.store.begin_attempt(trajectory)
            rows = [
                turn_row(SampleKey(step, 0, trajectory.trajectory, AgentName(policy), 0, 0), attempt, policy)
                for policy in self.policies
            ]
            for row in rows:
                await self.store.put_turn(row)
            rewards = {row.key.agent: 1.0 for row in rows}
            turns = tuple(row.key for row in rows)
            await self.store.record_outcome(
                OutcomeRecord(trajectory=trajectory, attempt=attempt, rewards=rewards, turns=turns)
            )
            for row in rows:
                value = AdvantageValue(key=row.key, advantage=trajectory.trajectory - 1.75, reward=1.0)
                await self.store.fill(row.policy, [value])
                num_tokens = len(row.prompt_tokens) + len(row.response_tokens)
                ready[row.policy].append(ReadySample(key=row.key, num_tokens=num_tokens))
        return ready


def turn_row(key: SampleKey, attempt: int, policy: PolicyName) -> TurnRow:
    num_tokens = 1 + key.trajectory
    return TurnRow(
        key=key,
        attempt=attempt,
        policy=policy,
        policy_version=key.step,
        weights_version=key.step,
        prompt_tokens=(1, 2),
        response_tokens=(3,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=num_tokens, policy_version=key.step),),
    )


def commit_of(step: int, updates: dict[PolicyName, PolicyUpdate]) -> CommitRecord:
    policies = {
        policy: PolicyCommit(
            weights_version=update.weights_version,
            weights_digest=update.digest,
            denominators=update.denominators,
            micro_batches=update.micro_batches,
        )
        for policy, update in updates.items()
    }
    return CommitRecord(step=step, policy_version=step + 1, policies=policies)


def run(
    on_emit: OnEmit = lambda record, lab: None,
    *,
    policies: Sequence[str] = ("p0",),
    num_steps: int = 2,
    is_serial: bool = False,
    **settings: Any,
) -> Result:
    async def main(runtime: SimulatedRuntime) -> Result:
        return await Lab(runtime, policies, on_emit, **settings).run(num_steps, is_serial=is_serial)

    return run_virtual(main)


@pytest.fixture(scope="module")
def undisturbed() -> Result:
    return run()


def is_the_same(found: Result, expected: Result) -> None:
    assert found.digests == expected.digests
    assert found.trained == expected.trained
    assert found.metrics == expected.metrics


# --- deaths -----------------------------------------------------------------------------------------------------------


def matches(record: object, what: type[Any] | str) -> bool:
    if isinstance(what, str):
        return isinstance(record, WorkDone) and record.name.startswith(what)
    return isinstance(record, what)


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
    seen = 0

    def on_emit(record: object, lab: Lab) -> None:
        nonlocal seen
        if matches(record, what):
            seen += 1
            if seen == count:
                if is_late:  # after the record was handled, and the next command was sent
                    asyncio.get_running_loop().call_soon(lab.kill)
                else:
                    lab.kill()

    found = run(on_emit)
    is_the_same(found, undisturbed)
    # The last update is the end of the run: nobody is started after it.
    assert len(found.of(WorkerRestarted)) == (1 if seen >= count and (what, count) != (UpdateApplied, 2) else 0)


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


def wait(lab: Lab, done: Callable[[], None]) -> None:
    lab.inbox.set_timer("later", 10.0, done)


def test_a_suspension_seals_first_and_activation_continues_from_the_seal() -> None:
    async def main(runtime: SimulatedRuntime) -> Result:
        lab = Lab(runtime, ["p0", "p1"], lambda record, lab: None, num_slots=1, seal_every=100)

        async def in_turns(step: int, *, is_serial: bool) -> None:
            ready = await lab._write_rows(step)
            lab.engine.begin_step(step, may_train=True)
            for policy, part in (("p0", slice(0, 3)), ("p1", slice(0, 4)), ("p0", slice(3, 5)), ("p1", slice(4, 5))):
                lab.engine.add_ready(PolicyName(policy), ready[PolicyName(policy)][part])
                # Ten seconds later it has long been idle; nobody else has waited for its slot.
                await lab._until(lambda done: wait(lab, done))
            await lab._until(lambda done: lab.engine.update(step + 1, done))
            lab.result.digests.append({policy: update.digest for policy, update in lab.engine.updates().items()})

        lab._step = in_turns  # type: ignore[method-assign]
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
        write_rows = lab._write_rows

        async def only_p0(step: int) -> dict[PolicyName, list[ReadySample]]:
            ready = await write_rows(step)
            await lab.store.mask(PolicyName("p1"), [sample.key for sample in ready[PolicyName("p1")]], "test")
            return {**ready, PolicyName("p1"): []}

        lab._write_rows = only_p0  # type: ignore[method-assign]
        result = await lab.run(2, is_serial=False)
        assert len({digests["p1"] for digests in result.digests}) == 1
        assert len({digests["p0"] for digests in result.digests}) == 2
        update = lab.engine.updates()[PolicyName("p1")]
        assert (update.weights_version, update.micro_batches) == (0, ())

    run_virtual(main)
