"""Writes the list of tests in docs/promises.md: every test whose name holds the number of a promise.

`python scripts/promise_tests.py` writes it, `--check` fails when it is not current.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
HEADING = "## Tests\n"
PROMISE = re.compile(r"(?<![a-z0-9])g(\d+)(?![a-z0-9])", re.IGNORECASE)


def tests_of(path: Path) -> list[str]:
    """Return the names of test functions, and of state machines, in a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test_")]
    return sorted(names)


def promises_in(name: str) -> list[int]:
    """Return the promises that a test's name holds: 2 and 4 for `test_g2_g4_...`."""
    return [int(number) for number in PROMISE.findall(name.replace("_", " "))]


def section() -> str:
    """Return the list of tests by promise and file."""
    found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in tests_of(path):
            for promise in promises_in(name):
                found[promise][path.relative_to(ROOT).as_posix()].append(name)
    lines = [HEADING]
    for promise, files in sorted(found.items()):
        lines.append(f"### G{promise}\n")
        lines += [f"- `{file}`: {', '.join(f'`{name}`' for name in names)}" for file, names in files.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write or check the page."""
    before = PAGE.read_text(encoding="utf-8")
    after = before[: before.index(HEADING)] + section()
    if "--check" in sys.argv[1:]:
        if before != after:
            print(f"{PAGE} is not current: run scripts/promise_tests.py")
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
