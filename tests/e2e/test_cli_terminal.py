"""A run on a terminal that is closed: it saves a checkpoint and can be resumed."""

import fcntl
import json
import os
import pty
import subprocess
import termios
import time
from pathlib import Path

import pytest

from flexmarl.testing.runs import FLEXMARL, RunLab, scripted_config, trained_steps

pytestmark = pytest.mark.e2e


@pytest.fixture
def lab(tmp_path: Path) -> RunLab:
    return RunLab(tmp_path)


def take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def start_on_terminal(lab: RunLab, config: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a run on a terminal of its own; return it with the terminal's other end."""
    ours, theirs = pty.openpty()
    command = [*FLEXMARL, "train", str(config), "run.dir=run"]
    environment = {**os.environ, "TMPDIR": str(lab.folder / "registry"), "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=lab.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    return process, ours


def test_g7_a_closed_terminal_saves_a_checkpoint_and_the_run_can_be_resumed(lab: RunLab) -> None:
    config = scripted_config()
    config["pipeline"]["num_steps"] = 1000
    config["checkpoint"]["every"] = 1000
    process, terminal = start_on_terminal(lab, lab.write_config(config))
    deadline_s = time.monotonic() + 60
    shown = b""
    while b"2/1000" not in shown:
        assert time.monotonic() < deadline_s, shown
        shown += os.read(terminal, 10_000)
    os.close(terminal)
    assert process.wait(60) == 130
    run_dir = lab.folder / "run"
    assert json.loads((run_dir / "summary.json").read_text())["stopped_by"] == "SIGHUP"
    num_steps = len(trained_steps(run_dir))
    assert num_steps >= 2
    assert (run_dir / "checkpoints" / f"step_{num_steps}" / "manifest.json").exists()
    lab.run("train", run_dir, "--resume", f"pipeline.num_steps={num_steps + 1}")
    assert len(trained_steps(run_dir)) == num_steps + 1
