"""Which faults of a workflow refuse a run, which are warnings, and where they are said to be."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import validate
from flexmarl.api.build import check_inputs
from flexmarl.config import RootConfig, parse_config
from flexmarl.core.errors import ConfigError
from flexmarl.workflow import Episode, Outcome

pytestmark = pytest.mark.unit

SUMS = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(6)]


def load_queries(*, split: str, num_queries: int | None, seed: int, changes: Mapping[str, Any] = {}) -> Any:
    """Sums; `changes` says for a query number what replaces its fields, and None removes one."""
    rows = [dict(row) for row in SUMS]
    if split == "train":
        for number, fields in changes.items():
            rows[int(number)] |= fields
    return [{key: value for key, value in row.items() if value != "REMOVED"} for row in rows][:num_queries]


async def sums(episode: Episode) -> Outcome:
    first = await episode.agent("writer").chat(episode.query["question"])
    second = await episode.agent("judge").chat(first.text)
    return Outcome(rewards={"writer": float(first.text == episode.query["answer"]), "judge": float(len(second.text))})


async def judges_right_answers(episode: Episode) -> Outcome:
    first = await episode.agent("writer").chat(episode.query["question"])
    if first.text == episode.query["answer"]:
        await episode.agent("judge").chat("?")
    return Outcome(rewards={"writer": 1.0, "judge": 0.5})


async def alone(episode: Episode) -> float:
    await episode.agent("writer").chat("go")
    return 1.0


async def numbers_only(episode: Episode) -> float:
    return float(int((await episode.agent("writer").chat("go")).text)) + len(
        (await episode.agent("judge").chat("")).text
    )


async def wrong_name(episode: Episode) -> float:
    await episode.agent("writter").chat("go")
    return 1.0


async def late_wrong_name(episode: Episode) -> float:
    await episode.agent("writer").chat("go")
    await episode.agent("jugde").chat("go")
    return 1.0


async def forgets_await(episode: Episode) -> Any:
    turn = episode.agent("writer").chat("go")
    await episode.agent("judge").chat("go")
    return {"writer": float(len(turn.text)), "judge": 1.0}  # type: ignore[attr-defined]


async def misspells(episode: Episode) -> Any:
    await episode.agent("writer").chat("go")
    return {"writer": float(len(trun.text))}  # type: ignore[name-defined]  # noqa: F821


async def nan_reward(episode: Episode) -> Any:
    await episode.agent("writer").chat("go")
    return {"writer": float("nan")}


async def text_reward(episode: Episode) -> Any:
    await episode.agent("writer").chat("go")
    return {"writer": "good"}


async def no_reward(episode: Episode) -> Any:
    await episode.agent("writer").chat("go")
    await episode.agent("judge").chat("go")
    return {"writer": 1.0}


async def sometimes_nan(episode: Episode) -> Any:
    turn = await episode.agent("writer").chat("go")
    return {"writer": 1.0 if turn.text.isdigit() else float("nan")}


async def forgets_the_column(episode: Episode) -> float:
    writer = await episode.agent("writer").chat("go")
    writer.columns["level"] = 1
    await episode.agent("judge").chat("go")
    return 1.0


async def weighs_right_answers_only(episode: Episode) -> float:
    writer = await episode.agent("writer").chat("go")
    judge = await episode.agent("judge").chat("go")
    if writer.text.isdigit():
        judge.columns["weight"] = 2.0
    return 1.0


async def misspells_the_column(episode: Episode) -> float:
    writer = await episode.agent("writer").chat("go")
    await episode.agent("judge").chat("go")
    writer.columns["levle"] = 1
    return 1.0


def config(workflow: str, *overrides: str, **data: Any) -> RootConfig:
    plain = {
        "data": data or {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:{workflow}"},
        "policies": {"wr": {"model": "none"}, "ju": {"model": "none"}},
        "agents": {"writer": {"policy": "wr"}, "judge": {"policy": "ju"}},
        "pipeline": {"num_steps": 1, "queries_per_step": 2, "trajectories_per_query": 2},
        "rollout": {"backend": {"kind": "scripted"}, "max_new_tokens": 9},
        "training": {"backend": {"kind": "scripted"}},
        "eval": {"num_queries": 6},
    }
    return parse_config(plain, overrides)


def refusal(workflow: str, changes: Mapping[str, Any] | None = None, *, is_thorough: bool = False) -> str:
    data = {"source": f"{__name__}:load_queries", "options": {"changes": dict(changes or {})}}
    with pytest.raises(ConfigError) as caught:
        check_inputs(config(workflow, **data), is_thorough=is_thorough)
    return str(caught.value)


def warnings(workflow: str, *overrides: str) -> Sequence[str]:
    return validate(config(workflow, *overrides)).warnings


# --- refused before a run ---------------------------------------------------------------------------------------------


def test_g10_a_row_without_the_field_is_found_wherever_it_is() -> None:
    message = refusal("sums", {"4": {"answer": "REMOVED"}})
    assert f"workflow.path='{__name__}:sums' fails on train query 4 of data.source={__name__}:load_queries" in message
    assert "KeyError: no field or key 'answer' at " in message
    assert f"{Path(__file__).name}:{sums.__code__.co_firstlineno + 3}" in message
    assert "the fields of that query: question; add 'answer' to the data" in message


def test_g10_a_row_of_another_type_is_found() -> None:
    message = refusal("sums", {"3": {"question": None}})
    assert "fails on train query 3" in message
    assert "agent writer: chat() takes text, got NoneType None" in message


def test_g10_a_row_of_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n\n{"question": "2+2", "answer": "4"}\n{"question": "3+3"}\n')
    with pytest.raises(ConfigError) as caught:
        check_inputs(config("sums", "eval.at_ends=false", train_file=str(path)))
    assert f"fails on {path}:4: KeyError: no field or key 'answer'" in str(caught.value)


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ("late_wrong_name", "no agent 'jugde'"),
        ("misspells", "NameError: name 'trun' is not defined"),
        pytest.param(
            "forgets_await",
            "did you forget an await?",
            marks=pytest.mark.filterwarnings(
                "ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
            ),
        ),
    ],
)
def test_g10_a_typing_mistake_in_every_dry_run_is_refused(workflow: str, said: str) -> None:
    message = refusal(workflow)
    assert said in message
    assert "in each of" in message


def test_g10_a_failure_before_the_first_answer_is_certain() -> None:
    assert "no agent 'writter'; the configuration has: judge, writer" in refusal("wrong_name")


def test_g10_a_prompt_over_the_context_is_found_in_the_longest_row() -> None:
    overrides = [
        "rollout.backend={kind: transformers}",
        "training.backend={kind: torch}",
        "policies.wr.model=shipped:chain_sum",
        "policies.ju.model=shipped:chain_sum",
    ]
    changes = {"2": {"question": "1+" * 70 + "1"}}
    data = {"source": f"{__name__}:load_queries", "options": {"changes": changes}}
    with pytest.raises(ConfigError) as caught:
        check_inputs(config("sums", *overrides, **data))
    assert "fails on train query 2" in str(caught.value)
    assert "and the context of its model has 128" in str(caught.value)
    check_inputs(config("sums", *overrides))


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ("nan_reward", "reward of agent 'writer' must be finite, got nan"),
        ("text_reward", "reward of agent 'writer' must be a number, got str 'good'"),
        ("no_reward", "agent 'judge' acted but has no reward: add it to Outcome.rewards, or set turn.reward"),
    ],
)
def test_g10_wrong_rewards_are_errors_of_validate_and_refuse_no_run(workflow: str, message: str) -> None:
    assert message in refusal(workflow, is_thorough=True)
    assert check_inputs(config(workflow)).workflow is not None


def weighed_config(workflow: str) -> RootConfig:
    """The judge's policy is trained with column `weight`."""
    columns = ["store.columns.weight=float", "store.columns.level=int"]
    return config(workflow, *columns, "policies.ju.algorithm.weight_column=weight")


def test_g10_a_required_column_that_no_one_fills_is_found_before_a_run() -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(weighed_config("forgets_the_column"))
    message = str(caught.value)
    assert "on train query 0" in message
    assert "turn s0/q0/t0/judge/b0/n0 has no value of column 'weight', which the policy of agent judge is " in message
    assert "set turn.columns['weight'] on each of its turns (so it was with each of" in message


def test_g10_a_column_that_is_not_declared_is_found_before_a_run() -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config("misspells_the_column", "store.columns.level=int"))
    assert "column 'levle' = 1 is not declared; store.columns has: level; add levle: int to it" in str(caught.value)


def test_a_column_that_is_filled_with_some_answers_is_a_warning() -> None:
    (warning,) = validate(weighed_config("weighs_right_answers_only")).warnings
    assert "dry runs (bad_column)" in warning
    assert "has no value of column 'weight'" in warning


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_a_whole_workflow_has_no_warning() -> None:
    assert warnings("sums") == []


def test_an_agent_that_only_a_right_answer_reaches_is_reached() -> None:
    assert warnings("judges_right_answers") == []


def test_an_agent_that_is_never_asked_is_a_warning() -> None:
    (warning,) = warnings("alone")
    assert warning.startswith("agent judge was never asked in ")
    assert "its policy ju" in warning


def test_what_odd_answers_cause_is_a_warning() -> None:
    (warning,) = warnings("numbers_only")
    assert "dry runs (workflow_error), the first on train query 0" in warning
    assert "ValueError: invalid literal for int()" in warning
    assert any("(bad_reward)" in warning for warning in warnings("sometimes_nan"))


def test_fewer_held_out_queries_than_asked_for_is_a_warning() -> None:
    assert warnings("sums", "eval.num_queries=7") == ["eval.num_queries=7, but there are only 6 held-out queries"]


def test_the_dry_run_can_be_switched_off() -> None:
    report = validate(config("wrong_name", "workflow.dry_run=false"))
    assert "dry run: off (workflow.dry_run=false)" in report.lines
    assert report.warnings == []
