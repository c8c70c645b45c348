"""The documentation is true: links lead somewhere, code blocks run, named tests, commands and modules exist.

The tutorial and the how-to pages are walked as a whole by test_pages.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.config import parse_config
from flexmarl.config.plain import read_yaml

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WALKED = {ROOT / "docs" / "tutorial.md", *(ROOT / "docs" / "how-to").glob("*.md")}
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}-{number}", match[2])
        for page in PAGES
        if page not in WALKED
        for number, match in enumerate(BLOCK.finditer(page.read_text()))
        if match[1] == language
    ]


def ids(block: tuple[str, str]) -> str:
    return block[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("block", blocks("python"), ids=ids)
def test_python_blocks_run(block: tuple[str, str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", block[1]], cwd=tmp_path, timeout=120, check=True)


@pytest.mark.parametrize("block", blocks("yaml"), ids=ids)
def test_yaml_blocks_are_configurations(block: tuple[str, str]) -> None:
    parse_config(read_yaml(block[1], where=block[0]))


def test_make_targets_exist() -> None:
    known = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = "\n".join(re.findall(r"`[^`\n]*`|^make .*$", page.read_text(), re.MULTILINE))
        for words in re.findall(r"(?:^|`)make ([^`\n]*)", text, re.MULTILINE):
            targets = {word for word in words.split() if re.fullmatch("[a-z0-9]+", word)}
            assert targets <= known, f"{page.name}: make {words}"


def test_named_paths_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"\b((?:src|tests|docs|scripts|examples|benchmarks)/[\w./-]*\w)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_every_page_is_linked() -> None:
    targets = [(page, target) for page in PAGES for target in LINK.findall(page.read_text())]
    linked = {(page.parent / target).resolve() for page, target in targets if "://" not in target}
    assert [str(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in linked] == []


@pytest.mark.parametrize("page", ["failures.md", "promises.md"])
def test_named_tests_exist(page: str) -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text())
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in tests] == []


@pytest.mark.parametrize("page", ["architecture.md", "life-of-a-turn.md"])
def test_named_modules_and_functions_exist(page: str) -> None:
    """A name in backticks with a dot is a module or a member of this package, and one with `()` is defined in it."""
    sources = {path: path.read_text() for path in (ROOT / "src" / "flexmarl").rglob("*.py")}
    text = (ROOT / "docs" / page).read_text()
    for path in re.findall(r"`(\w+(?:/\w+)*\.py)`", text):
        assert any(str(source).endswith(f"/{path}") for source in sources), f"{page}: {path}"
    everything = "\n".join(sources.values())
    for owner, name in re.findall(r"`(?:(\w+)\.)?(\w+)\(\)`", text):
        where = everything if not owner else "\n".join(s for s in sources.values() if f"class {owner}" in s)
        assert f"def {name}(" in where, f"{page}: {owner}.{name}()"


@pytest.mark.parametrize("script", ["config_reference.py", "promise_tests.py"])
def test_generated_pages_are_current(script: str) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], timeout=60, check=True)
