"""The episode worker: exactly one end per attempt, whatever the workflow does."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import AgentName, InstanceId, Purpose, TrajectoryKey
from flexmarl.core.messages import (
    CancelTrajectory,
    DeliverTurn,
    StartTrajectory,
    TrajectoryEnded,
    TrajectoryFailed,
    TurnRequested,
)
from flexmarl.core.records import Completion, FinishReason, SamplingParams, TurnColumns, VersionSpan
from flexmarl.models import ScriptedTokenizer
from flexmarl.workflow import Episode, Outcome
from flexmarl.workflow.api import AgentSetup
from flexmarl.workflow.worker import EpisodeWorker

pytestmark = pytest.mark.unit

TOKENIZER = ScriptedTokenizer()
KEY = TrajectoryKey(0, 1, 2)


def completion(fact: TurnRequested, text: str = "ok") -> Completion:
    tokens = (*TOKENIZER.encode(text), *TOKENIZER.stop_token_ids)
    return Completion(
        request_id=fact.request_id,
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=len(tokens), policy_version=0),),
        weights_version=0,
        instance_id=InstanceId("i"),
    )


class Lab:
    """A worker on the running loop; facts land in `facts`."""

    def __init__(self, function: Callable[[Episode], Awaitable[Any]]) -> None:
        setup = AgentSetup(
            tokenizer=TOKENIZER, sampling=SamplingParams(max_new_tokens=9), column_types={"level": "int"}
        )
        self.facts: list[Any] = []
        self.worker = EpisodeWorker(function, {AgentName("a"): setup, AgentName("b"): setup}, self.facts.append)

    async def start(self, attempt: int = 0, **query: Any) -> None:
        self.worker.handle(StartTrajectory(purpose=Purpose.TRAIN, key=KEY, attempt=attempt, query=query, seed=7))
        await settle()

    async def cancel(self, attempt: int = 0) -> None:
        self.worker.handle(CancelTrajectory(purpose=Purpose.TRAIN, key=KEY, attempt=attempt))
        await settle()

    async def deliver(self, fact: TurnRequested, text: str = "ok", *, error: str | None = None) -> None:
        answer = None if error else completion(fact, text)
        message = DeliverTurn(purpose=fact.purpose, request_id=fact.request_id, completion=answer, error=error)
        self.worker.handle(message)
        await settle()

    @property
    def requests(self) -> list[TurnRequested]:
        return [fact for fact in self.facts if isinstance(fact, TurnRequested)]

    @property
    def ends(self) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, TrajectoryEnded | TrajectoryFailed)]

    def failure(self) -> tuple[str, str]:
        """Kind and message of the one end, which is a failure."""
        (end,) = self.ends
        assert isinstance(end, TrajectoryFailed)
        assert (end.failure.trajectory, end.failure.attempt) == (KEY, 0)
        return end.failure.kind, end.failure.message


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def two_turns(episode: Episode) -> Outcome:
    first = await episode.agent("a").chat("go")
    second = await episode.agent("b").chat(first.text)
    return Outcome(rewards={"a": 1.0, "b": float(len(second.text))}, success=True)


def test_an_attempt_asks_for_turns_and_ends_with_its_outcome() -> None:
    async def main() -> None:
        lab = Lab(two_turns)
        await lab.start(attempt=3)
        (request,) = lab.requests
        assert (request.key.trajectory_key, request.attempt, request.key.agent) == (KEY, 3, "a")
        assert request.prompt_tokens == (3, *TOKENIZER.encode("go"), 0, 4)
        assert request.stop_token_ids == (0,)
        assert request.request_id == "train/s0/q1/t2/a/b0/n0/a3"
        await lab.deliver(request, "xyz")
        await lab.deliver(lab.requests[1], "four")
        (end,) = lab.ends
        assert end.outcome.rewards == {"a": 1.0, "b": 4.0}
        assert end.outcome.attempt == 3
        assert list(end.outcome.turns) == [request.key for request in lab.requests]
        assert others() == set()

    asyncio.run(main())


def test_answers_of_old_or_unknown_requests_are_ignored() -> None:
    async def main() -> None:
        lab = Lab(two_turns)
        await lab.start()
        (first,) = lab.requests
        await lab.deliver(first, "xyz")
        await lab.deliver(first, "other")
        await lab.deliver(lab.requests[1])
        (end,) = lab.ends
        assert isinstance(end, TrajectoryEnded)
        assert len(lab.requests) == 2

    asyncio.run(main())


def test_attempts_and_purposes_are_kept_apart() -> None:
    async def main() -> None:
        lab = Lab(two_turns)
        await lab.start(attempt=0)
        await lab.start(attempt=1)
        lab.worker.handle(StartTrajectory(purpose=Purpose.EVAL, key=KEY, attempt=1, query={}, seed=7))
        await settle()
        assert len({request.request_id for request in lab.requests}) == 3
        await lab.cancel(attempt=0)
        await lab.deliver(lab.requests[1])
        await lab.deliver(lab.requests[3])
        assert [(end.purpose, end.outcome.attempt) for end in lab.ends] == [("train", 1)]
        await lab.worker.close()

    asyncio.run(main())


async def fails_in_a_library(episode: Episode) -> None:
    json.loads("{")


async def overlaps(episode: Episode) -> None:
    await asyncio.gather(episode.agent("a").chat("x"), episode.agent("a").chat("y"))


async def exits(episode: Episode) -> None:
    raise SystemExit("bye")


async def misses_a_field(episode: Episode) -> None:
    episode.query["question"]


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        (fails_in_a_library, "JSONDecodeError: Expecting property name", fails_in_a_library),
        (overlaps, "WorkflowError: agent a, branch 0: two overlapping calls", overlaps),
        (exits, "SystemExit: bye", exits),
        (misses_a_field, "KeyError: no field or key 'question'", misses_a_field),
    ],
)
def test_g10_an_exception_is_a_failure_with_the_line_of_the_user(
    function: Callable[[Episode], Awaitable[Any]], message: str, line: Any
) -> None:
    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        kind, text = lab.failure()
        assert kind == "workflow_error"
        assert text.startswith(message)
        assert text.endswith(f" at {__file__}:{line.__code__.co_firstlineno + 1}")

    asyncio.run(main())


class Unruly(dict[str, float]):
    def items(self) -> Any:
        raise RuntimeError("no items")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "the workflow returned NoneType"),
        ({"a": float("nan")}, "reward of agent 'a' must be finite"),
        ({"c": 1.0}, "a reward names agent 'c'"),
        (Unruly(), "RuntimeError: no items"),
    ],
)
def test_g10_a_bad_outcome_is_a_failure_of_its_own_kind(returned: Any, message: str) -> None:
    async def function(episode: Episode) -> Any:
        return returned

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        kind, text = lab.failure()
        assert kind == "bad_reward"
        assert text.startswith(message)

    asyncio.run(main())


async def rewards_twice(episode: Episode) -> float:
    turn = await episode.agent("a").chat("x")
    turn.reward = 1.0
    turn.reward = 0.0
    return 1.0


async def misspells_a_column(episode: Episode) -> float:
    turn = await episode.agent("a").chat("x")
    turn.columns["level"] = 1
    turn.columns["levle"] = 2
    return 1.0


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (rewards_twice, "bad_reward", "turn s0/q1/t2/a/b0/n0: reward is 1.0 already, now 0.0"),
        (misspells_a_column, "bad_column", "turn s0/q1/t2/a/b0/n0: column 'levle' = 2 is not declared"),
    ],
)
def test_g10_what_a_turn_is_given_wrongly_is_a_failure_with_the_line(
    function: Callable[[Episode], Awaitable[Any]], kind: str, message: str
) -> None:
    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        await lab.deliver(lab.requests[0])
        found, text = lab.failure()
        assert found == kind
        assert message in text
        line = function.__code__.co_firstlineno + 3
        assert text.endswith(f" at {__file__}:{line}")

    asyncio.run(main())


def test_columns_reach_the_outcome() -> None:
    async def function(episode: Episode) -> float:
        turn = await episode.agent("a").chat("x")
        turn.columns["level"] = 4
        return 1.0

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        await lab.deliver(lab.requests[0])
        (end,) = lab.ends
        assert end.outcome.turn_columns == (TurnColumns(key=lab.requests[0].key, values={"level": 4}),)

    asyncio.run(main())


def test_a_workflow_that_returns_while_a_chat_runs_has_failed() -> None:
    async def function(episode: Episode) -> float:
        left = asyncio.ensure_future(episode.agent("a").chat("x"))
        await asyncio.sleep(0)
        return float(left.done())

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        kind, text = lab.failure()
        assert kind == "workflow_error"
        assert "the workflow returned while s0/q1/t2/a/b0/n0 was still being generated" in text
        assert others() == set(), "the chat waits for an answer that nobody will give"
        await lab.deliver(lab.requests[0])
        assert len(lab.ends) == 1

    asyncio.run(main())


def test_a_chat_that_begins_after_the_end_asks_for_nothing() -> None:
    async def function(episode: Episode) -> float:
        episode.rng.left = asyncio.ensure_future(episode.agent("a").chat("x"))  # type: ignore[attr-defined]
        return 1.0

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        (end,) = lab.ends
        assert isinstance(end, TrajectoryEnded)
        assert end.outcome.turns == ()
        assert lab.requests == []
        assert others() == set()

    asyncio.run(main())


def test_a_failure_beside_a_running_chat_leaves_nothing_waiting() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("tool broke")

    async def function(episode: Episode) -> None:
        await asyncio.gather(episode.agent("a").chat("x"), fail())

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        assert lab.failure()[1].startswith("ValueError: tool broke")
        assert len(lab.requests) == 1
        assert others() == set()

    asyncio.run(main())


def test_a_chat_given_up_by_the_workflow_is_not_a_failure() -> None:
    async def function(episode: Episode) -> Outcome:
        slow = asyncio.ensure_future(episode.agent("a").chat("x"))
        await asyncio.sleep(0)
        slow.cancel()
        turn = await episode.agent("a", branch=1).chat("y")
        return Outcome(rewards={"a": float(len(turn.text))})

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        slow, other = lab.requests
        await lab.deliver(slow, "late")
        await lab.deliver(other, "right")
        (end,) = lab.ends
        assert end.outcome.turns == (other.key,)
        assert end.outcome.rewards == {"a": 5.0}

    asyncio.run(main())


def test_a_cancelled_attempt_reports_nothing() -> None:
    async def main() -> None:
        lab = Lab(two_turns)
        await lab.start()
        await lab.cancel()
        await lab.cancel()
        await lab.deliver(lab.requests[0])
        assert lab.ends == []
        assert others() == set()

    asyncio.run(main())


def test_a_cancelled_attempt_that_will_not_stop_asks_for_nothing_more() -> None:
    async def function(episode: Episode) -> float:
        for branch in range(3):
            try:
                await episode.agent("a", branch=branch).chat("x")
            except asyncio.CancelledError:
                continue
        return 1.0

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        await lab.cancel()
        assert len(lab.requests) == 1
        assert lab.ends == []
        assert others() == set()

    asyncio.run(main())


def test_a_workflow_that_cancels_itself_has_failed() -> None:
    async def function(episode: Episode) -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        lab = Lab(function)
        await lab.start()
        assert lab.failure() == ("workflow_error", "the workflow cancelled itself")

    asyncio.run(main())


def test_an_error_in_place_of_a_turn_reaches_the_workflow() -> None:
    async def main() -> None:
        lab = Lab(two_turns)
        await lab.start()
        await lab.deliver(lab.requests[0], error="the prompt is too long")
        assert lab.failure()[1].startswith("WorkflowError: the prompt is too long at ")

    asyncio.run(main())


def test_close_ends_everything_without_a_report() -> None:
    async def main() -> None:
        lab = Lab(two_turns)
        await lab.start(attempt=0)
        await lab.start(attempt=1)
        await lab.worker.close()
        assert lab.ends == []
        assert others() == set()

    asyncio.run(main())


def test_a_foreign_command_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="an episode worker cannot handle str"):
        Lab(two_turns).worker.handle("hello")
