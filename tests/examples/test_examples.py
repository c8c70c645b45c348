"""Every configuration in examples/ trains, resumes and is evaluated, as a user would do it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
SMALL = ["pipeline.num_steps=2", "pipeline.queries_per_step=4", "pipeline.trajectories_per_query=4"]
SMALL_EVALUATION = ["eval.num_queries=8"]


def flexmarl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("flexmarl"), *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} >= {"quickstart.yaml", "column_sum.yaml", "own_team.yaml"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_valid(example: Path) -> None:
    result = flexmarl("validate", example)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "valid"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains(example: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    trained = flexmarl("train", example, f"run.dir={run_dir}", *SMALL, *SMALL_EVALUATION)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "done: 2 of 2 steps" in trained.stdout.splitlines()[-1]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 2
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_goes_on_and_is_evaluated(tmp_path: Path) -> None:
    example, run_dir = FOLDER / "own_team.yaml", tmp_path / "run"
    first = flexmarl("train", example, f"run.dir={run_dir}", *SMALL, *SMALL_EVALUATION, "--quiet")
    assert first.returncode == 0, first.stdout + first.stderr
    again = flexmarl("train", run_dir, "pipeline.num_steps=3", "--resume", "--quiet")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "done: 3 of 3 steps" in again.stdout
    evaluated = flexmarl("eval", run_dir)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    assert "evaluation at version 3: success" in evaluated.stdout
