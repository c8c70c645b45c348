"""The command line answers without loading the heavy libraries."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

HEAVY = {"torch", "ray", "vllm", "transformers", "peft", "numpy"}
PROBE = """
import sys
{statement}
print(",".join(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
HELP = """
from flexmarl.cli import main
sys.argv = ["flexmarl", *{arguments!r}]
try:
    main()
except SystemExit as exit:
    assert exit.code == 0, exit.code
"""


def loaded_by(statement: str) -> set[str]:
    probe = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines()[-1].split(","))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["eval", "--help"], ["inspect", "--help"], ["replay", "--help"], ["--version"]],
)
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    loaded = loaded_by(HELP.format(arguments=arguments))
    assert "typer" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("layer", ["core", "config", "telemetry", "scheduling", "workflow"])
def test_light_layers_load_no_heavy_library(layer: str) -> None:
    assert not loaded_by(f"import flexmarl.{layer}") & HEAVY


def test_the_package_itself_loads_no_heavy_library() -> None:
    assert not loaded_by("import flexmarl") & HEAVY


def test_the_package_itself_loads_next_to_nothing() -> None:
    program = "import sys, flexmarl; print([name for name in sys.modules if name.startswith('flexmarl.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


CTRL_C = """
import sys


class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt


sys.meta_path.insert(0, CtrlC())
sys.argv = ["flexmarl", "validate", "none.yaml"]
from flexmarl.cli import main
main()
"""


@pytest.mark.parametrize(("module", "said"), [("typer", ""), ("flexmarl.config", "aborted\n")])
def test_g7_ctrl_c_while_modules_load_ends_without_a_traceback(module: str, said: str) -> None:
    program = [sys.executable, "-c", CTRL_C.format(module=module)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_the_probe_sees_a_heavy_library() -> None:
    assert "numpy" in loaded_by("import numpy") & HEAVY
