"""Finding the user's functions."""

import sys
from pathlib import Path

import pytest

from flexmarl.core.errors import ConfigError
from flexmarl.workflow.load import load_function, load_workflow

pytestmark = pytest.mark.unit

SOURCE = """
VALUE = 3

async def team(episode):
    return 1.0

def plain(episode):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_team.py"
    path.write_text(SOURCE)
    return path


def test_a_function_of_a_module() -> None:
    from flexmarl.workflow.teams.relay import relay

    assert load_workflow("flexmarl.workflow.teams.relay:relay") is relay


def test_a_function_of_a_file_absolute_or_from_the_working_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_workflow(f"{file}:team").__name__ == "team"
    monkeypatch.chdir(file.parent)
    assert load_workflow("my_team.py:team").__name__ == "team"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("relay", "workflow.path='relay': expected module:function or file.py:function"),
        (":relay", "expected module:function"),
        ("module:", "expected module:function"),
        ("no_such_module:team", "importing no_such_module failed: ModuleNotFoundError"),
        ("no_such_file.py:team", "no file no_such_file.py (looked in "),
        ("flexmarl.workflow.teams.relay:rely", "no 'rely' in flexmarl.workflow.teams.relay; it has: relay, "),
        ("flexmarl.workflow.tasks.chain_sum:load_queries", "is not async: write `async def load_queries(episode)`"),
    ],
)
def test_g10_what_cannot_be_found_is_said_with_the_key(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workflow(path)
    assert str(caught.value).startswith(f"workflow.path={path!r}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "is not async: write `async def plain(episode)`"),
        ("VALUE", "VALUE is a int, not a function"),
        ("other", "no 'other' in {file}; it has: team, plain"),
    ],
)
def test_g10_a_file_without_the_workflow(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workflow(f"{file}:{name}")
    assert message.format(file=file) in str(caught.value)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_g10_a_file_that_fails_at_import_is_said_and_forgotten(tmp_path: Path, source: str, error: str) -> None:
    broken = tmp_path / "broken_team.py"
    broken.write_text(source)
    with pytest.raises(ConfigError, match=f"data.source=.*importing .*broken_team.py failed: {error}"):
        load_function(f"{broken}:load", what="data.source")
    assert "flexmarl_user_broken_team" not in sys.modules
    broken.write_text("def load(): return 1")
    assert load_function(f"{broken}:load", what="data.source")() == 1
