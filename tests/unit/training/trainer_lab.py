"""A training engine with its own store under virtual time, for tests of trainers: steps, scores, replays, deaths."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexmarl.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from flexmarl.core.ids import AgentName, ObjectKey, PolicyName, SampleKey, WorkerId
from flexmarl.core.messages import WorkDone
from flexmarl.core.protocols import AdvantageValue, ServiceKind, WorkerHandle, WorkerSpec
from flexmarl.core.records import (
    CommitRecord,
    DispatchRecord,
    FinishReason,
    OutcomeRecord,
    TokenColumn,
    TokenValues,
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
    commits: list[CommitRecord] = field(default_factory=list)
    scored: list[tuple[TokenValues, ...]] = field(default_factory=list)
    """What each score request was answered with, in the order of the answers."""
    records: list[Any] = field(default_factory=list)
    seals_left: list[ObjectKey] = field(default_factory=list)
    """Seal objects that nobody has deleted."""
    duration_s: float = 0.0

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


class Lab:
    """A training engine with its own store, under virtual time."""

    def __init__(
        self,
        runtime: SimulatedRuntime,
        policies: Sequence[str],
        on_emit: OnEmit,
        *,
        algorithm: AlgorithmConfig | None = None,
        columns: Sequence[TokenColumn] = (),
        max_staleness: int = 0,
        **settings: Any,
    ) -> None:
        self.outer = runtime
        self.algorithm = algorithm or AlgorithmConfig()
        self.columns = columns
        """Scored before each step trains."""
        self.max_staleness = max_staleness
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
        self.turns: dict[SampleKey, TurnRow] = {}
        self.rows: list[ReadySample] = []
        """For a test's own use."""
        self.num_updates_asked = 0

    def kill(self, policy: str = "p0") -> None:
        self.runtime.newest[policy].kill()

    def spec(self, policy: str) -> Callable[[WorkerId], WorkerSpec]:
        options = {
            "policy": policy,
            "model_folder": "",
            "seed": 0,
            "backend": self.config.backend.model_dump(mode="json"),
            "algorithm": self.algorithm.model_dump(mode="json"),
            "reference_folder": "",
            "optimizer": OptimizerConfig().model_dump(mode="json"),
        }
        return lambda worker_id: WorkerSpec(
            worker_id=worker_id,
            kind=ServiceKind.PROCESS_GROUP,
            factory="flexmarl.training.process_group:build_process_group",
            options=options,
        )

    async def run(self, num_steps: int, *, is_serial: bool = False, store: SqliteStore | None = None) -> Result:
        async def steps() -> None:
            for step in range(num_steps):
                await self.step(step, is_serial=is_serial)

        return await self.run_with(steps, store)

    async def replay(self, store: SqliteStore, records: Sequence[CommitRecord]) -> Result:
        """Train committed steps again, from the models of version 0."""

        async def steps() -> None:
            for record in records:
                await self.until(lambda done, record=record: self.engine.replay(record, done))  # type: ignore[misc]
                self._keep_updates()

        return await self.run_with(steps, store)

    async def run_with(self, work: Callable[[], Coroutine[Any, Any, None]], store: SqliteStore | None = None) -> Result:
        """Open an engine with fresh models, do the work, close it."""
        # The store outlives this runtime, as it outlives a run.
        self.store = store or await SqliteStore.open(None, self.outer.call)
        self.engine = TrainingEngine(
            self.config,
            {policy: self.spec(policy) for policy in self.policies},
            algorithms=dict.fromkeys(self.policies, self.algorithm),
            run_seed=0,
            max_staleness=self.max_staleness,
            runtime=self.runtime,
            inbox=self.inbox,
            events=self.sink,
            store=self.store,
        )
        try:
            state = PolicyState(weights_version=0, state_key=None)
            await self.until(lambda done: self.engine.open(dict.fromkeys(self.policies, state), done))
            await work()
            self.result.duration_s = self.runtime.clock.now_s()
            seals = [ObjectKey("seal", policy, number) for policy in self.policies for number in range(1, 100)]
            self.result.seals_left = [key for key in seals if self.runtime.objects.info(key) is not None]
        finally:
            self.engine.close()
            await self.inbox.close()
            await self.runtime.close()
            self.result.records = self.sink.records
        return self.result

    async def until(self, start: Callable[[Callable[[], None]], None]) -> None:
        done = asyncio.Event()
        start(done.set)
        async with asyncio.timeout(10_000.0):
            await self.inbox.run_until(done.is_set)

    async def step(self, step: int, *, is_serial: bool = False) -> None:
        """Train a step from its rows to its commit."""
        ready = await self.write_rows(step)
        self.engine.begin_step(step, may_train=not is_serial)
        for policy in self.policies:
            for column in self.columns:
                await self.score(policy, column, ready[policy])
        for policy, samples in ready.items():
            # In two portions, as groups close.
            self.engine.add_ready(policy, samples[:3])
            self.engine.add_ready(policy, samples[3:])
        if is_serial:
            self.engine.allow_training()
        self.num_updates_asked += 1
        await self.until(lambda done: self.engine.update(step + 1, done))
        self._keep_updates()
        record = commit_of(step, self.engine.updates())
        await self.store.commit(record)
        self.result.commits.append(record)
        self.result.trained.append(await self.store.trained_ids(step))

    def _keep_updates(self) -> None:
        updates = self.engine.updates()
        self.result.digests.append({policy: update.digest for policy, update in updates.items()})
        self.result.metrics.append({policy: dict(update.metrics) for policy, update in updates.items()})

    async def score(self, policy: PolicyName, column: TokenColumn, ready: Sequence[ReadySample]) -> None:
        """Let a column be filled in two requests, and wait for both."""
        turns = [self.turns[sample.key] for sample in ready]
        num_done = 0

        def answered(values: tuple[TokenValues, ...], done: Callable[[], None]) -> None:
            nonlocal num_done
            num_done += 1
            self.result.scored.append(values)
            if num_done == 2:
                done()

        def start(done: Callable[[], None]) -> None:
            for part in (turns[:2], turns[2:]):
                self.engine.score(policy, column, part, lambda values: answered(values, done))

        await self.until(start)

    async def write_rows(self, step: int) -> dict[PolicyName, list[ReadySample]]:
        dispatch = DispatchRecord(
            step=step, min_version=step, max_version=step, queries=(0,), num_trajectories=NUM_TRAJECTORIES
        )
        await self.store.open_step(dispatch)
        ready: dict[PolicyName, list[ReadySample]] = {policy: [] for policy in self.policies}
        for trajectory in dispatch.trajectories():
            attempt = await self.store.begin_attempt(trajectory)
            rows = [
                turn_row(SampleKey(step, 0, trajectory.trajectory, AgentName(policy), 0, 0), attempt, policy)
                for policy in self.policies
            ]
            for row in rows:
                self.turns[row.key] = row
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
    policies = {policy: update.as_commit() for policy, update in updates.items()}
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


def wait(lab: Lab, done: Callable[[], None]) -> None:
    lab.inbox.set_timer("later", 10.0, done)


class Killer:
    """Kills a policy's process group at the `count`-th record of a kind, before it is handled or right after."""

    def __init__(self, what: type[Any] | str, count: int = 1, *, is_late: bool = False, policy: str = "p0") -> None:
        self._what = what
        self._count = count
        self._is_late = is_late
        self._policy = policy
        self.num_seen = 0

    def __call__(self, record: object, lab: Lab) -> None:
        if matches(record, self._what):
            self.num_seen += 1
            if self.num_seen == self._count:
                if self._is_late:  # after the record was handled, and the next command was sent
                    asyncio.get_running_loop().call_soon(lab.kill, self._policy)
                else:
                    lab.kill(self._policy)

    @property
    def has_struck(self) -> bool:
        return self.num_seen >= self._count


def is_the_same(found: Result, expected: Result) -> None:
    assert found.digests == expected.digests
    assert found.trained == expected.trained
    assert found.metrics == expected.metrics
    assert found.seals_left == []


def matches(record: object, what: type[Any] | str) -> bool:
    if isinstance(what, str):
        return isinstance(record, WorkDone) and record.name.startswith(what)
    return isinstance(record, what)
