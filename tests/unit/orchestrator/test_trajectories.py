"""The pool of trajectories: each ends once, turns are durable before they are seen, old attempts are ignored."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from flexmarl.config import RolloutConfig, WorkflowConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.events import AttemptDiverged
from flexmarl.core.ids import AgentName, InstanceId, PolicyName, Purpose, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.messages import (
    CancelTrajectory,
    DeliverTurn,
    GenerationFailed,
    GenerationFailureKind,
    StartTrajectory,
    TurnRequested,
)
from flexmarl.core.protocols import StoredTrajectory, WorkerHandle
from flexmarl.core.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    OutcomeRecord,
    SamplingParams,
    TrajectoryFailure,
    TurnRow,
    VersionSpan,
)
from flexmarl.orchestrator.trajectories import PoolSeams, TrajectoryPool
from flexmarl.orchestrator.trajectory_set import EndedTrajectory, TrajectorySet
from flexmarl.rollout.manager import Answer, RolloutManager
from flexmarl.testing.events import RecordingSink

pytestmark = pytest.mark.unit

AGENT = AgentName("a")
POLICY = PolicyName("p")


@dataclass
class FakeTimer:
    name: str
    delay_s: float
    handler: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeInbox:
    """Only its timers are used."""

    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []

    def set_timer(self, name: str, delay_s: float, handler: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(name, delay_s, handler))
        return self.timers[-1]

    def fire(self, name: str) -> None:
        for timer in [timer for timer in self.timers if timer.name == name and not timer.is_cancelled]:
            timer.is_cancelled = True
            timer.handler()


class FakeSink:
    """Keeps each call until the test lets it end."""

    def __init__(self) -> None:
        self.pending: list[tuple[str, Callable[[], None]]] = []
        self.attempts: dict[TrajectoryKey, int] = {}
        self.rows: list[TurnRow] = []

    def begin_attempt(self, key: TrajectoryKey, then: Callable[[int], None]) -> None:
        attempt = self.attempts.get(key, -1) + 1
        self.attempts[key] = attempt
        self.pending.append((f"begin {key}", lambda: then(attempt)))

    def put_turn(self, row: TurnRow, then: Callable[[], None]) -> None:
        self.rows.append(row)
        self.pending.append((f"turn {row.key}", then))

    def record_outcome(self, outcome: OutcomeRecord, then: Callable[[], None]) -> None:
        self.pending.append((f"outcome {outcome.trajectory}", then))

    def record_failure(self, failure: TrajectoryFailure, then: Callable[[], None]) -> None:
        self.pending.append((f"failure {failure.kind} {failure.trajectory}", then))

    def finish(self) -> list[str]:
        """End every pending call, and those that begin meanwhile; return what they were."""
        done = []
        while self.pending:
            name, then = self.pending.pop(0)
            done.append(name)
            then()
        return done


class FakeManager:
    def __init__(self) -> None:
        self.open: dict[RequestId, tuple[GenerationRequest, Callable[[Answer], None]]] = {}
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest, on_answer: Callable[[Answer], None]) -> None:
        assert request.request_id not in self.open
        self.requests.append(request)
        self.open[request.request_id] = (request, on_answer)

    def cancel(self, request_ids: list[RequestId]) -> None:
        for request_id in request_ids:
            self.open.pop(request_id, None)

    def answer(self, request_id: RequestId, failure: GenerationFailureKind | None = None) -> None:
        _, on_answer = self.open.pop(request_id)
        if failure is not None:
            on_answer(GenerationFailed(request_id=request_id, failure_kind=failure, message="broken"))
            return
        on_answer(
            Completion(
                request_id=request_id,
                tokens=(5, 6),
                logprobs=(-0.5, -0.25),
                finish_reason=FinishReason.STOP,
                version_spans=(
                    VersionSpan(start=0, end=1, policy_version=8),
                    VersionSpan(start=1, end=2, policy_version=7),
                ),
                weights_version=3,
                instance_id=InstanceId("i"),
            )
        )


@dataclass
class FakeWorker:
    sent: list[Any] = field(default_factory=list)

    def send(self, message: object) -> None:
        self.sent.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class Lab:
    """A pool among fakes."""

    def __init__(
        self,
        keys: list[TrajectoryKey],
        *,
        rollout: RolloutConfig | None = None,
        purpose: Purpose = Purpose.TRAIN,
        greedy: frozenset[TrajectoryKey] = frozenset(),
        temperature: float | None = None,
        recorded: Mapping[TrajectoryKey, StoredTrajectory] | None = None,
        versions: tuple[int, int] = (7, 8),
    ) -> None:
        self.sink = FakeSink()
        self.manager = FakeManager()
        self.inbox = FakeInbox()
        self.events = RecordingSink()
        self.worker: FakeWorker | None = FakeWorker()
        self.num_running = 0
        self.ended: list[EndedTrajectory] = []
        self.pool = TrajectoryPool(
            TrajectorySet(
                purpose=purpose,
                min_version=versions[0],
                max_version=versions[1],
                queries={key.query: {"n": key.query} for key in keys},
                keys=tuple(keys),
                greedy=greedy,
                temperature=temperature,
                recorded=recorded or {},
            ),
            self.sink,
            self.seams(rollout or RolloutConfig(), self.admit),
            self.ended.append,
        )
        self.pool.open()

    def seams(self, rollout: RolloutConfig, on_room: Callable[[], None]) -> PoolSeams:
        return PoolSeams(
            seed=11,
            agents={AGENT: POLICY},
            workflow=WorkflowConfig(path="x:y", timeout_s=60.0, max_attempts=3),
            rollout=rollout,
            manager=cast(RolloutManager, self.manager),
            workers=FakeWorkers(self),
            inbox=cast(Any, self.inbox),
            events=self.events,
            on_room=on_room,
        )

    def admit(self) -> None:
        self.pool.admit(Counter())

    @property
    def started(self) -> list[tuple[int, int, int]]:
        """Query, trajectory and attempt of each start that reached the present worker."""
        assert self.worker is not None
        return [(m.key.query, m.key.trajectory, m.attempt) for m in self.worker.of(StartTrajectory)]

    def ask(self, key: TrajectoryKey, *, attempt: int = 0, turn: int = 0, branch: int = 0) -> RequestId:
        """The workflow asks for a turn."""
        sample = SampleKey(key.step, key.query, key.trajectory, AGENT, branch, turn)
        request_id = RequestId(f"train/{sample}/a{attempt}")
        self.pool.turn_requested(
            TurnRequested(
                request_id=request_id,
                purpose=Purpose.TRAIN,
                key=sample,
                attempt=attempt,
                prompt_tokens=(1, 2, 3),
                sampling=SamplingParams(temperature=0.9, max_new_tokens=5),
                stop_token_ids=(0,),
            )
        )
        return request_id

    def outcome(self, key: TrajectoryKey, *turns: int, attempt: int = 0) -> None:
        """The workflow ends."""
        keys = tuple(SampleKey(key.step, key.query, key.trajectory, AGENT, 0, turn) for turn in turns)
        self.pool.ended(OutcomeRecord(trajectory=key, attempt=attempt, rewards={AGENT: 1.0}, turns=keys))

    def fail(self, key: TrajectoryKey, kind: str = "workflow_error", *, attempt: int = 0) -> None:
        self.pool.failed(TrajectoryFailure(trajectory=key, attempt=attempt, kind=kind, message="bad"))

    def kill_worker(self) -> None:
        dead, self.worker = self.worker, None
        self.pool.worker_died(cast(WorkerHandle, dead))

    def new_worker(self) -> FakeWorker:
        self.worker = FakeWorker()
        self.admit()
        return self.worker

    def ends(self) -> list[tuple[int, str]]:
        return [(each.key.trajectory, each.failure.kind if each.failure else "outcome") for each in self.ended]


class FakeWorkers:
    """Chooses the one worker of a lab, and counts what runs on it."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def choose(self) -> WorkerHandle | None:
        return cast(WorkerHandle | None, self._lab.worker)

    def began(self, handle: WorkerHandle) -> None:
        self._lab.num_running += 1

    def ended(self, handle: WorkerHandle) -> None:
        self._lab.num_running -= 1


A, B = TrajectoryKey(7, 0, 0), TrajectoryKey(7, 0, 1)


def test_a_turn_is_durable_before_its_workflow_sees_it() -> None:
    lab = Lab([A])
    lab.sink.finish()
    request = lab.ask(A)
    lab.manager.answer(request)
    assert lab.worker is not None
    assert lab.worker.of(DeliverTurn) == []
    (row,) = lab.sink.rows
    assert (row.policy_version, row.weights_version, row.temperature, row.attempt) == (7, 3, 0.9, 0)
    assert (row.prompt_tokens, row.response_tokens, row.logprobs) == ((1, 2, 3), (5, 6), (-0.5, -0.25))
    lab.sink.finish()
    (delivered,) = lab.worker.of(DeliverTurn)
    assert delivered.request_id == request
    assert delivered.completion.tokens == (5, 6)


def test_an_end_is_reported_once_after_it_is_durable() -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.manager.answer(lab.ask(A))
    lab.sink.finish()
    lab.outcome(A, 0)
    assert lab.ended == []
    lab.outcome(A, 0)
    lab.fail(A)
    lab.inbox.fire("trajectory train s7/q0/t0")
    assert lab.sink.finish() == ["outcome s7/q0/t0"]
    assert lab.ends() == [(0, "outcome")]
    assert [row.key.turn for row in lab.ended[0].turns] == [0]
    assert lab.pool.is_done


def test_a_failure_is_reported_once_and_stops_the_workflow() -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.ask(A)
    lab.inbox.fire("trajectory train s7/q0/t0")
    assert lab.manager.open == {}
    assert lab.worker is not None
    assert lab.worker.of(CancelTrajectory) == [CancelTrajectory(purpose=Purpose.TRAIN, key=A, attempt=0)]
    lab.outcome(A)
    assert lab.sink.finish() == ["failure timeout s7/q0/t0"]
    assert lab.ends() == [(0, "timeout")]
    assert lab.ended[0].failure is not None
    assert "workflow.timeout_s=60" in lab.ended[0].failure.message


@pytest.mark.parametrize("kind", ["workflow_error", "bad_reward"])
def test_the_workflows_own_failures_are_not_retried(kind: str) -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.fail(A, kind)
    assert lab.sink.finish() == [f"failure {kind} s7/q0/t0"]
    assert lab.started == [(0, 0, 0)]


def test_a_refused_prompt_is_not_retried() -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.manager.answer(lab.ask(A), GenerationFailureKind.REFUSED)
    lab.sink.finish()
    assert lab.ends() == [(0, "generation_refused")]


def test_a_failed_generation_starts_a_new_attempt_until_there_are_too_many() -> None:
    lab = Lab([A])
    for attempt in range(3):
        lab.sink.finish()
        assert lab.started[-1] == (0, 0, attempt)
        lab.manager.answer(lab.ask(A, attempt=attempt), GenerationFailureKind.ENGINE)
    assert lab.sink.finish() == ["failure generation_failed s7/q0/t0"]
    assert lab.started == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert lab.ended[0].failure is not None
    assert lab.ended[0].failure.message == "s7/q0/t0/a/b0/n0 (policy p): broken"


def test_facts_of_an_old_attempt_are_ignored() -> None:
    lab = Lab([A])
    lab.sink.finish()
    first = lab.ask(A)
    second = lab.ask(A, branch=1)
    lab.manager.answer(first, GenerationFailureKind.ENGINE)
    assert second not in lab.manager.open
    lab.sink.finish()
    assert lab.started == [(0, 0, 0), (0, 0, 1)]
    lab.outcome(A)
    lab.fail(A)
    assert lab.ask(A) not in lab.manager.open
    assert lab.sink.finish() == []
    lab.outcome(A, attempt=1)
    lab.sink.finish()
    assert lab.ends() == [(0, "outcome")]


def test_a_completion_that_is_stored_too_late_is_not_delivered() -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.manager.answer(lab.ask(A))
    lab.inbox.fire("trajectory train s7/q0/t0")
    lab.sink.finish()
    assert lab.worker is not None
    assert lab.worker.of(DeliverTurn) == []
    assert [len(each.turns) for each in lab.ended] == [1]


def test_an_outcome_with_a_turn_that_nobody_generated_is_a_failure() -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.outcome(A, 4)
    lab.sink.finish()
    assert lab.ends() == [(0, "workflow_error")]


def test_g2_a_dead_worker_costs_one_attempt_however_long_the_next_takes_to_start() -> None:
    lab = Lab([A, B])
    lab.sink.finish()
    lab.kill_worker()
    for _ in range(5):  # whatever happens before the next one is ready
        lab.sink.finish()
        lab.admit()
    assert lab.ended == []
    lab.new_worker()
    lab.sink.finish()
    assert sorted(lab.started) == [(0, 0, 1), (0, 1, 1)]


def test_g2_a_worker_that_dies_while_an_attempt_begins_costs_none() -> None:
    lab = Lab([A])
    for _ in range(5):
        lab.kill_worker()
        lab.sink.finish()
        lab.new_worker()
    lab.sink.finish()
    assert len(lab.started) == 1
    assert lab.ended == []


def test_a_workflow_that_always_kills_its_worker_fails_in_the_end() -> None:
    lab = Lab([A])
    for _ in range(3):
        lab.sink.finish()
        lab.kill_worker()
        lab.sink.finish()
        lab.new_worker()
    lab.sink.finish()
    assert lab.ends() == [(0, "worker_died")]


def test_bounds_hold_and_the_next_starts_when_one_ends() -> None:
    keys = [TrajectoryKey(7, query, trajectory) for query in range(2) for trajectory in range(2)]
    lab = Lab(keys, rollout=RolloutConfig(inter_query=1, intra_query=1))
    lab.sink.finish()
    seen = []
    for _ in range(4):
        seen.append(lab.started[-1][:2])
        assert len(lab.started) == len(seen)
        lab.outcome(TrajectoryKey(7, *seen[-1]))
        lab.sink.finish()
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert lab.pool.is_done
    assert lab.num_running == 0


def test_cancel_stops_everything_and_reports_nothing() -> None:
    lab = Lab([A, B])
    lab.sink.finish()
    lab.ask(A)
    lab.outcome(B)
    lab.pool.cancel()
    lab.sink.finish()
    assert lab.ended == []
    assert lab.manager.open == {}
    assert lab.num_running == 0
    assert all(timer.is_cancelled for timer in lab.inbox.timers)
    assert lab.worker is not None
    assert {message.key for message in lab.worker.of(CancelTrajectory)} >= {A}
    lab.admit()
    assert lab.sink.pending == []


def test_g3_g5_a_request_names_the_version_and_a_seed_of_its_key_alone() -> None:
    seeds = []
    for attempt in (0, 1):
        lab = Lab([A])
        lab.sink.finish()
        if attempt:
            lab.kill_worker()
            lab.new_worker()
            lab.sink.finish()
        lab.ask(A, attempt=attempt)
        (request,) = lab.manager.requests
        assert (request.policy, request.min_version, request.max_version) == (POLICY, 7, 8)
        seeds.append(request.seed)
    assert seeds[0] == seeds[1]
    lab = Lab([A, B])
    lab.sink.finish()
    for key, branch, turn in ((A, 0, 1), (A, 1, 0), (B, 0, 0)):
        lab.ask(key, branch=branch, turn=turn)
    assert len({*seeds, *(request.seed for request in lab.manager.requests)}) == 4


def test_evaluations_replace_temperatures_and_leave_the_step_out_of_seeds() -> None:
    seeds = []
    for step in (0, 9):
        keys = [TrajectoryKey(step, 0, number) for number in range(2)]
        lab = Lab(keys, purpose=Purpose.EVAL, greedy=frozenset(keys[1:]), temperature=0.5)
        lab.sink.finish()
        for key in keys:
            lab.ask(key)
        sampled, greedy = lab.manager.requests
        assert (sampled.sampling.temperature, greedy.sampling.temperature) == (0.5, 0.0)
        assert lab.worker is not None
        seeds.append([sampled.seed, greedy.seed, *(message.seed for message in lab.worker.of(StartTrajectory))])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


# --- attempts of an interrupted run -----------------------------------------------------------------------------------


def recorded(key: TrajectoryKey, *, attempt: int = 2, prompt: tuple[int, ...] = (1, 2, 3)) -> StoredTrajectory:
    row = TurnRow(
        key=SampleKey(key.step, key.query, key.trajectory, AGENT, 0, 0),
        attempt=attempt,
        policy=POLICY,
        policy_version=7,
        weights_version=3,
        prompt_tokens=prompt,
        response_tokens=(9,),
        logprobs=(-0.125,),
        temperature=0.9,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=1, policy_version=7),),
    )
    return StoredTrajectory(key=key, attempt=attempt, turns=(row,), outcome=None, failure=None)


def test_g2_g5_a_replayed_attempt_gets_its_recorded_turns_and_generates_the_rest() -> None:
    lab = Lab([A, B], recorded={A: recorded(A)})
    lab.sink.finish()
    assert lab.started == [(0, 0, 2), (0, 1, 0)]
    lab.ask(A, attempt=2)
    assert lab.worker is not None
    (delivered,) = lab.worker.of(DeliverTurn)
    assert (delivered.completion.tokens, delivered.completion.logprobs) == ((9,), (-0.125,))
    assert (lab.manager.requests, lab.sink.rows) == ([], [])  # neither generated nor stored again
    lab.manager.answer(lab.ask(A, attempt=2, turn=1))
    lab.sink.finish()
    lab.outcome(A, 0, 1, attempt=2)
    lab.sink.finish()
    assert [row.response_tokens for row in lab.ended[0].turns] == [(9,), (5, 6)]


def test_g2_a_replayed_attempt_that_asks_something_else_is_superseded() -> None:
    lab = Lab([A], recorded={A: recorded(A, prompt=(1, 2, 4))})
    lab.sink.attempts[A] = 2
    lab.ask(A, attempt=2)
    assert lab.worker is not None
    assert lab.worker.of(DeliverTurn) == []
    assert [record.key.turn for record in lab.events.records if isinstance(record, AttemptDiverged)] == [0]
    assert lab.sink.finish() == ["begin s7/q0/t0"]
    lab.ask(A, attempt=3)
    (request,) = lab.manager.requests
    assert request.attempt == 3
    for _ in range(2):  # the diverged attempt cost none of the three
        lab.kill_worker()
        lab.new_worker()
        lab.sink.finish()
    assert lab.ended == []


def test_g3_an_answer_of_another_version_ends_the_run() -> None:
    lab = Lab([A], versions=(8, 8))
    lab.sink.finish()
    with pytest.raises(InvariantError, match=r"tokens \[1, 2\) with version 7, asked for \[8, 8\]"):
        lab.manager.answer(lab.ask(A))


def test_added_trajectories_run_too() -> None:
    lab = Lab([A])
    lab.sink.finish()
    lab.outcome(A)
    lab.sink.finish()
    assert lab.pool.is_done
    lab.pool.add([B])
    lab.sink.finish()
    assert lab.started == [(0, 0, 0), (0, 1, 0)]
    lab.outcome(B)
    lab.sink.finish()
    assert lab.ends() == [(0, "outcome"), (1, "outcome")]


def test_nothing_starts_before_the_set_is_durable() -> None:
    lab = Lab([A])
    lab.sink.finish()
    other = TrajectoryPool(
        TrajectorySet(purpose=Purpose.TRAIN, min_version=7, max_version=7, queries={0: {}}, keys=(B,)),
        lab.sink,
        lab.seams(RolloutConfig(), lambda: other.admit(Counter())),
        lab.ended.append,
    )
    other.admit(Counter())  # room arises for whatever reason
    assert lab.sink.pending == []
    other.open()
    assert lab.sink.finish() == ["begin s7/q0/t1"]
