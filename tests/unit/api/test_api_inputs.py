"""What the user points to, checked before a process or a model is: data, workflow, models, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import validate
from flexmarl.api.build import check_inputs
from flexmarl.api.data import load_held_out_queries, load_train_queries
from flexmarl.api.workers import episode_worker_spec, instance_specs, trainer_specs
from flexmarl.config import RootConfig, parse_config
from flexmarl.core.codec import to_plain
from flexmarl.core.errors import ConfigError
from flexmarl.core.ids import PolicyName, WorkerId
from flexmarl.workflow import Episode

pytestmark = pytest.mark.unit


def load_queries(*, split: str, num_queries: int | None, seed: int, text: str = "q") -> Any:
    """A data source that says what it was asked for."""
    return [{"split": split, "seed": seed, "text": f"{text}{number}"} for number in range(num_queries or 3)]


def load_nothing(**_: object) -> Any:
    return []


def load_a_tuple(**_: object) -> Any:
    return ({"a": 1},)


def load_texts(**_: object) -> Any:
    return ["a", "b"]


def load_objects(**_: object) -> Any:
    return [{"a": 1}, {"a": {"b": [1, object()]}}]


def load_number_keys(**_: object) -> Any:
    return [{1: 2}]


def fail(**_: object) -> Any:
    raise KeyError("level")


async def team(episode: Episode) -> float:
    return 1.0


def config(*overrides: str, **data: Any) -> RootConfig:
    plain = {
        "data": data or {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:team"},
        "policies": {"red": {"model": "none"}, "blue": {"model": "none", "num_instances": 3}},
        "agents": {
            "writer": {"policy": "red", "system_prompt": "be brief", "max_new_tokens": 7},
            "judge": {"policy": "blue", "temperature": 0.5},
        },
        "pipeline": {"num_steps": 1, "queries_per_step": 2, "trajectories_per_query": 2},
        "rollout": {"backend": {"kind": "scripted"}, "max_new_tokens": 9},
        "training": {"backend": {"kind": "scripted"}},
        "runtime": {"kind": "simulated"},
    }
    return parse_config(plain, overrides)


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_source_is_called_with_split_number_seed_and_options() -> None:
    found = config(source=f"{__name__}:load_queries", seed=5, options={"text": "x"}, num_train=2)
    assert load_train_queries(found) == [
        {"split": "train", "seed": 5, "text": "x0"},
        {"split": "train", "seed": 5, "text": "x1"},
    ]
    held_out = load_held_out_queries(config("eval.num_queries=4"))
    assert [query["split"] for query in held_out] == ["held_out"] * 4


def test_evaluation_off_loads_no_held_out_query() -> None:
    assert load_held_out_queries(config("eval.at_ends=false", source=f"{__name__}:fail")) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("load_nothing", "the training data has 0 queries, pipeline.queries_per_step=2 needs as many"),
        ("load_a_tuple", "returned tuple, expected a list of dicts"),
        ("load_texts", "train query 0: expected a dict, got str 'a'"),
        ("load_objects", "train query 1, field 'a', field 'b': a object is not plain data"),
        ("load_number_keys", "train query 0: key 1 is not text"),
        ("fail", "failed for split 'train': KeyError('level')"),
        ("no_such", "no 'no_such' in "),
    ],
)
def test_g10_bad_sources_say_what_and_where(source: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config(source=f"{__name__}:{source}"))
    assert message in str(caught.value)


def test_g10_no_held_out_query_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there is no held-out query: give some, or set eval.at_ends=false"):
        load_held_out_queries(config(source=f"{__name__}:load_nothing"))


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text('{"n": 1}\n\n{"n": 2}\n{"n": 3}\n')
    held_out.write_text('{"n": 9, "text": "\N{SNOWMAN}"}\n', encoding="utf-8")
    found = config(train_file=str(train), held_out_file=str(held_out), num_train=2)
    assert load_train_queries(found) == [{"n": 1}, {"n": 2}]
    assert load_held_out_queries(found) == [{"n": 9, "text": "\N{SNOWMAN}"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"n": 1}\n{"n": \n', "train.jsonl:2: not JSON"),
        (b'{"n": 1}\n[1]\n', "train.jsonl:2: expected an object, got list"),
        (b"\n \n", "the file has no query"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_g10_bad_files_are_said_with_the_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "train.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_train_queries(config("eval.at_ends=false", train_file=str(path)))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


# --- workflow and models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workflow.path=nowhere:team", "workflow.path='nowhere:team': importing nowhere failed"),
        (f"workflow.path={__name__}:fail", "is not async"),
    ],
)
def test_g10_a_bad_workflow_is_found_before_a_process_starts(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config(override))
    assert message in str(caught.value)


def test_g10_a_model_that_does_not_exist_is_found_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_model"):
        check_inputs(
            config(
                "runtime.kind=local",
                "training.backend.kind=torch",
                f"policies.red.model={tmp_path / 'no_model'}",
            )
        )


def test_g10_a_limit_that_leaves_no_room_for_a_prompt_names_the_key() -> None:
    overrides = (
        "runtime.kind=local",
        "rollout.backend={kind: transformers}",
        "training.backend={kind: torch}",
        "policies.red.model=shipped:chain_sum",
        "policies.blue.model=shipped:chain_sum",
    )
    with pytest.raises(ConfigError, match=r"agents.writer.max_new_tokens=100000 leaves no room for a prompt"):
        check_inputs(config(*overrides, "agents.writer.max_new_tokens=100000"))
    with pytest.raises(ConfigError, match=r"rollout.max_new_tokens=100000 leaves no room for a prompt"):
        check_inputs(config(*overrides, "rollout.max_new_tokens=100000"))


def test_validate_says_what_the_configuration_comes_to() -> None:
    lines = validate(config("run.seed=4", "algorithm.group_key=query", "algorithm.truncated=train")).lines
    assert "data: 3 training queries, 256 held-out queries" in lines
    assert "step: 2 queries x 2 trajectories" in lines
    assert "run: 1 steps, seed 4" in lines
    assert any(line.startswith("pipeline: strict: ") for line in lines)
    assert "policy red: model none, agents writer" in lines
    assert any(line.startswith("policy blue: group key (query, policy)") for line in lines)
    assert "policy red: truncated turns are trained, one update per step, correction none" in lines
    assert any(line.startswith("policy red: statistics: mean_reward over the group") for line in lines)
    assert lines[-1] == "valid"


# --- workers ----------------------------------------------------------------------------------------------------------


def test_specs_hold_plain_data_and_what_the_configuration_says() -> None:
    found = config("run.seed=3")
    instances = instance_specs(found)
    assert {policy: count for policy, (count, _) in instances.items()} == {"red": 1, "blue": 3}
    trainer = trainer_specs(found)[PolicyName("red")](WorkerId("t"))
    episodes = episode_worker_spec(found)(WorkerId("e"))
    for spec in (trainer, episodes, instances[PolicyName("red")][1](WorkerId("i"))):
        assert json.loads(json.dumps(to_plain(spec.options))) == spec.options
    assert trainer.options["seed"] == 3
    writer, judge = (episodes.options["agents"][name] for name in ("writer", "judge"))
    assert (writer["system_prompt"], writer["max_new_tokens"], writer["temperature"]) == ("be brief", 7, 1.0)
    assert (judge["system_prompt"], judge["max_new_tokens"], judge["temperature"]) == (None, 9, 0.5)
