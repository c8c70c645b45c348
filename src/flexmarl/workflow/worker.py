"""The content of an episode worker: runs workflows, asks the orchestrator for turns, reports how each one ended.

Invariant: each started attempt reports exactly one end, an outcome or a failure, unless it is cancelled.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from flexmarl.core.errors import InvariantError, WorkflowError
from flexmarl.core.ids import AgentName, Purpose, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.messages import (
    CancelTrajectory,
    DeliverTurn,
    StartTrajectory,
    TrajectoryEnded,
    TrajectoryFailed,
    TurnRequested,
)
from flexmarl.core.records import Completion, SamplingParams, TrajectoryFailure
from flexmarl.workflow.api import AgentSetup, Episode
from flexmarl.workflow.outcomes import outcome_record

logger = logging.getLogger(__name__)

AttemptId = tuple[Purpose, TrajectoryKey, int]


class EpisodeWorker:
    """Implements `core.protocols.AsyncService`: many trajectories at a time on one event loop."""

    def __init__(
        self,
        function: Callable[[Episode], Awaitable[Any]],
        setups: Mapping[AgentName, AgentSetup],
        send: Callable[[object], None],
    ) -> None:
        """Run nothing yet; facts go out through `send`."""
        self._function = function
        self._setups = setups
        self._send = send
        self._running: dict[AttemptId, asyncio.Task[None]] = {}
        self._waiting: dict[RequestId, asyncio.Future[Completion]] = {}

    def handle(self, message: object) -> None:
        """Take a command, on the loop."""
        match message:
            case StartTrajectory():
                attempt = (message.purpose, message.key, message.attempt)
                self._running[attempt] = asyncio.get_running_loop().create_task(self._run(attempt, message))
            case DeliverTurn():
                self._deliver(message)
            case CancelTrajectory():
                task = self._running.pop((message.purpose, message.key, message.attempt), None)
                if task is not None:
                    task.cancel()
            case _:
                raise InvariantError(f"an episode worker cannot handle {type(message).__name__}")

    async def close(self) -> None:
        """Cancel what runs."""
        tasks = list(self._running.values())
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _deliver(self, message: DeliverTurn) -> None:
        future = self._waiting.pop(message.request_id, None)
        if future is None or future.done():
            return
        if message.completion is None:
            future.set_exception(WorkflowError(message.error or "the generation failed"))
        else:
            future.set_result(message.completion)

    async def _run(self, attempt: AttemptId, start: StartTrajectory) -> None:
        client = _Client(self, start)
        episode = Episode(start.query, start.key, self._setups, client, seed=start.seed)
        try:
            returned = await self._function(episode)
            if client.running:
                raise WorkflowError(
                    f"the workflow returned while {min(client.running)} was still being generated: "
                    "await every chat(), or cancel it"
                )
        except asyncio.CancelledError:
            if attempt in self._running:
                self._end(attempt, self._failure(start, "workflow_error", "the workflow cancelled itself"))
            raise
        except Exception as error:  # noqa: BLE001 (user code: whatever it raises is data)
            self._end(attempt, self._failure(start, "workflow_error", _describe(error)))
            return
        try:
            outcome = outcome_record(
                returned, turns=episode.turns(), agents=self._setups, trajectory=start.key, attempt=start.attempt
            )
        except WorkflowError as error:
            self._end(attempt, self._failure(start, "bad_reward", str(error)))
            return
        self._end(attempt, TrajectoryEnded(purpose=start.purpose, outcome=outcome))

    def _end(self, attempt: AttemptId, fact: object) -> None:
        """Report the end, unless the attempt was cancelled."""
        if self._running.pop(attempt, None) is not None:
            self._send(fact)

    def _failure(self, start: StartTrajectory, kind: str, message: str) -> TrajectoryFailed:
        return TrajectoryFailed(
            purpose=start.purpose,
            failure=TrajectoryFailure(trajectory=start.key, attempt=start.attempt, kind=kind, message=message),
        )

    async def request(self, fact: TurnRequested) -> Completion:
        """Ask the orchestrator for a turn and wait for it; a wait that is cancelled is forgotten."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[fact.request_id] = future
        self._send(fact)
        try:
            completion: Completion = await future
        finally:
            self._waiting.pop(fact.request_id, None)
        return completion


class _Client:
    """Implements `core.protocols.AgentClient` for one attempt."""

    def __init__(self, worker: EpisodeWorker, start: StartTrajectory) -> None:
        self._worker = worker
        self._start = start
        self.running: set[SampleKey] = set()

    async def generate(
        self, key: SampleKey, prompt_tokens: Sequence[int], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> Completion:
        fact = TurnRequested(
            request_id=RequestId(f"{self._start.purpose}/{key}/a{self._start.attempt}"),
            purpose=self._start.purpose,
            key=key,
            attempt=self._start.attempt,
            prompt_tokens=tuple(prompt_tokens),
            sampling=sampling,
            stop_token_ids=tuple(stop_token_ids),
        )
        self.running.add(key)
        try:
            return await self._worker.request(fact)
        finally:
            self.running.discard(key)


def _describe(error: Exception) -> str:
    """The error with the line of user code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, KeyError) and error.args:
        return f"KeyError: no field or key {error.args[0]!r}{where}"
    return f"{type(error).__name__}: {error}{where}"
