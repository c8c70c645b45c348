"""The content of an episode worker: runs workflows, asks the orchestrator for turns, reports how each one ended.

Invariants:

* each started attempt reports exactly one end, an outcome or a failure, unless it is cancelled;
* after its end an attempt asks for nothing, and none of its chats is left waiting.
"""

import asyncio
import logging
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
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
from flexmarl.workflow import api, turns
from flexmarl.workflow.api import AgentSetup, Episode
from flexmarl.workflow.outcomes import outcome_record
from flexmarl.workflow.turns import BadColumnError, BadRewardError

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
        self.running: dict[AttemptId, asyncio.Task[None]] = {}
        self._waiting: dict[RequestId, asyncio.Future[Completion]] = {}

    def handle(self, message: object) -> None:
        """Take a command, on the loop."""
        match message:
            case StartTrajectory():
                attempt = (message.purpose, message.key, message.attempt)
                self.running[attempt] = asyncio.get_running_loop().create_task(self._run(attempt, message))
            case DeliverTurn():
                self._deliver(message)
            case CancelTrajectory():
                task = self.running.pop((message.purpose, message.key, message.attempt), None)
                if task is not None:
                    task.cancel()
            case _:
                raise InvariantError(f"an episode worker cannot handle {type(message).__name__}")

    async def close(self) -> None:
        """Cancel what runs."""
        tasks = list(self.running.values())
        self.running.clear()
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
        client = _Client(self, start, attempt)
        episode = Episode(start.query, start.key, self._setups, client, seed=start.seed)
        try:
            returned = await self._function(episode)
            if client.running:
                raise WorkflowError(
                    f"the workflow returned while {min(client.running)} was still being generated: "
                    "await every chat(), or cancel it"
                )
        except asyncio.CancelledError:
            if attempt in self.running:
                self._end(attempt, self._failure(start, "workflow_error", "the workflow cancelled itself"))
            raise
        except BaseException as error:  # noqa: BLE001 (user code: whatever it raises is data)
            self._end(attempt, self._failure(start, _kind(error, "workflow_error"), _describe(error)))
        else:
            self._end(attempt, self._outcome(returned, episode, start))
        finally:
            client.abandon()

    def _outcome(
        self, returned: object, episode: Episode, start: StartTrajectory
    ) -> TrajectoryEnded | TrajectoryFailed:
        try:
            outcome = outcome_record(
                returned, turns=episode.turns(), setups=self._setups, trajectory=start.key, attempt=start.attempt
            )
        except Exception as error:  # noqa: BLE001 (a Mapping or a number of the user may raise whatever it likes)
            message = str(error) if isinstance(error, WorkflowError) else _describe(error)
            return self._failure(start, _kind(error, "bad_reward"), message)
        return TrajectoryEnded(purpose=start.purpose, outcome=outcome)

    def _end(self, attempt: AttemptId, fact: object) -> None:
        """Report the end, unless the attempt was cancelled."""
        if self.running.pop(attempt, None) is not None:
            self._send(fact)

    def _failure(self, start: StartTrajectory, kind: str, message: str) -> TrajectoryFailed:
        return TrajectoryFailed(
            purpose=start.purpose,
            failure=TrajectoryFailure(trajectory=start.key, attempt=start.attempt, kind=kind, message=message),
        )

    async def request(self, fact: TurnRequested, future: "asyncio.Future[Completion]") -> Completion:
        """Ask the orchestrator for a turn and wait for it; a wait that is cancelled is forgotten."""
        self._waiting[fact.request_id] = future
        self._send(fact)
        try:
            return await future
        finally:
            self._waiting.pop(fact.request_id, None)


class _Client:
    """Implements `core.protocols.AgentClient` for one attempt."""

    def __init__(self, worker: EpisodeWorker, start: StartTrajectory, attempt: AttemptId) -> None:
        self._worker = worker
        self._start = start
        self._attempt = attempt
        self.running: dict[SampleKey, asyncio.Future[Completion]] = {}

    async def generate(
        self, key: SampleKey, prompt_tokens: Sequence[int], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> Completion:
        if self._attempt not in self._worker.running:
            # Not an error of ours to report: a workflow that retries on errors would spin here for ever.
            raise asyncio.CancelledError(f"{key} was asked for after its trajectory had ended")
        fact = TurnRequested(
            request_id=RequestId(f"{self._start.purpose}/{key}/a{self._start.attempt}"),
            purpose=self._start.purpose,
            key=key,
            attempt=self._start.attempt,
            prompt_tokens=tuple(prompt_tokens),
            sampling=sampling,
            stop_token_ids=tuple(stop_token_ids),
        )
        future = asyncio.get_running_loop().create_future()
        self.running[key] = future
        try:
            return await self._worker.request(fact, future)
        finally:
            del self.running[key]

    def abandon(self) -> None:
        """Cancel the chats that nobody will answer: those in tasks that the workflow left behind."""
        for future in self.running.values():
            future.cancel()


def _kind(error: BaseException, other: str) -> str:
    """The kind of a failure: of what the error is about or, when it does not say, of what was going on."""
    match error:
        case BadRewardError():
            return "bad_reward"
        case BadColumnError():
            return "bad_column"
    return other


def _describe(error: BaseException) -> str:
    """The error with the line of user code that raised it."""
    where = _user_line(error)
    if isinstance(error, KeyError) and error.args:
        return f"KeyError: no field or key {error.args[0]!r}{where}"
    return f"{type(error).__name__}: {error}{where}"


def _user_line(error: BaseException) -> str:
    """The innermost line outside this package's API and installed libraries: the one its author can change."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    own = {__file__, api.__file__, turns.__file__}
    for frame in reversed(frames):
        is_library = frame.filename.startswith("<") or any(Path(frame.filename).is_relative_to(p) for p in libraries)
        if not is_library and frame.filename not in own:
            return f" at {frame.filename}:{frame.lineno}"
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
