"""The same with real training: a run whose processes are killed gives the bits of the undisturbed run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.events import WorkerRestarted
from flexmarl.testing.runs import (
    GatedRun,
    RunLab,
    TrainedStep,
    records_of,
    scripted_config,
    trained_steps,
    write_scripted_model,
)

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_scripted_model(tmp_path_factory.mktemp("model") / "tiny")
    config = scripted_config()
    config["policies"] = {policy: {"model": str(model)} for policy in ("wr", "ju")}
    config["training"]["backend"] = {"kind": "torch", "accumulation": "canonical"}
    config["optimizer"] = {"learning_rate": 0.01}
    return config


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> dict[int, TrainedStep]:
    lab = RunLab(tmp_path_factory.mktemp("undisturbed"))
    lab.run("train", lab.write_config(config), "run.dir=run")
    steps = trained_steps(lab.folder / "run")
    assert len({digest for step in steps.values() for digest in step.weights_digests.values()}) == 8
    return steps


def test_g2_sigkill_of_an_instance_and_a_process_group_gives_the_bits_of_the_undisturbed_run(
    tmp_path: Path, config: dict[str, Any], undisturbed: dict[int, TrainedStep]
) -> None:
    gated = GatedRun(RunLab(tmp_path), config)
    with gated.live:
        gated.wait_for_mid_step()
        for name in ("instance-ju", "trainer-wr"):
            os.kill(gated.live.worker_pid(name), signal.SIGKILL)
        gated.open_gate()
        assert gated.live.wait() == 0, gated.live.output()
        gated.live.check_nothing_is_left()
    assert trained_steps(gated.run_dir) == undisturbed
    assert {record.worker for record in records_of(gated.run_dir, WorkerRestarted)} == {"instance-ju-0", "trainer-wr"}


def test_g5_sigkill_of_the_orchestrator_and_resume_gives_the_bits_of_the_undisturbed_run(
    tmp_path: Path, config: dict[str, Any], undisturbed: dict[int, TrainedStep]
) -> None:
    gated = GatedRun(RunLab(tmp_path), config)
    with gated.live:
        gated.wait_for_mid_step()
        gated.live.process.kill()
        gated.live.wait()
        gated.live.check_nothing_is_left(timeout_s=5.0)
    gated.open_gate()
    gated.lab.run("train", "run", "--resume")
    assert trained_steps(gated.run_dir) == undisturbed
