"""G10: every wrong input is one message with what, where and the fix, before a process or a model is.

The command line runs in this process; engines are scripted, or are never reached.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexmarl.cli.commands import app
from flexmarl.testing.runs import scripted_config

pytestmark = pytest.mark.integration

TEAM = """
import flexmarl

@flexmarl.workflow
async def reads_a_field(episode):
    turn = await episode.agent("writer").chat(episode.query["question"])
    await episode.agent("judge").chat(turn.text)
    return {"writer": float(turn.text == episode.query["answer"]), "judge": 0.0}

def not_async(episode):
    return 0.0

async def two_arguments(episode, more):
    return 0.0

number = 3
"""
REAL_MODEL = (
    "rollout.backend={kind: transformers}",
    "training.backend={kind: torch}",
    "policies.wr.model=shipped:chain_sum",
    "policies.ju.model=shipped:chain_sum",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a whole configuration, a team and data."""
    monkeypatch.chdir(tmp_path)
    config = scripted_config()
    config["run"]["dir"] = "run"
    config["workflow"]["dry_run"] = True
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    (tmp_path / "team.py").write_text(TEAM)
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "whole.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    del rows[4]["answer"]
    (tmp_path / "lacking.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[4] = {"question": "1+" * 70 + "1", "answer": "71"}
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "afile").write_text("mine")
    return tmp_path


def refused(*arguments: str, commands: tuple[str, ...] = ("train", "validate"), code: int = 2) -> str:
    """Run each command; return the message, which is one of them all."""
    messages = set()
    for command in commands:
        result = CliRunner().invoke(app, [command, *arguments])
        assert result.exit_code == code, result.output
        assert isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        messages.add(result.stderr)
    (message,) = messages
    return message


def from_file(name: str) -> tuple[str, ...]:
    return ("run.yaml", "data.source=null", f"data.train_file={name}", "workflow.path=team.py:reads_a_field")


CASES = {
    "unknown key": (["pipeline.num_step=4"], "pipeline.num_step: unknown key; did you mean num_steps?"),
    "wrong type": (["pipeline.num_steps=many"], "pipeline.num_steps: Input should be a valid integer"),
    "missing policy": (["agents.judge.policy=jury"], "agents.judge.policy is 'jury', but policies has only: ju, wr"),
    "unbound policy": (
        ["agents.judge.policy=wr"],
        "policies.ju is bound to no agent: set agents.<name>.policy=ju, or remove it",
    ),
    "no such file": (["workflow.path=none.py:team"], "workflow.path='none.py:team': no file none.py (looked in "),
    "no such module": (["workflow.path=nowhere:team"], "importing nowhere failed: ModuleNotFoundError"),
    "no such function": (["workflow.path=team.py:best"], "no 'best' in team.py; it has: reads_a_field, not_async"),
    "not a function": (["workflow.path=team.py:number"], "number is a int, not a function"),
    "not async": (["workflow.path=team.py:not_async"], "is not async: write `async def not_async(episode)`"),
    "two arguments": (
        ["workflow.path=team.py:two_arguments"],
        "TypeError: two_arguments() missing 1 required positional argument: 'more'",
    ),
    "bad run name": (["run.name=a/b"], "run.name: String should match pattern"),
    "run name of dots": (["run.name=.."], "run.name: String should match pattern"),
    "unknown tracker": (["telemetry.trackers=[tensorbord]"], "telemetry.trackers.0: Input should be 'tensorboard'"),
    "more queries than data": (
        ["pipeline.queries_per_step=100000"],
        "has 12 queries, pipeline.queries_per_step=100000 needs as many: give more data, or lower it",
    ),
    "no room for a prompt": (
        [*REAL_MODEL, "rollout.max_new_tokens=128"],
        "=128 leaves no room for a prompt: the context of policies.wr.model=shipped:chain_sum has 128 tokens; lower it",
    ),
    "no such model": ([*REAL_MODEL, "policies.ju.model=none"], "model 'none' is not a folder"),
}


@pytest.mark.parametrize(("overrides", "message"), CASES.values(), ids=CASES.keys())
def test_g10_a_wrong_value_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    assert message in refused("run.yaml", *overrides)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.jsonl", "error: data.train_file=empty.jsonl: the file has no query"),
        ("none.jsonl", "error: data.train_file=none.jsonl: cannot be read: [Errno 2] No such file or directory"),
        (
            "lacking.jsonl",
            "fails on lacking.jsonl:5: KeyError: no field or key 'answer' at {folder}/team.py:8; ",
        ),
    ],
)
def test_g10_wrong_data_is_refused_with_its_line(folder: Path, name: str, message: str) -> None:
    assert message.format(folder=folder) in refused(*from_file(name))
    assert not (folder / "run").exists()


def test_g10_a_prompt_over_the_context_is_refused_with_its_line(folder: Path) -> None:
    assert (
        "fails on long.jsonl:5: the prompt of agent writer has 145 tokens, and the context of its model has 128, for "
        "the prompt and the answer; shorten or leave out the query, or use a model with a longer context"
    ) in refused(*from_file("long.jsonl"), *REAL_MODEL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "wrong.yaml:1:7 is not valid YAML: while parsing a flow node"),
        ("run: {}\nrun: {}\n", "wrong.yaml:2:1 is not valid YAML: the key 'run' is given twice"),
        ("", "wrong.yaml: expected a mapping of sections, got NoneType"),
        ("run: {seed: -1}\n", "run.seed: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_g10_wrong_yaml_is_refused_with_its_place(folder: Path, text: str, message: str) -> None:
    (folder / "wrong.yaml").write_text(text)
    assert message in refused("wrong.yaml", commands=("train", "validate", "eval"))


def test_g10_a_missing_tracker_is_named_before_the_run_folder_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "install it with `pip install 'flexmarl[wandb]'`" in refused("run.yaml", "telemetry.trackers=[wandb]")
    assert not (folder / "run").exists()


def test_a_run_folder_that_is_a_file_is_refused_and_left_alone(folder: Path) -> None:
    message = refused("run.yaml", "run.dir=afile", commands=("train",))
    assert f"run.dir={folder}/afile is not a folder that can be read" in message
    assert (folder / "afile").read_text() == "mine"
    below = refused("run.yaml", "run.dir=afile/run", commands=("train",), code=1)
    assert f"cannot create the run folder {folder}/afile/run" in below
    assert "choose another run.dir" in below


def test_g10_no_wrong_input_needs_torch(folder: Path) -> None:
    program = (
        "import sys\n"
        "from flexmarl.cli.commands import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    print(end.code, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    arguments = ["train", *from_file("long.jsonl"), *REAL_MODEL]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"
    assert "fails on long.jsonl:5" in done.stderr


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "smallest of all": lambda config: config.update(
        pipeline={"num_steps": 1, "queries_per_step": 1, "trajectories_per_query": 2},
        training={"backend": {"kind": "scripted"}, "micro_batch_tokens": 1, "seal_every": 1, "num_slots": 1},
        rollout={"backend": {"kind": "scripted", "num_slots": 1}, "max_new_tokens": 1},
        checkpoint={"every": 1, "keep_last": 1},
    ),
    "three agents, two policies": lambda config: config["agents"].update(third={"policy": "ju"}),
    "one policy": lambda config: config.update(
        policies={"wr": {"model": "none"}}, agents={"writer": {"policy": "wr"}, "judge": {"policy": "wr"}}
    ),
    "more evaluation queries than there are": lambda config: config.update(
        data={"train_file": "whole.jsonl", "held_out_file": "whole.jsonl"}, eval={"num_queries": 1000}
    ),
    "every query in a step": lambda config: config["pipeline"].update(queries_per_step=12),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD.keys())
def test_odd_but_right_configurations_run(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = scripted_config() | {"runtime": {"inline": True}}
    config["pipeline"]["num_steps"] = 1
    config["workflow"]["dry_run"] = True
    change(config)
    (folder / "odd.yaml").write_text(json.dumps(config))
    validated = CliRunner().invoke(app, ["validate", "odd.yaml"])
    assert validated.exit_code == 0, validated.output
    assert validated.stdout.endswith("valid\n")
    trained = CliRunner().invoke(app, ["train", "odd.yaml", "run.dir=odd"])
    assert trained.exit_code == 0, trained.output
    assert "done: 1 of 1 steps" in trained.stdout
    summary = json.loads((folder / "odd" / "summary.json").read_text())
    assert summary["steps"] == 1
