"""Episodes with scripted answers, in a child process: what they report, and what cannot escape from them."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api.dry_run import MAX_TURNS, DryCase, DryEpisode, run_dry
from flexmarl.core.ids import AgentName
from flexmarl.core.records import SamplingParams
from flexmarl.models import ScriptedTokenizer
from flexmarl.workflow import Episode
from flexmarl.workflow.api import AgentSetup

pytestmark = pytest.mark.unit

SETUPS = {
    AgentName(name): AgentSetup(tokenizer=ScriptedTokenizer(), sampling=SamplingParams(max_new_tokens=8))
    for name in ("writer", "judge")
}
STATE = {"num_runs": 0}


def run(
    function: Any, *queries: dict[str, Any], answers: tuple[str, ...] = ("42",), **options: Any
) -> list[DryEpisode]:
    cases = [DryCase(query=query, answers=answers, seed=number) for number, query in enumerate(queries)]
    settings: dict[str, Any] = {"context_tokens": {}, "budget_s": 20.0} | options
    return run_dry(function, SETUPS, cases, **settings)


async def converse(episode: Episode) -> dict[str, float]:
    first = await episode.agent("writer").chat(episode.query["question"])
    if first.text == "42":
        await episode.agent("judge").chat(first.text)
    return dict.fromkeys((turn.key.agent for turn in episode.turns()), 1.0)


def test_an_episode_reports_turns_agents_and_fields_read() -> None:
    assert run(converse, {"question": "?", "unread": 1}, {"question": "!"}) == [
        DryEpisode(case=0, num_turns=2, agents=("judge", "writer"), read_fields=("question",)),
        DryEpisode(case=1, num_turns=2, agents=("judge", "writer"), read_fields=("question",)),
    ]


async def three_turns(episode: Episode) -> float:
    texts = [(await episode.agent("writer").chat("go")).text for _ in range(3)]
    assert texts == ["a", "b", "a"], texts
    return 1.0


def test_answers_come_in_turn_and_from_the_first_again() -> None:
    assert [episode.failure_kind for episode in run(three_turns, {}, answers=("a", "b"))] == [None]


async def long_answer(episode: Episode) -> float:
    turn = await episode.agent("writer").chat("go")
    assert (turn.text, turn.is_truncated) == ("12345678", True)
    return 1.0


def test_an_answer_is_cut_at_its_limit() -> None:
    assert run(long_answer, {}, answers=("123456789",))[0].failure_kind is None


async def reads_inner(episode: Episode) -> float:
    await episode.agent("writer").chat("go")
    return float(episode.query["metadata"]["level"])


async def own_lookup(episode: Episode) -> float:
    turn = await episode.agent("writer").chat("go")
    return {"right": 1.0}[turn.text]


async def looks_twice(episode: Episode) -> float:
    """A field that may be missing, then a key of its own of the same name."""
    await episode.agent("writer").chat("go")
    try:
        return float(episode.query["bonus"])
    except KeyError:
        return {"malus": 1.0}["bonus"]


async def catches(episode: Episode) -> float:
    await episode.agent("writer").chat("go")
    try:
        return float(episode.query["bonus"])
    except KeyError:
        return 0.0


def test_only_a_field_of_the_query_counts_as_missing() -> None:
    inner, own, caught = (
        run(function, {"metadata": {"name": "x"}})[0] for function in (reads_inner, own_lookup, catches)
    )
    assert (inner.failure_kind, inner.missing_field) == ("workflow_error", "metadata.level")
    assert inner.message.startswith("KeyError: no field or key 'level' at ")
    assert f"{Path(__file__).name}:" in inner.message
    assert "dry_run" not in inner.message.rpartition("/")[2].removeprefix(Path(__file__).name)
    assert (own.failure_kind, own.missing_field) == ("workflow_error", None)
    assert (caught.failure_kind, caught.missing_field) == (None, None)
    (twice,) = run(looks_twice, {})
    assert (twice.failure_kind, twice.missing_field) == ("workflow_error", None)


async def too_long(episode: Episode) -> float:
    await episode.agent("writer").chat(episode.query["question"])
    return 1.0


def test_a_prompt_over_the_context_is_refused_as_engines_do() -> None:
    # "x" is <user> x <end> <assistant>: 4 tokens, so a context of 5 has room for one more.
    contexts = {AgentName("writer"): 5}
    fits, over = run(too_long, {"question": "x"}, {"question": "xx"}, context_tokens=contexts)
    assert fits.failure_kind is None
    assert (over.failure_kind, over.num_turns) == ("prompt_too_long", 0)
    assert over.message == (
        "the prompt of agent writer has 5 tokens, and the context of its model has 5, for the prompt and the answer"
    )


async def never_pleased(episode: Episode) -> float:
    while (await episode.agent("writer").chat("again")).text != "please":
        pass
    return 1.0


def test_a_workflow_that_asks_for_ever_is_stopped() -> None:
    (episode,) = run(never_pleased, {})
    assert (episode.failure_kind, episode.num_turns) == ("too_many_turns", MAX_TURNS)


async def some_block(episode: Episode) -> float:
    if episode.query.get("blocks"):
        await asyncio.sleep(0.01)
        while True:
            pass
    return 1.0


def test_code_that_blocks_is_killed_and_what_ended_before_is_kept() -> None:
    began_s = time.monotonic()
    episodes = run(some_block, {}, {"blocks": True}, {}, budget_s=0.08)
    assert time.monotonic() - began_s < 1.0
    assert [episode.case for episode in episodes] == [0, 2]


async def leaves_traces(episode: Episode) -> float:
    STATE["num_runs"] += 1
    os.environ["LEFT"] = "1"
    print("noise")
    os.chdir("/")
    raise SystemExit(3)


def test_nothing_of_an_episode_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path.cwd()
    (episode,) = run(leaves_traces, {})
    assert episode.failure_kind == "workflow_error"
    assert STATE["num_runs"] == 0
    assert "LEFT" not in os.environ
    assert Path.cwd() == folder
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ChildProcessError):  # it has been waited for
        os.waitpid(-1, os.WNOHANG)


def test_no_case_is_no_episode() -> None:
    assert run(converse) == []
