"""Episode and its agents: token-in token-out, branches, and refusals that say what to do."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest

from flexmarl.core.errors import WorkflowError
from flexmarl.core.ids import AgentName, InstanceId, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.records import Completion, FinishReason, SamplingParams, VersionSpan
from flexmarl.models import ScriptedTokenizer
from flexmarl.workflow import Episode, Outcome, workflow
from flexmarl.workflow.api import WORKFLOW_MARK, AgentSetup

pytestmark = pytest.mark.unit

T = TypeVar("T")

TOKENIZER = ScriptedTokenizer()
STOP = TOKENIZER.stop_token_ids[0]
USER, ASSISTANT, SYSTEM = 3, 4, 2


class ScriptedClient:
    """Answers each call with the next text; a text without `|` at its end was cut off."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)
        self.calls: list[tuple[SampleKey, tuple[int, ...], SamplingParams, tuple[int, ...]]] = []
        self.gate: asyncio.Event | None = None

    async def generate(
        self, key: SampleKey, prompt_tokens: Sequence[int], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> Completion:
        self.calls.append((key, tuple(prompt_tokens), sampling, tuple(stop_token_ids)))
        text = self._texts.pop(0)
        if self.gate is not None:
            await self.gate.wait()
        if text == "error":
            raise WorkflowError("the generation failed")
        is_stopped = text.endswith("|")
        tokens = (*TOKENIZER.encode(text.removesuffix("|")), *([STOP] if is_stopped else []))
        return Completion(
            request_id=RequestId(str(key)),
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            version_spans=(VersionSpan(start=0, end=len(tokens), policy_version=0),),
            weights_version=0,
            instance_id=InstanceId("i"),
        )

    @property
    def prompts(self) -> list[list[int]]:
        return [list(prompt) for _, prompt, _, _ in self.calls]


def episode(client: ScriptedClient, *, system_prompt: str | None = None, seed: int = 0) -> Episode:
    setup = AgentSetup(
        tokenizer=TOKENIZER,
        sampling=SamplingParams(temperature=0.7, max_new_tokens=9),
        system_prompt=system_prompt,
    )
    setups = {AgentName("writer"): setup, AgentName("judge"): setup}
    return Episode({"text": "go"}, TrajectoryKey(4, 5, 6), setups, client, seed=seed)


def run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    return asyncio.run(main())


def message(role: int, text: str) -> list[int]:
    return [role, *TOKENIZER.encode(text), STOP]


# --- token-in, token-out ----------------------------------------------------------------------------------------------


def test_the_next_prompt_is_the_last_one_with_its_output_and_the_new_message() -> None:
    client = ScriptedClient("yes|", "no|")
    agent = episode(client, system_prompt="be brief").agent("writer")

    async def talk() -> None:
        await agent.chat("a")
        await agent.chat("b")

    run(talk())
    first = [*message(SYSTEM, "be brief"), *message(USER, "a"), ASSISTANT]
    second = [*first, *TOKENIZER.encode("yes"), STOP, *message(USER, "b"), ASSISTANT]
    assert client.prompts == [first, second]
    assert [turn.text for turn in agent.turns] == ["yes", "no"]
    assert agent.turns[0].tokens == (*TOKENIZER.encode("yes"), STOP)


def test_a_truncated_turn_is_closed_before_the_next_message() -> None:
    client = ScriptedClient("cut", "x|")
    agent = episode(client).agent("writer")

    async def talk() -> None:
        turn = await agent.chat("a")
        assert turn.is_truncated
        await agent.chat("b")

    run(talk())
    first = [*message(USER, "a"), ASSISTANT]
    # The end of message was not generated, so it is part of the new prompt, not of the turn.
    assert client.prompts[1] == [*first, *TOKENIZER.encode("cut"), STOP, *message(USER, "b"), ASSISTANT]
    assert agent.turns[0].tokens == tuple(TOKENIZER.encode("cut"))


def test_tokens_that_do_not_survive_decoding_stay_as_they_were_generated() -> None:
    client = ScriptedClient("\N{SNOWMAN}|", "x|")  # becomes the unknown token, whose text encodes to other tokens
    agent = episode(client).agent("writer")

    async def talk() -> None:
        turn = await agent.chat("a")
        assert turn.text == "\N{REPLACEMENT CHARACTER}"
        await agent.chat("b")

    run(talk())
    generated = agent.turns[0].tokens
    assert client.prompts[1][len(client.prompts[0]) :][: len(generated)] == list(generated)


def test_keys_count_turns_per_agent_and_branch() -> None:
    client = ScriptedClient("1|", "2|", "3|", "4|")
    team = episode(client)

    async def talk() -> None:
        await team.agent("writer").chat("a")
        await team.agent("judge").chat("b")
        await team.agent("writer").chat("c")
        await team.agent("writer", branch=2).chat("d")

    run(talk())
    expected = [("writer", 0, 0), ("judge", 0, 0), ("writer", 0, 1), ("writer", 2, 0)]
    assert [(key.agent, key.branch, key.turn) for key, *_ in client.calls] == expected
    assert all(key.trajectory_key == TrajectoryKey(4, 5, 6) for key, *_ in client.calls)
    assert [turn.key for turn in team.turns()] == sorted(key for key, *_ in client.calls)


def test_branches_have_histories_of_their_own_and_run_at_once() -> None:
    client = ScriptedClient("one|", "two|", "three|")
    team = episode(client)

    async def talk() -> None:
        client.gate = asyncio.Event()
        both = asyncio.gather(*(team.agent("writer", branch=branch).chat(f"m{branch}") for branch in range(2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(client.calls) == 2
        client.gate.set()
        await both
        await team.agent("writer", branch=1).chat("again")

    run(talk())
    assert client.prompts[2] == [
        *message(USER, "m1"),
        ASSISTANT,
        *TOKENIZER.encode("two"),
        STOP,
        *message(USER, "again"),
        ASSISTANT,
    ]


def test_an_agent_asked_for_twice_is_the_same() -> None:
    team = episode(ScriptedClient())
    assert team.agent("writer") is team.agent("writer", branch=0)
    assert team.agent("writer") is not team.agent("writer", branch=1)


def test_sampling_and_stop_tokens_reach_the_client() -> None:
    client = ScriptedClient("a|", "b|")
    agent = episode(client).agent("writer")

    async def talk() -> None:
        await agent.chat("x")
        await agent.chat("y", max_new_tokens=3, temperature=0.1)

    run(talk())
    assert client.calls[0][2] == SamplingParams(temperature=0.7, max_new_tokens=9)
    assert client.calls[1][2] == SamplingParams(temperature=0.1, max_new_tokens=3)
    assert [stops for *_, stops in client.calls] == [(STOP,), (STOP,)]


def test_the_random_numbers_of_an_episode_follow_from_its_seed() -> None:
    numbers = [episode(ScriptedClient(), seed=seed).rng.random() for seed in (3, 3, 4)]
    assert numbers[0] == numbers[1] != numbers[2]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_g10_overlapping_calls_are_refused_by_name() -> None:
    client = ScriptedClient("a|", "b|")
    agent = episode(client).agent("writer", branch=3)

    async def talk() -> None:
        client.gate = asyncio.Event()
        first = asyncio.ensure_future(agent.chat("x"))
        await asyncio.sleep(0)
        with pytest.raises(WorkflowError) as caught:
            await agent.chat("y")
        text = str(caught.value)
        assert "s4/q5/t6/writer/b3/n0" in text
        assert "s4/q5/t6/writer/b3/n1" in text
        assert 'episode.agent("writer", branch=...)' in text
        client.gate.set()
        await first
        await agent.chat("z")  # the refused call left nothing behind

    run(talk())
    assert len(client.calls) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"message": None}, "takes text, got NoneType None"),
        ({"message": b"x"}, "takes text, got bytes b'x'"),
        ({"message": "x", "max_new_tokens": 0}, "max_new_tokens=0, must be a whole number of 1 or more"),
        ({"message": "x", "max_new_tokens": 2.5}, "max_new_tokens=2.5, must be a whole number of 1 or more"),
        ({"message": "x", "max_new_tokens": "5"}, "max_new_tokens='5', must be a whole number of 1 or more"),
        ({"message": "x", "temperature": 0.0}, "temperature=0.0, must be above 0"),
        ({"message": "x", "temperature": float("nan")}, "temperature=nan, must be above 0"),
        ({"message": "x", "temperature": float("inf")}, "temperature=inf, must be above 0 and finite"),
        ({"message": "x", "temperature": "hot"}, "temperature='hot', must be above 0"),
    ],
)
def test_g10_bad_arguments_are_refused_before_anything_is_generated(arguments: dict[str, Any], message: str) -> None:
    client = ScriptedClient("a|")
    agent = episode(client).agent("writer")
    with pytest.raises(WorkflowError, match="agent writer.*") as caught:
        run(agent.chat(**arguments))
    assert message in str(caught.value)
    assert client.calls == []
    assert run(agent.chat("good")).key.turn == 0


def test_g10_an_unknown_agent_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WorkflowError, match="no agent 'wirter'; the configuration has: judge, writer"):
        episode(ScriptedClient()).agent("wirter")


@pytest.mark.parametrize("branch", [-1, "left", 1.0, True])
def test_g10_a_branch_is_a_number(branch: Any) -> None:
    with pytest.raises(WorkflowError, match=r"agent writer: branch=.* must be a whole number of 0 or more"):
        episode(ScriptedClient()).agent("writer", branch=branch)


def test_a_failed_generation_leaves_the_history_as_it_was() -> None:
    client = ScriptedClient("a|", "error", "b|")
    agent = episode(client).agent("writer")

    async def talk() -> None:
        await agent.chat("x")
        with pytest.raises(WorkflowError, match="the generation failed"):
            await agent.chat("y")
        await agent.chat("z")

    run(talk())
    first = [*message(USER, "x"), ASSISTANT, *TOKENIZER.encode("a"), STOP]
    assert client.prompts[2] == [*first, *message(USER, "z"), ASSISTANT]
    assert [turn.key.turn for turn in agent.turns] == [0, 2]


# --- decorator --------------------------------------------------------------------------------------------------------


def test_the_decorator_marks_and_returns_the_function() -> None:
    async def team(episode: Episode) -> Outcome:
        return Outcome()

    assert workflow(team) is team
    assert getattr(team, WORKFLOW_MARK) is True


def not_async(episode: Episode) -> None: ...


async def takes_nothing() -> None: ...


async def takes_two(episode: Episode, other: int) -> None: ...


async def takes_keyword(*, episode: Episode) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (not_async, "workflow not_async is not async: write `async def not_async`"),
        (takes_nothing, "workflow takes_nothing must take one argument, the episode"),
        (takes_two, "workflow takes_two must take one argument, the episode"),
        (takes_keyword, "workflow takes_keyword must take one argument, the episode"),
    ],
)
def test_g10_the_decorator_refuses_what_cannot_be_called(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        workflow(function)
    assert str(caught.value) == message


def test_the_decorator_takes_further_arguments_with_defaults() -> None:
    async def team(episode: Episode, rounds: int = 2) -> None: ...

    assert workflow(team) is team
