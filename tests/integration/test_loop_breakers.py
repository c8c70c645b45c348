"""Workflows that break the event loop they run on: the episode worker is replaced, and the run ends or goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import train
from flexmarl.config import parse_config
from flexmarl.core.errors import BackendError, FlexMARLError, WorkflowError
from flexmarl.workflow import Episode, Outcome

pytestmark = pytest.mark.integration


def load_queries(*, split: str, num_queries: int | None, seed: int) -> list[dict[str, Any]]:
    return [{"text": str(number)} for number in range(num_queries or 2)]


class Unheard(BaseException):
    """What no workflow should raise."""


async def interrupts(episode: Episode) -> Outcome:
    raise KeyboardInterrupt


async def raises_its_own(episode: Episode) -> Outcome:
    raise Unheard("mine")


async def stops_the_loop(episode: Episode) -> Outcome:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return Outcome()


@pytest.mark.parametrize(
    ("workflow", "error", "said"),
    [
        ("interrupts", WorkflowError, "KeyboardInterrupt"),
        ("raises_its_own", WorkflowError, "Unheard: mine"),
        ("stops_the_loop", FlexMARLError, "cancelled itself|episode worker ended"),
    ],
)
def test_g7_a_workflow_that_breaks_its_loop_ends_the_run_with_its_cause(
    tmp_path: Path, workflow: str, error: type[FlexMARLError], said: str
) -> None:
    config = parse_config(
        {
            "run": {"dir": str(tmp_path / "run")},
            "data": {"source": f"{__name__}:load_queries"},
            "workflow": {"path": f"{__name__}:{workflow}", "dry_run": False, "timeout_s": 60.0},
            "policies": {"p": {"model": "none"}},
            "agents": {"a": {"policy": "p"}},
            "pipeline": {"num_steps": 1, "queries_per_step": 2, "trajectories_per_query": 2},
            "rollout": {"backend": {"kind": "scripted"}},
            "training": {"backend": {"kind": "scripted"}},
            "eval": {"at_ends": False},
            "runtime": {"inline": True},
        }
    )

    with pytest.raises(error, match=said) as caught:
        train(config)
    assert isinstance(caught.value, (BackendError, WorkflowError))
