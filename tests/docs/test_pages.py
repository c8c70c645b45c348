"""The tutorial and the how-to pages work from top to bottom, as a reader would follow them.

Each page is walked in a folder of its own that holds the tutorial's team. Blocks are taken in order:

* `python` or `yaml` whose first line is a comment with a file name: the file is written; a script is run, a
  configuration is validated;
* other `python`: run in the folder;
* other `yaml`: part of a configuration, read over the tutorial's;
* `bash`: run in the folder. Commands that train get a few small steps, with scripted engines unless the page needs
  weights: those pages take longer and run with the examples.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flexmarl.config import parse_config
from flexmarl.config.plain import read_yaml

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
NEED_WEIGHTS = [TUTORIAL, ROOT / "docs" / "how-to" / "evaluate-and-export.md"]
NEED_NONE = sorted(path for path in (ROOT / "docs" / "how-to").glob("*.md") if path not in NEED_WEIGHTS)
TEAM = ("column_sum.py", "column_sum.yaml")

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))\n")
TRAIN = re.compile(r"^flexmarl train .*$", re.MULTILINE)
SMALL = ("pipeline.queries_per_step=2", "pipeline.trajectories_per_query=2", "eval.num_queries=2")
SCRIPTED = ("rollout.backend.kind=scripted", "training.backend.kind=scripted")
TIME_LIMIT_S = 100


def run(arguments: list[str | Path], folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{arguments[-1]}\n{done.stdout}{done.stderr}"


def small(script: str, *, has_weights: bool) -> str:
    """Return a script whose training commands are small."""

    def shortened(match: re.Match[str]) -> str:
        command = match[0]
        steps = () if "pipeline.num_steps" in command else ("pipeline.num_steps=2",)
        return " ".join([command, *steps, *SMALL, *(() if has_weights else SCRIPTED)])

    return TRAIN.sub(shortened, script.replace("\\\n", " "))


def merged(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `part` in place of its own, section by section."""
    return {**base, **{key: {**base[key], **part[key]} if key in base else part[key] for key in part}}


def walk(page: Path, folder: Path) -> None:
    for name in TEAM:
        shutil.copy(ROOT / "examples" / name, folder / name)
    base = read_yaml((folder / "column_sum.yaml").read_text(), where="column_sum.yaml")
    for language, text in BLOCK.findall(page.read_text()):
        named = FILE_NAME.match(text)
        if named is not None:
            (folder / named[1]).write_text(text.removeprefix(named[0]) if named[1] in TEAM else text)
        match language:
            case "python":
                run([sys.executable, named[1]] if named else [sys.executable, "-c", text], folder)
            case "yaml" if named is not None:
                run([Path(sys.executable).with_name("flexmarl"), "validate", named[1]], folder)
            case "yaml":
                parse_config(merged(base, read_yaml(text, where=page.name)))
            case "bash":
                run(["bash", "-euc", small(text, has_weights=page in NEED_WEIGHTS)], folder)


@pytest.mark.examples
@pytest.mark.parametrize("page", NEED_WEIGHTS, ids=lambda page: page.stem)
def test_a_page_with_weights_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    walk(page, tmp_path)


@pytest.mark.docs
@pytest.mark.parametrize("page", NEED_NONE, ids=lambda page: page.stem)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    walk(page, tmp_path)


@pytest.mark.docs
def test_the_tutorial_shows_the_files_that_examples_train() -> None:
    blocks = [text for _, text in BLOCK.findall(TUTORIAL.read_text())]
    shown = {match[1]: text[match.end() :] for text in blocks if (match := FILE_NAME.match(text))}
    assert set(shown) == set(TEAM)
    for name in TEAM:
        assert shown[name].strip() == (ROOT / "examples" / name).read_text().strip()


@pytest.mark.docs
def test_a_page_that_is_wrong_is_seen(tmp_path: Path) -> None:
    for number, block in enumerate(
        (
            "```python\nraise SystemExit(1)\n```\n",
            "```yaml\npipeline: {num_stps: 3}\n```\n",
            "```yaml\n# column_sum.yaml\nworkflow: {path: gone.py:team}\n```\n",
            "```bash\nfalse\ntrue\n```\n",
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        page = folder / "page.md"
        page.write_text(block)
        with pytest.raises((AssertionError, ValueError)):
            walk(page, folder)
