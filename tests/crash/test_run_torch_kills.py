"""Cells of the crash matrix with real training: a disturbed run gives the bits of the undisturbed one."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.events import WorkerRestarted
from flexmarl.testing.crash_matrix import VARIANTS, Cell, run_cell, undisturbed
from flexmarl.testing.runs import GatedRun, RunLab, Trained, records_of, trained, write_scripted_model

pytestmark = pytest.mark.crash

IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
NIGHTLY_CELLS = [
    ("process group", "backward done"),
    ("process group", "seal made"),
    ("process group", "update begun"),
    ("process group", "update applied"),
    ("instance", "generation"),
    ("instance", "published in part"),
    ("object holder", "publish"),
    ("orchestrator", "turn written"),
    ("orchestrator", "acknowledged"),
    ("orchestrator", "published in part"),
]
DAILY_CELLS = [("object holder", "seal recorded"), ("orchestrator", "all updates applied")]
CHOSEN = DAILY_CELLS + (NIGHTLY_CELLS if IS_NIGHTLY else [])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_scripted_model(tmp_path_factory.mktemp("model") / "tiny")
    config = dict(VARIANTS["strict"])
    config["policies"] = {policy: {"model": str(model)} for policy in ("wr", "ju")}
    config["training"] = {**config["training"], "backend": {"kind": "torch", "accumulation": "canonical"}}
    config["optimizer"] = {"learning_rate": 0.01}
    return config


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Trained:
    """What the run trains when nobody disturbs it."""
    found = undisturbed(config, tmp_path_factory.mktemp("undisturbed"))
    assert len({digest for step in found.steps.values() for digest in step.weights_digests.values()}) == 8
    return found


@pytest.mark.parametrize(("victim", "moment"), CHOSEN, ids=[": ".join(pair) for pair in CHOSEN])
def test_g2_g5_sigkill_at_a_moment_gives_the_bits_of_the_undisturbed_run(
    tmp_path: Path, config: dict[str, Any], reference: Trained, victim: str, moment: str
) -> None:
    step = 3 if victim == "orchestrator" else 1
    run_cell(
        Cell(variant="strict", action="kill", victim=victim, moment=moment, step=step), config, tmp_path, reference
    )


def test_g2_sigkill_of_an_instance_and_a_process_group_gives_the_bits_of_the_undisturbed_run(
    tmp_path: Path, config: dict[str, Any], reference: Trained
) -> None:
    gated = GatedRun(RunLab(tmp_path), config)
    with gated.live:
        gated.wait_for_mid_step()
        for name in ("instance-ju", "trainer-wr"):
            os.kill(gated.live.worker_pid(name), signal.SIGKILL)
        gated.open_gate()
        assert gated.live.wait() == 0, gated.live.output()
        gated.live.check_nothing_is_left()
    assert trained(gated.run_dir) == reference
    assert {record.worker for record in records_of(gated.run_dir, WorkerRestarted)} == {"instance-ju-0", "trainer-wr"}


def test_g5_sigkill_of_the_orchestrator_and_resume_gives_the_bits_of_the_undisturbed_run(
    tmp_path: Path, config: dict[str, Any], reference: Trained
) -> None:
    gated = GatedRun(RunLab(tmp_path), config)
    with gated.live:
        gated.wait_for_mid_step()
        gated.live.process.kill()
        gated.live.wait()
        gated.live.check_nothing_is_left(timeout_s=5.0)
    gated.open_gate()
    gated.lab.run("train", "run", "--resume")
    assert trained(gated.run_dir) == reference
