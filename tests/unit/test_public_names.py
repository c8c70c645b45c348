"""The names that users import; a change here is a change of the public interface."""

import subprocess
import sys

import pytest

import flexmarl

pytestmark = pytest.mark.unit

PUBLIC = [
    "AgentHandle",
    "Episode",
    "FlexMARLError",
    "InspectReport",
    "Outcome",
    "ReplayResult",
    "RootConfig",
    "TrainResult",
    "Turn",
    "ValidationReport",
    "evaluate",
    "inspect",
    "load_config",
    "replay",
    "train",
    "validate",
    "workflow",
]


def test_the_list_of_public_names() -> None:
    assert sorted(flexmarl.__all__) == PUBLIC


def test_every_public_name_is_there() -> None:
    assert all(callable(getattr(flexmarl, name)) for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        flexmarl.trian  # noqa: B018


def test_the_decorator_survives_the_import_of_its_package() -> None:
    program = "import flexmarl, flexmarl.workflow.worker, flexmarl.api; print(callable(flexmarl.workflow))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "True\n"
