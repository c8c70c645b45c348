"""What the command line says, and leaves behind, when an input is wrong, a folder is taken or the disk is full.

Nothing here needs a model: the engines are scripted.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexmarl.telemetry.event_log import read_events
from flexmarl.telemetry.metrics_log import read_metrics
from flexmarl.testing.runs import RunLab, scripted_config, trained_steps, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def lab(tmp_path: Path) -> RunLab:
    return RunLab(tmp_path)


def gated_config(lab: RunLab) -> dict[str, Any]:
    """A run that waits in step 1 or later until the file `gate` exists."""
    config = scripted_config()
    config["data"]["options"] = {"gate": str(lab.folder / "gate"), "gated_query": 5}
    return config


def is_waiting(lab: RunLab) -> bool:
    return (lab.folder / "gate.waiting").exists()


# --- wrong inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workflow.path=flexmarl.testing.teams:pear", "no 'pear' in flexmarl.testing.teams; it has:"),
        ("workflow.path=nowhere.py:pair", "workflow.path='nowhere.py:pair'"),
        ("agents.judge.policy=jury", "agents.judge.policy is 'jury', but policies has only: ju, wr"),
        ("data.source=flexmarl.testing.teams:load", "data.source='flexmarl.testing.teams:load': no 'load'"),
        ("pipeline.queries_per_step=13", "has 12 queries, pipeline.queries_per_step=13 needs as many"),
        ("pipeline.num_step=4", "pipeline.num_step: unknown key; did you mean num_steps?"),
        ("policies.wr.model=missing-folder", "model 'missing-folder' is not a folder"),
    ],
)
def test_g10_a_wrong_input_is_named_before_anything_is_written(lab: RunLab, override: str, message: str) -> None:
    config = scripted_config()
    if "model" in override:
        config["training"]["backend"] = {"kind": "torch"}
    output = lab.run("train", lab.write_config(config), "run.dir=run", override, expect=2)
    assert output.startswith("error: ")
    assert message in output
    assert "Traceback" not in output
    assert not (lab.folder / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file has no query"),
        ('{"question": "1"}\n{"question": \n', ":2: not JSON"),
        ('["1"]\n', ":1: expected an object, got list"),
    ],
)
def test_g10_a_wrong_data_file_is_named_with_its_line(lab: RunLab, content: str, message: str) -> None:
    (lab.folder / "train.jsonl").write_text(content)
    config = scripted_config()
    config["data"] = {"train_file": "train.jsonl"}
    output = lab.run("train", lab.write_config(config), "run.dir=run", expect=2)
    assert output.startswith("error: ")
    assert "train.jsonl" in output
    assert message in output


@pytest.mark.parametrize("command", ["validate", "train"])
def test_output_that_nobody_reads_is_no_error(lab: RunLab, command: str) -> None:
    config = lab.write_config(scripted_config())
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flexmarl.cli", command, config, "pipeline.num_steps=1"],
            cwd=lab.folder,
            stdout=write_fd,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write_fd)
    assert (done.returncode, done.stderr) == (0, "")


def test_g10_a_workflow_that_always_fails_ends_the_run_with_its_line(lab: RunLab) -> None:
    (lab.folder / "team.py").write_text(
        "import flexmarl\n\n\n@flexmarl.workflow\nasync def broken(episode):\n    return episode.query['answer']\n"
    )
    config = scripted_config()
    config["workflow"]["path"] = "team.py:broken"
    output = lab.run("train", lab.write_config(config), "run.dir=run", expect=1)
    assert (
        "all 9 trajectories of step 0 failed; the first: workflow_error: KeyError: no field or key 'answer'" in output
    )
    assert "team.py:6" in output
    assert "Traceback" not in output


# --- the run folder ---------------------------------------------------------------------------------------------------


def test_g7_a_second_run_in_a_folder_in_use_is_refused_and_the_first_goes_on(lab: RunLab) -> None:
    config = lab.write_config(gated_config(lab))
    with lab.start("train", config, "run.dir=run") as live:
        wait_until(lambda: is_waiting(lab), "a trajectory at the gate")
        for arguments in (("train", config, "run.dir=run"), ("train", "run", "--resume")):
            output = lab.run(*arguments, expect=2)
            assert f"{lab.folder / 'run'} is in use by run scripted (pid {live.process.pid})" in output
        (lab.folder / "gate").touch()
        assert live.wait() == 0, live.output()
    assert sorted(trained_steps(lab.folder / "run")) == [0, 1, 2, 3]


def test_resume_where_no_run_is_changes_nothing(lab: RunLab) -> None:
    config = lab.write_config(scripted_config())
    assert "holds no run" in lab.run("train", config, "run.dir=run", "--resume", expect=2)
    (lab.folder / "other").mkdir()
    (lab.folder / "other" / "thesis.txt").write_text("mine")
    assert "is not empty and not a run folder" in lab.run("train", config, "run.dir=other", expect=2)
    assert [path.name for path in (lab.folder / "other").iterdir()] == ["thesis.txt"]


def test_a_run_folder_that_cannot_be_made_is_named(lab: RunLab) -> None:
    output = lab.run("train", lab.write_config(scripted_config()), "run.dir=/proc/self/run", expect=1)
    assert output.startswith("error: cannot create the run folder /proc/self/run")


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def long_run(lab: RunLab) -> Path:
    """A run of quick steps that writes until it cannot."""
    config = scripted_config()
    config["pipeline"]["num_steps"] = 1000
    config["rollout"]["backend"]["token_s"] = 0.0
    config["training"]["backend"]["token_s"] = 0.0
    return lab.write_config(config)


def check_readable_and_resumable(lab: RunLab, run_dir: Path) -> None:
    num_done = len(read_metrics(run_dir / "metrics.jsonl"))
    assert num_done >= 1
    num_events = len(list(read_events(run_dir / "events.jsonl")))
    lab.run("train", run_dir, "--resume", f"pipeline.num_steps={num_done + 2}")
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(num_done + 2))
    assert len(list(read_events(run_dir / "events.jsonl"))) > num_events
    assert sorted(trained_steps(run_dir)) == list(range(num_done + 2))


def test_g7_a_full_disk_ends_the_run_with_a_clear_error_and_it_resumes_when_there_is_room(
    lab: RunLab, small_disk: Path
) -> None:
    run_dir = small_disk / "run"
    output = lab.run("train", long_run(lab), f"run.dir={run_dir}", expect=1)
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("error: ")
    assert str(run_dir) in last
    assert last.endswith("resume the run")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    check_readable_and_resumable(lab, run_dir)


def test_g7_a_file_size_limit_ends_the_run_with_a_clear_error_and_it_resumes_without_it(lab: RunLab) -> None:
    limit_bytes = 3_000_000

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    output = lab.run("train", long_run(lab), "run.dir=run", expect=1, preexec=limit)
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("error: ")
    check_readable_and_resumable(lab, lab.folder / "run")


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stop_in_mid_step_saves_a_checkpoint_and_says_how_to_go_on(lab: RunLab, name: str) -> None:
    with lab.start("train", lab.write_config(gated_config(lab)), "run.dir=run") as live:
        wait_until(lambda: is_waiting(lab), "a trajectory at the gate")
        os.kill(live.process.pid, signal.Signals[name])
        assert live.wait() == 130, live.output()
        live.check_nothing_is_left()
        assert f"stopped by {name}" in live.output()
        assert "Traceback" not in live.output()
    num_steps = len(trained_steps(lab.folder / "run"))
    assert num_steps >= 1
    assert (lab.folder / "run" / "checkpoints" / f"step_{num_steps}" / "manifest.json").exists()


def test_ctrl_c_before_the_first_step_leaves_a_run_that_can_be_resumed(lab: RunLab) -> None:
    config = lab.write_config(scripted_config())
    with lab.start("train", config, "run.dir=run") as live:
        live.mark()
        os.kill(live.process.pid, signal.SIGINT)
        assert live.wait() == 130, live.output()
        live.check_nothing_is_left()
        assert "Traceback" not in live.output()
    lab.run("train", "run", "--resume")
    assert sorted(trained_steps(lab.folder / "run")) == [0, 1, 2, 3]


def test_a_second_ctrl_c_ends_a_run_whose_workflow_blocks(lab: RunLab) -> None:
    (lab.folder / "team.py").write_text(
        "import pathlib, time\nimport flexmarl\n\n\n@flexmarl.workflow\nasync def blocking(episode):\n"
        "    pathlib.Path('blocked').touch()\n    time.sleep(300)\n"
    )
    config = scripted_config()
    config["workflow"]["path"] = "team.py:blocking"
    with lab.start("train", lab.write_config(config), "run.dir=run") as live:
        wait_until((lab.folder / "blocked").exists, "the workflow")
        began_s = time.monotonic()
        os.kill(live.process.pid, signal.SIGINT)
        time.sleep(0.5)
        if live.process.poll() is None:
            os.kill(live.process.pid, signal.SIGINT)
        assert live.wait() == 130, live.output()
        assert time.monotonic() - began_s < 30
        live.check_nothing_is_left()
        assert "Traceback" not in live.output()


def test_a_reader_that_goes_away_does_not_end_the_run(lab: RunLab) -> None:
    config = lab.write_config(scripted_config())
    command = f"'{sys.executable}' -m flexmarl.cli train '{config}' run.dir=run | head -1"
    subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=lab.folder, check=True, timeout=60)
    assert sorted(trained_steps(lab.folder / "run")) == [0, 1, 2, 3]
