"""Runs a set of trajectories: admission, turns, attempts, time-outs, until each has ended exactly once.

The pool serves training and evaluation alike; a `TrajectorySink` is where the two differ (experience store or nothing).
Invariants (tests name them):

* each trajectory of a set ends exactly once, with an outcome or a failure;
* a turn reaches its workflow only after its row is durable;
* facts of an old attempt are ignored;
* a replayed attempt gets the recorded answer to each prompt that is the recorded one, and no other.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flexmarl.config import RolloutConfig, WorkflowConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.events import AttemptDiverged
from flexmarl.core.ids import AgentName, InstanceId, PolicyName, Purpose, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.messages import (
    CancelTrajectory,
    DeliverTurn,
    GenerationFailed,
    StartTrajectory,
    TurnRequested,
)
from flexmarl.core.protocols import EventSink, Inbox, Timer, WorkerHandle
from flexmarl.core.records import (
    Completion,
    GenerationRequest,
    OutcomeRecord,
    SamplingParams,
    TrajectoryFailure,
    TurnRow,
)
from flexmarl.core.rng import derive_seed
from flexmarl.orchestrator.trajectory_set import EndedTrajectory, OnEnded, TrajectorySet, TrajectorySink, WorkerChoice
from flexmarl.rollout.manager import Answer, RolloutManager
from flexmarl.scheduling import admit_first_come

logger = logging.getLogger(__name__)

RECORD = InstanceId("record")
"""What a turn that is not generated again names as its instance."""
RETRIED_KINDS = frozenset({"generation_failed", "worker_died"})
"""Failures that are not the workflow's own doing: another attempt may succeed."""


@dataclass(slots=True, kw_only=True)
class _Running:
    key: TrajectoryKey
    attempt: int
    worker: WorkerHandle
    timer: Timer
    recorded: dict[SampleKey, TurnRow]
    """Turns of this attempt that are stored and have not been asked for again."""
    turns: dict[SampleKey, TurnRow] = field(default_factory=dict)
    requests: set[RequestId] = field(default_factory=set)
    is_ending: bool = False
    """Its end is being recorded; nothing else may change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeams:
    """What pools of trajectories work with."""

    seed: int
    """The run seed."""
    agents: Mapping[AgentName, PolicyName]
    workflow: WorkflowConfig
    """Time-out and number of attempts."""
    rollout: RolloutConfig
    """Bounds on trajectories in flight."""
    manager: RolloutManager
    workers: WorkerChoice
    inbox: Inbox
    events: EventSink
    on_room: Callable[[], None]
    """Called when a further trajectory might start; whoever sees all pools calls `admit`."""


class TrajectoryPool:
    """Runs one TrajectorySet. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(self, trajectories: TrajectorySet, sink: TrajectorySink, seams: PoolSeams, on_ended: OnEnded) -> None:
        """Start nothing yet; results go to `sink`, and `on_ended` is called once for each trajectory."""
        self._set = trajectories
        self._sink = sink
        self._seams = seams
        self._on_ended = on_ended
        self._waiting: list[TrajectoryKey] = list(trajectories.keys)
        self._recorded = dict(trajectories.recorded)
        self._beginning: set[TrajectoryKey] = set()
        """Those whose next attempt is being recorded."""
        self._num_attempts: dict[TrajectoryKey, int] = {}
        """Attempts that the episode worker has been given."""
        self._running: dict[TrajectoryKey, _Running] = {}
        self._is_open = False
        self._is_cancelled = False
        self.num_ended = 0
        self.num_trajectories = len(trajectories.keys)
        """Trajectories of the set."""

    @property
    def purpose(self) -> Purpose:
        """Why the set runs."""
        return self._set.purpose

    @property
    def is_done(self) -> bool:
        """Every trajectory has ended."""
        return self.num_ended == self.num_trajectories

    def num_running(self) -> Counter[tuple[int, int]]:
        """Return the number of trajectories in flight by (step, query)."""
        return Counter((key.step, key.query) for key in (*self._running, *self._beginning))

    def open(self) -> None:
        """The set is durable: its trajectories may start."""
        self._is_open = True
        self._seams.on_room()

    def add(self, keys: Sequence[TrajectoryKey]) -> None:
        """Run further trajectories of queries of the set."""
        self._waiting.extend(keys)
        self.num_trajectories += len(keys)
        self._seams.on_room()

    def admit(self, num_running_elsewhere: Counter[tuple[int, int]]) -> None:
        """Start what the bounds allow beside the trajectories of other pools."""
        if not self._is_open or self._is_cancelled or not self._waiting or self._seams.workers.choose() is None:
            return
        admitted = admit_first_come(
            self._waiting,
            num_running=self.num_running() + num_running_elsewhere,
            inter_query=self._seams.rollout.inter_query,
            intra_query=self._seams.rollout.intra_query,
        )
        taken = set(admitted)
        self._waiting = [key for key in self._waiting if key not in taken]
        for key in admitted:
            self._begin(key)

    def cancel(self) -> None:
        """Stop everything; nothing more is reported."""
        self._is_cancelled = True
        self._waiting.clear()
        for running in list(self._running.values()):
            self._stop(running)
            self._seams.workers.ended(running.worker)

    def worker_died(self, worker: WorkerHandle) -> None:
        """Every attempt that ran on an episode worker is lost with it."""
        for running in list(self._running.values()):
            if running.worker is worker and not running.is_ending:
                self._fail(running, "worker_died", "the episode worker ended")

    # --- facts of the episode worker ----------------------------------------------------------------------------------

    def turn_requested(self, fact: TurnRequested) -> None:
        """An agent wants a turn."""
        running = self._current(fact.key.trajectory_key, fact.attempt)
        if running is None:
            return
        key = fact.key
        if (row := running.recorded.pop(key, None)) is not None:
            self._answer_from_record(running, fact, row)
            return
        running.requests.add(fact.request_id)
        is_greedy = running.key in self._set.greedy
        seed_step = (key.step,) if self._set.purpose is Purpose.TRAIN else ()
        request = GenerationRequest(
            request_id=fact.request_id,
            purpose=self._set.purpose,
            key=key,
            attempt=fact.attempt,
            policy=self._seams.agents[key.agent],
            min_version=self._set.min_version,
            max_version=self._set.max_version,
            prompt_tokens=fact.prompt_tokens,
            sampling=self._sampling(fact, is_greedy=is_greedy),
            # Evaluations leave the step out, so that before and after are compared on the same random numbers.
            seed=derive_seed(
                self._seams.seed,
                "greedy" if is_greedy else "turn",
                self._set.purpose,
                *seed_step,
                key.query,
                key.trajectory,
                key.agent,
                key.branch,
                key.turn,
            ),
            stop_token_ids=fact.stop_token_ids,
        )
        self._seams.manager.submit(request, lambda answer: self._answered(running, request, answer))

    def _answer_from_record(self, running: _Running, fact: TurnRequested, row: TurnRow) -> None:
        """Deliver a turn that is stored, or begin a new attempt when the workflow does not ask the same again."""
        if row.prompt_tokens == fact.prompt_tokens and row.temperature == fact.sampling.temperature:
            running.turns[row.key] = row
            completion = _recorded_completion(row, fact.request_id)
            running.worker.send(
                DeliverTurn(purpose=self._set.purpose, request_id=fact.request_id, completion=completion)
            )
            return
        self._seams.events.emit(AttemptDiverged(trajectory=running.key, attempt=running.attempt, key=row.key))
        logger.info("%s attempt %d asks for another turn than the recorded one; again", row.key, running.attempt)
        self._num_attempts[running.key] -= 1
        self._stop(running)
        self._try_again(running)

    def _sampling(self, fact: TurnRequested, *, is_greedy: bool) -> SamplingParams:
        if is_greedy:
            return replace(fact.sampling, temperature=0.0)
        if self._set.temperature is not None:
            return replace(fact.sampling, temperature=self._set.temperature)
        return fact.sampling

    def ended(self, outcome: OutcomeRecord) -> None:
        """The workflow returned."""
        running = self._current(outcome.trajectory, outcome.attempt)
        if running is None:
            return
        if missing := [key for key in outcome.turns if key not in running.turns]:
            self._fail(running, "workflow_error", f"the outcome names turns that were not generated: {missing[0]}")
            return
        self._drop(running)
        running.is_ending = True
        self._sink.record_outcome(outcome, lambda: self._finish(running, outcome, None))

    def failed(self, failure: TrajectoryFailure) -> None:
        """The workflow did not return an outcome."""
        running = self._current(failure.trajectory, failure.attempt)
        if running is not None:
            self._fail(running, failure.kind, failure.message)

    # --- one trajectory -----------------------------------------------------------------------------------------------

    def _begin(self, key: TrajectoryKey) -> None:
        self._beginning.add(key)
        stored = self._recorded.pop(key, None)
        if stored is None:
            self._sink.begin_attempt(key, lambda attempt: self._begun(key, attempt, ()))
        else:
            self._begun(key, stored.attempt, stored.turns)

    def _begun(self, key: TrajectoryKey, attempt: int, recorded: Sequence[TurnRow]) -> None:
        self._beginning.remove(key)
        worker = self._seams.workers.choose()
        if self._is_cancelled:
            return
        if worker is None:
            # It died meanwhile; the next one admits. This attempt never ran, so it does not count.
            self._waiting.insert(0, key)
            return
        self._seams.workers.began(worker)
        self._num_attempts[key] = self._num_attempts.get(key, 0) + 1
        timer = self._seams.inbox.set_timer(
            f"trajectory {self._set.purpose} {key}",
            self._seams.workflow.timeout_s,
            lambda: self._timed_out(key, attempt),
        )
        self._running[key] = _Running(
            key=key, attempt=attempt, worker=worker, timer=timer, recorded={row.key: row for row in recorded}
        )
        seed_step = (key.step,) if self._set.purpose is Purpose.TRAIN else ()
        worker.send(
            StartTrajectory(
                purpose=self._set.purpose,
                key=key,
                attempt=attempt,
                query=self._set.queries[key.query],
                seed=derive_seed(self._seams.seed, "episode", self._set.purpose, *seed_step, key.query, key.trajectory),
            )
        )

    def _answered(self, running: _Running, request: GenerationRequest, answer: Answer) -> None:
        running.requests.discard(request.request_id)
        if self._running.get(running.key) is not running or running.is_ending:
            return
        if isinstance(answer, GenerationFailed):
            kind = "generation_refused" if answer.failure_kind == "refused" else "generation_failed"
            self._fail(running, kind, f"{request.key} (policy {request.policy}): {answer.message}")
            return
        for span in answer.version_spans:
            if not request.min_version <= span.policy_version <= request.max_version:
                raise InvariantError(
                    f"{request.key}: {answer.instance_id} generated tokens [{span.start}, {span.end}) with version "
                    f"{span.policy_version}, asked for [{request.min_version}, {request.max_version}]"
                )
        row = _turn_row(request, answer)
        running.turns[row.key] = row
        self._sink.put_turn(row, lambda: self._stored(running, request, answer))

    def _stored(self, running: _Running, request: GenerationRequest, completion: Completion) -> None:
        if self._running.get(running.key) is not running or running.is_ending:
            return
        running.worker.send(
            DeliverTurn(purpose=self._set.purpose, request_id=request.request_id, completion=completion)
        )

    def _timed_out(self, key: TrajectoryKey, attempt: int) -> None:
        running = self._current(key, attempt)
        if running is not None:
            self._fail(running, "timeout", f"took longer than workflow.timeout_s={self._seams.workflow.timeout_s:g}")

    def _fail(self, running: _Running, kind: str, message: str) -> None:
        self._stop(running)
        can_retry = kind in RETRIED_KINDS and self._num_attempts[running.key] < self._seams.workflow.max_attempts
        if can_retry and not self._is_cancelled:
            logger.warning("%s: attempt %d failed (%s: %s); again", running.key, running.attempt, kind, message)
            self._try_again(running)
            return
        failure = TrajectoryFailure(trajectory=running.key, attempt=running.attempt, kind=kind, message=message)
        logger.info("%s failed (%s): %s", running.key, kind, message)  # the step says how many, once
        running.is_ending = True
        self._sink.record_failure(failure, lambda: self._finish(running, None, failure))

    def _try_again(self, running: _Running) -> None:
        del self._running[running.key]
        self._seams.workers.ended(running.worker)
        self._waiting.insert(0, running.key)
        self._seams.on_room()

    def _finish(self, running: _Running, outcome: OutcomeRecord | None, failure: TrajectoryFailure | None) -> None:
        if self._is_cancelled:
            return
        del self._running[running.key]
        self._seams.workers.ended(running.worker)
        self.num_ended += 1
        turns = tuple(running.turns[key] for key in sorted(running.turns))
        self._on_ended(EndedTrajectory(key=running.key, turns=turns, outcome=outcome, failure=failure))
        self._seams.on_room()

    def _stop(self, running: _Running) -> None:
        """End an attempt from our side: no answer reaches it any more."""
        self._drop(running)
        running.worker.send(CancelTrajectory(purpose=self._set.purpose, key=running.key, attempt=running.attempt))

    def _drop(self, running: _Running) -> None:
        running.timer.cancel()
        if running.requests:
            self._seams.manager.cancel(sorted(running.requests))
            running.requests.clear()

    def _current(self, key: TrajectoryKey, attempt: int) -> _Running | None:
        running = self._running.get(key)
        if running is None or running.attempt != attempt or running.is_ending:
            return None
        return running


def _recorded_completion(row: TurnRow, request_id: RequestId) -> Completion:
    return Completion(
        request_id=request_id,
        tokens=row.response_tokens,
        logprobs=row.logprobs,
        finish_reason=row.finish_reason,
        version_spans=row.version_spans,
        weights_version=row.weights_version,
        instance_id=RECORD,
    )


def _turn_row(request: GenerationRequest, completion: Completion) -> TurnRow:
    return TurnRow(
        key=request.key,
        attempt=request.attempt,
        policy=request.policy,
        policy_version=min(span.policy_version for span in completion.version_spans),
        weights_version=completion.weights_version,
        prompt_tokens=request.prompt_tokens,
        response_tokens=completion.tokens,
        logprobs=completion.logprobs,
        temperature=request.sampling.temperature,
        finish_reason=completion.finish_reason,
        version_spans=completion.version_spans,
    )
