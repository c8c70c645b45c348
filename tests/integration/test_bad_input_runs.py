"""What only a run can find: wrong rewards, no room, no permission. The folder stays readable, and the run goes on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexmarl.telemetry.event_log import read_events
from flexmarl.testing.runs import RunLab, scripted_config, trained_steps

pytestmark = pytest.mark.integration

TEAM = """import flexmarl

@flexmarl.workflow
async def team(episode):
    await episode.agent("writer").chat(episode.query["question"])
    await episode.agent("judge").chat("?")
    return {rewards}
"""


@pytest.fixture
def lab(tmp_path: Path) -> RunLab:
    return RunLab(tmp_path)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("{'writer': float('nan'), 'judge': 0.0}", "reward of agent 'writer' must be finite, got nan"),
        ("{'writer': 'good', 'judge': 0.0}", "reward of agent 'writer' must be a number, got str 'good'"),
        ("{'writer': 0.0}", "agent 'judge' acted but has no reward: add it to Outcome.rewards"),
        ("None", "the workflow returned NoneType None; return flexmarl.Outcome(...)"),
    ],
)
def test_g10_a_wrong_reward_ends_the_run_and_a_mended_workflow_goes_on(lab: RunLab, rewards: str, message: str) -> None:
    team = lab.folder / "team.py"
    team.write_text(TEAM.replace("{rewards}", rewards))
    config = scripted_config()
    config["workflow"] = {"path": "team.py:team"}
    config["pipeline"]["num_steps"] = 2
    file = lab.write_config(config)
    assert message in lab.run("validate", file, expect=2)
    output = lab.run("train", file, "run.dir=run", expect=1)
    assert output.splitlines()[-1].startswith(
        "error: all 9 trajectories of step 0 failed; the first: bad_reward: " + message
    )
    assert "Traceback" not in output
    assert list(read_events(lab.folder / "run" / "events.jsonl"))
    team.write_text(TEAM.replace("{rewards}", "1.0"))
    lab.run("train", "run", "--resume")
    assert sorted(trained_steps(lab.folder / "run")) == [0, 1]


def test_g10_some_failures_are_said_once_a_step(lab: RunLab) -> None:
    (lab.folder / "team.py").write_text(
        TEAM.replace("{rewards}", "1.0 if episode.rng.random() < 0.7 else {'writer': 'bad'}")
    )
    config = scripted_config()
    config["workflow"] = {"path": "team.py:team"}
    config["pipeline"]["num_steps"] = 1
    output = lab.run("train", lab.write_config(config), "run.dir=run")
    said = [line for line in output.splitlines() if "bad_reward" in line]
    assert len(said) == 1
    assert said[0].startswith("step 1: ")
    assert " of 9 trajectories failed and do not train; the first: bad_reward: " in said[0]


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts, or mounts again with other options, a file system of its own; only root can."""
    folder = tmp_path / "disk"
    folder.mkdir()
    is_mounted = False

    def call(options: str) -> Path:
        nonlocal is_mounted
        again = "remount," if is_mounted else ""
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(folder)]
        if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("cannot mount a tmpfs")
        is_mounted = True
        return folder

    try:
        yield call
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("size", ["8k", "48k", "200k", "500k"])
def test_g10_no_room_left_is_said_with_the_folder_and_the_run_goes_on(
    lab: RunLab, mount: Callable[[str], Path], size: str
) -> None:
    run_dir = mount(f"size={size}") / "run"
    config = scripted_config()
    config["pipeline"]["num_steps"] = 200
    config["rollout"]["backend"]["token_s"] = config["training"]["backend"]["token_s"] = 0.0
    output = lab.run("train", lab.write_config(config), f"run.dir={run_dir}", expect=1)
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("error: ")
    assert str(run_dir) in last
    assert "resume" in last
    mount("size=64m")
    lab.run("train", run_dir, "--resume", "pipeline.num_steps=3")
    assert sorted(trained_steps(run_dir))[:3] == [0, 1, 2]


def test_g10_a_folder_that_cannot_be_written_is_said_and_nothing_changes(
    lab: RunLab, mount: Callable[[str], Path]
) -> None:
    run_dir = mount("size=64m") / "run"
    config = lab.write_config(scripted_config())
    lab.run("train", config, f"run.dir={run_dir}", "pipeline.num_steps=2")
    mount("ro")
    for arguments in ((run_dir, "--resume", "pipeline.num_steps=3"), (config, f"run.dir={run_dir}-2")):
        output = lab.run("train", *arguments, expect=1)
        assert output.startswith(f"error: cannot create the run folder {run_dir}")
        assert "Read-only file system" in output
        assert "choose another run.dir" in output
    lab.run("eval", run_dir, "eval.at_ends=true", "eval.num_queries=2")
    mount("rw")
    lab.run("train", run_dir, "--resume", "pipeline.num_steps=3")
    assert sorted(trained_steps(run_dir)) == [0, 1, 2]
