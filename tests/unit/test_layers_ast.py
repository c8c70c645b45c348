"""What import-linter cannot say: reads of the clock, threads and sockets where virtual time must reach, and third-party
imports of core."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SRC = Path(__file__).parents[2] / "src" / "flexmarl"
VIRTUAL = ("orchestrator", "rollout", "store", "training")
FORBIDDEN_MODULES = {"_thread", "concurrent", "multiprocessing", "queue", "socket", "subprocess", "threading", "time"}
FORBIDDEN_NAMES = {"Executor", "ProcessPoolExecutor", "ThreadPoolExecutor", "run_in_executor", "to_thread"}


def sources(layer: str, *, with_backends: bool = True) -> Iterator[Path]:
    for path in sorted((SRC / layer).rglob("*.py")):
        if with_backends or "backends" not in path.relative_to(SRC / layer).parts:
            yield path


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported module, those for type checkers alone left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        else:
            yield from imports(node)


def hidden_time(source: str) -> list[str]:
    """Lines that read the clock, start threads or open sockets behind the back of the runtime."""
    tree = ast.parse(source)
    found = [f"{line}: import {name}" for line, name in imports(tree) if name.partition(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in FORBIDDEN_NAMES:
            found.append(f"{node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("layer", VIRTUAL)
def test_no_hidden_time_threads_or_sockets(layer: str) -> None:
    paths = list(sources(layer, with_backends=False))
    assert paths
    assert {str(path): found for path in paths if (found := hidden_time(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import socket as s",
        "def f():\n    import threading",
        "from concurrent.futures import ThreadPoolExecutor",
        "async def f():\n    await asyncio.to_thread(g)",
        "loop.run_in_executor(None, g)",
    ],
)
def test_the_check_sees_what_is_forbidden(source: str) -> None:
    assert hidden_time(source)


def test_core_imports_the_standard_library_only() -> None:
    foreign = {
        f"{path.name}:{line}: {name}"
        for path in sources("core")
        for line, name in imports(ast.parse(path.read_text()))
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("flexmarl.core")
    }
    assert foreign == set()


def test_type_checking_imports_are_not_counted_and_others_are() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    import torch\nif True:\n    import numpy")
    assert [name for _, name in imports(tree)] == ["numpy"]
