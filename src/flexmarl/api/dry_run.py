"""Runs a workflow on real queries with scripted answers, to find what is wrong with it before a model is loaded.

It runs in a forked child: what user code does to its memory, its event loop or the terminal is gone afterwards, and
code that blocks is killed when the time is over. What has ended by then is reported.
"""

import asyncio
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.ids import AgentName, InstanceId, Purpose, TrajectoryKey
from flexmarl.core.messages import (
    CancelTrajectory,
    DeliverTurn,
    StartTrajectory,
    TrajectoryEnded,
    TrajectoryFailed,
    TurnRequested,
)
from flexmarl.core.records import Completion, FinishReason, TrajectoryFailure, VersionSpan
from flexmarl.workflow.api import AgentSetup, Episode
from flexmarl.workflow.worker import EpisodeWorker

MAX_TURNS = 50
"""A workflow that goes on until an answer pleases it may never end on scripted ones."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DryCase:
    """One episode to run."""

    query: Mapping[str, Any]
    answers: tuple[str, ...]
    """What agents answer, turn after turn, from the first again after the last."""
    seed: int
    """Of `episode.rng`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryEpisode:
    """What a workflow did on a case."""

    case: int
    """Place in the list of cases."""
    failure_kind: str | None = None
    """None when it ended with an outcome; else as in `TrajectoryFailure`, `prompt_too_long` or `too_many_turns`."""
    message: str = ""
    num_turns: int = 0
    """Answered turns."""
    agents: tuple[str, ...] = ()
    """Those that were asked."""
    read_fields: tuple[str, ...] = ()
    """Fields of the query that it read with `query[...]`."""
    missing_field: str | None = None
    """The field of the query without which it failed."""


def run_dry(
    function: Callable[[Episode], Awaitable[Any]],
    setups: Mapping[AgentName, AgentSetup],
    cases: Sequence[DryCase],
    *,
    context_tokens: Mapping[AgentName, int],
    budget_s: float,
) -> list[DryEpisode]:
    """Run all cases at once and return those that ended within `budget_s`, in the order of `cases`.

    Args:
        function: The workflow.
        setups: Every agent of the configuration.
        cases: What to run it on.
        context_tokens: Prompts of an agent that do not leave room for a new token in it are refused, as engines do.
        budget_s: Time for everything.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks beside threads: the child shares no lock with them but those of the standard library,
        # and is killed in any case.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_child(partial(_run_cases, function, setups, cases, context_tokens), write_fd, budget_s)
    os.close(write_fd)
    try:
        content = _read_until(read_fd, time.monotonic() + budget_s)
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lines = content.split(b"\n")[:-1]  # what comes after the last newline was cut off by the end of the time
    return sorted((from_plain(DryEpisode, json.loads(line)) for line in lines), key=lambda episode: episode.case)


def _read_until(fd: int, deadline_s: float) -> bytes:
    content = b""
    while (left_s := deadline_s - time.monotonic()) > 0 and select.select([fd], [], [], left_s)[0]:
        chunk = os.read(fd, _READ_BYTES)
        if not chunk:
            break
        content += chunk
    return content


def _be_child(main: Callable[[Callable[[DryEpisode], None]], Awaitable[None]], write_fd: int, budget_s: float) -> None:
    """Run `main` as the forked child and end the process, never the caller's code."""
    try:
        # The parent kills this process; the alarm does when the parent is gone.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, budget_s + 1.0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        # In a notebook, or under a test, they are not these files.
        sys.stdout = sys.stderr = os.fdopen(nowhere, "w")
        logging.disable()

        def report(episode: DryEpisode) -> None:
            line = json.dumps(to_plain(episode)).encode() + b"\n"
            while line:
                line = line[os.write(write_fd, line) :]

        async def run() -> None:
            await main(report)

        asyncio.run(run())
    finally:
        os._exit(0)


class _Running:
    """What is known of an episode while it runs."""

    def __init__(self, number: int, case: DryCase) -> None:
        self.number = number
        self.case = case
        self.num_turns = 0
        self.agents: set[str] = set()
        self.query = _WatchedQuery(case.query)
        self.missing_field: str | None = None
        self.refusal: str | None = None


class _WatchedQuery(dict[str, Any]):
    """A query that remembers which fields were read with `[]`, and which error a missing one raised."""

    def __init__(self, query: Mapping[str, Any]) -> None:
        super().__init__({key: _WatchedQuery(v) if isinstance(v, dict) else v for key, v in query.items()})
        self.reads: set[str] = set()
        self.misses: list[tuple[KeyError, str]] = []

    def __getitem__(self, key: str) -> Any:
        self.reads.add(key)
        try:
            return super().__getitem__(key)
        except KeyError as error:
            self.misses.append((error, str(key)))
            raise

    def missing_field(self, error: BaseException) -> str | None:
        """Return the field whose absence raised `error`, here or in a query within."""
        for miss, key in self.misses:
            if miss is error:
                return key
        for key, value in self.items():
            if isinstance(value, _WatchedQuery) and (inner := value.missing_field(error)) is not None:
                return f"{key}.{inner}"
        return None


async def _run_cases(
    function: Callable[[Episode], Awaitable[Any]],
    setups: Mapping[AgentName, AgentSetup],
    cases: Sequence[DryCase],
    context_tokens: Mapping[AgentName, int],
    report: Callable[[DryEpisode], None],
) -> None:
    run = _DryRun(function, setups, cases, context_tokens, report)
    run.start()
    await run.is_over.wait()


class _DryRun:
    """Plays the orchestrator to a real episode worker, which runs in the same loop."""

    def __init__(
        self,
        function: Callable[[Episode], Awaitable[Any]],
        setups: Mapping[AgentName, AgentSetup],
        cases: Sequence[DryCase],
        context_tokens: Mapping[AgentName, int],
        report: Callable[[DryEpisode], None],
    ) -> None:
        self._function = function
        self._setups = setups
        self._context_tokens = context_tokens
        self._report = report
        self._running = {TrajectoryKey(0, number, 0): _Running(number, case) for number, case in enumerate(cases)}
        self._worker = EpisodeWorker(self._watched, setups, self._receive)
        self.is_over = asyncio.Event()

    def start(self) -> None:
        if not self._running:
            self.is_over.set()
        for key, running in self._running.items():
            start = StartTrajectory(
                purpose=Purpose.TRAIN, key=key, attempt=0, query=running.query, seed=running.case.seed
            )
            self._worker.handle(start)

    async def _watched(self, episode: Episode) -> Any:
        query = episode.query
        try:
            return await self._function(episode)
        except KeyError as error:
            assert isinstance(query, _WatchedQuery)
            for running in self._running.values():
                if running.query is query:
                    running.missing_field = query.missing_field(error)
            _drop_own_frames(error.__traceback__)
            raise

    def _receive(self, fact: object) -> None:
        """What the episode worker says."""
        match fact:
            case TurnRequested():
                self._turn_requested(fact)
            case TrajectoryEnded():
                self._end(fact.outcome.trajectory, None)
            case TrajectoryFailed():
                self._end(fact.failure.trajectory, fact.failure)

    def _turn_requested(self, fact: TurnRequested) -> None:
        key = fact.key.trajectory_key
        running = self._running.get(key)
        if running is None:
            return
        if running.num_turns == MAX_TURNS:
            self._worker.handle(CancelTrajectory(purpose=fact.purpose, key=key, attempt=fact.attempt))
            message = f"it asked for more than {MAX_TURNS} turns"
            self._end(key, TrajectoryFailure(trajectory=key, attempt=0, kind="too_many_turns", message=message))
            return
        running.agents.add(fact.key.agent)
        context_tokens = self._context_tokens.get(fact.key.agent)
        if context_tokens is not None and len(fact.prompt_tokens) >= context_tokens:
            running.refusal = (
                f"the prompt of agent {fact.key.agent} has {len(fact.prompt_tokens)} tokens, and the context of its "
                f"model has {context_tokens}, for the prompt and the answer"
            )
            answer = DeliverTurn(
                purpose=fact.purpose, request_id=fact.request_id, completion=None, error=running.refusal
            )
        else:
            text = running.case.answers[running.num_turns % len(running.case.answers)]
            running.num_turns += 1
            completion = self._completion(fact, text)
            answer = DeliverTurn(purpose=fact.purpose, request_id=fact.request_id, completion=completion)
        # Not at once: a workflow that loops over turns would never let the loop go on.
        asyncio.get_running_loop().call_soon(self._worker.handle, answer)

    def _completion(self, fact: TurnRequested, text: str) -> Completion:
        tokens = self._setups[fact.key.agent].tokenizer.encode(text)
        limit = fact.sampling.max_new_tokens
        is_stopped = len(tokens) < limit and not fact.sampling.ignore_stop
        tokens = [*tokens, fact.stop_token_ids[0]] if is_stopped else tokens[:limit]
        return Completion(
            request_id=fact.request_id,
            tokens=tuple(tokens),
            logprobs=(0.0,) * len(tokens),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            version_spans=(VersionSpan(start=0, end=len(tokens), policy_version=0),),
            weights_version=0,
            instance_id=InstanceId("scripted"),
        )

    def _end(self, key: TrajectoryKey, failure: TrajectoryFailure | None) -> None:
        running = self._running.pop(key, None)
        if running is None:
            return
        kind = None if failure is None else failure.kind
        message = "" if failure is None else failure.message
        if failure is not None and running.refusal is not None:
            kind, message = "prompt_too_long", running.refusal
        self._report(
            DryEpisode(
                case=running.number,
                failure_kind=kind,
                message=message,
                num_turns=running.num_turns,
                agents=tuple(sorted(running.agents)),
                read_fields=tuple(sorted(running.query.reads)),
                missing_field=running.missing_field,
            )
        )
        if not self._running:
            self.is_over.set()


def _drop_own_frames(trace: TracebackType | None) -> None:
    """Cut the frames of this module off the end of a traceback, so that the user's line is its innermost."""
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code.co_filename == __file__:
            trace.tb_next = None
        trace = trace.tb_next
