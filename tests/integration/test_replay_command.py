"""`flexmarl replay`: the training side of a run again, from stored rows, bit for bit, and nothing else changes."""

import hashlib
import json
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import ReplayedStep, ReplayResult, replay
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.testing.runs import GatedRun, RunLab, scripted_config, trained_steps, write_scripted_model

pytestmark = pytest.mark.integration


def config(**store: Any) -> dict[str, Any]:
    """4 steps, checkpoints of versions 2 and 4, every row kept."""
    return {**scripted_config(), "store": {"retention": "all", **store}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> RunLab:
    return RunLab(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def finished(lab: RunLab) -> Path:
    """A run that nothing has disturbed."""
    lab.run("train", lab.write_config(config()), "run.dir=finished", "--quiet")
    return lab.folder / "finished"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file; `-shm` is shared memory of readers, which SQLite keeps as a file."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def recorded(run_dir: Path) -> dict[int, dict[str, str]]:
    return {
        step: {str(policy): digest for policy, digest in trained.weights_digests.items()}
        for step, trained in trained_steps(run_dir).items()
    }


def replayed(result: ReplayResult) -> dict[int, dict[str, str]]:
    return {step.step: {str(each.policy): each.replayed_digest for each in step.policies} for step in result.steps}


def test_g5_replay_gives_the_weights_of_every_step_and_leaves_the_run_as_it_was(finished: Path) -> None:
    before = contents(finished)
    seen: list[ReplayedStep] = []
    result = replay(finished, on_step=seen.append)
    assert contents(finished) == before
    assert (result.first_version, result.start, result.is_equal) == (0, None, True)
    assert replayed(result) == recorded(finished)
    assert [step.step for step in seen] == [0, 1, 2, 3]
    assert all(each.num_micro_batches > 1 and each.num_samples > 0 for step in seen for each in step.policies)


@pytest.mark.parametrize(
    ("first_step", "last_version", "start", "steps"),
    [(2, None, "step_2", [2, 3]), (3, 4, "step_2", [2, 3]), (1, None, None, [0, 1, 2, 3]), (0, 1, None, [0])],
)
def test_g5_replay_begins_at_the_newest_state_before_the_step(
    finished: Path, first_step: int, last_version: int | None, start: str | None, steps: list[int]
) -> None:
    result = replay(finished, first_step=first_step, last_version=last_version)
    assert (result.start.name if result.start else None) == start
    assert replayed(result) == {step: recorded(finished)[step] for step in steps}
    assert result.is_equal


def test_g5_replay_trains_with_torch_bit_for_bit(lab: RunLab) -> None:
    write_scripted_model(lab.folder / "model")
    options = config()
    options["policies"] = {name: {"model": str(lab.folder / "model")} for name in options["policies"]}
    options["training"] |= {"backend": {"kind": "torch"}}
    options["optimizer"] = {"learning_rate": 1e-2}
    lab.run("train", lab.write_config(options, "torch.yaml"), "run.dir=torch", "pipeline.num_steps=2", "--quiet")
    result = replay(lab.folder / "torch")
    assert result.is_equal
    assert replayed(result) == recorded(lab.folder / "torch")


def test_g2_the_committed_steps_of_a_killed_run_can_be_replayed(tmp_path: Path) -> None:
    gated = GatedRun(RunLab(tmp_path), config())
    with gated.live:
        gated.wait_for_mid_step()
        while_live = replay(gated.run_dir)
        gated.live.process.send_signal(signal.SIGKILL)
        gated.live.wait()
    before = contents(gated.run_dir)
    result = replay(gated.run_dir)
    assert contents(gated.run_dir) == before
    assert result.is_equal
    assert result.steps
    assert replayed(result) == replayed(while_live)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_equal_or_different_and_exits_so(lab: RunLab, finished: Path, copied: Path) -> None:
    output = lab.run("replay", "finished", "--from", "2")
    lines = output.splitlines()
    digests = recorded(finished)
    assert lines[0].startswith(f"step 2 -> version 3  ju equal {digests[2]['ju'][:12]} (")
    assert lines[-1] == "all equal: 2 of 2 replayed steps have the recorded weights; began at step_2"
    plain = json.loads(lab.run("replay", "finished", "--from", "2", "--json"))
    assert [step["step"] for step in plain["steps"]] == [2, 3]
    assert plain["error"] is None

    with closing(sqlite3.connect(copied / "store" / "index.db")) as index, index:
        (table,) = index.execute(
            "SELECT name FROM sqlite_master WHERE type='table' AND name GLOB 'rows_*_wr'"
        ).fetchone()
        index.execute(f'UPDATE "{table}" SET advantage = advantage + 1 WHERE step=1')
    output = lab.run("replay", copied, expect=1)
    first, second, verdict, error = output.splitlines()
    assert first.startswith("step 0 -> version 1  ju equal ")
    assert second.startswith(f"step 1 -> version 2  ju equal {digests[1]['ju'][:12]} (")
    assert f"wr DIFFERENT (recorded {digests[1]['wr'][:12]}, now " in second
    assert verdict == "different: 1 of 2 replayed steps have the recorded weights; began at the start models"
    assert error.startswith("error: replaying step 1 gives policy wr other weights than were committed")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_g10_what_cannot_be_replayed_is_named(lab: RunLab, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a run folder"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="--to 5: the run has the versions 1 to 4"):
        replay(finished, last_version=5)
    with pytest.raises(ConfigError, match="--from 4: the steps up to version 4 are 0 to 3"):
        replay(finished, first_step=4)
    assert "is not a run folder" in lab.run("replay", tmp_path, expect=2)


def test_g10_other_start_models_are_named(copied: Path) -> None:
    baseline = json.loads((copied / "baseline.json").read_text())
    baseline["weights_digests"]["wr"] = "0" * 64
    (copied / "baseline.json").write_text(json.dumps(baseline))
    with pytest.raises(
        ConfigError, match=r"policy wr, version 0: policies.wr.model=none has weights .* the run had 000"
    ):
        replay(copied)


def test_g10_deleted_rows_are_named_with_what_would_keep_them(lab: RunLab) -> None:
    """With retention `covered` the rows of steps before the oldest kept checkpoint go."""
    plain = config(retention="covered")
    plain["checkpoint"] = {"every": 1, "keep_last": 2}
    lab.run("train", lab.write_config(plain, "covered.yaml"), "run.dir=covered", "--quiet")
    with pytest.raises(StoreError) as caught:
        replay(lab.folder / "covered", first_step=0)
    assert "step 0 needs the rows of steps 0 to " in str(caught.value)
    assert "store.retention=all" in str(caught.value)
    assert str(caught.value).endswith("the first step that can be replayed is 3")
    assert replay(lab.folder / "covered").first_version == 3


@pytest.mark.parametrize("options", [(), ("--from", "0"), ("--from", "3")])
def test_g10_a_run_with_its_last_checkpoint_alone_has_nothing_left_to_replay(
    lab: RunLab, options: tuple[str, ...]
) -> None:
    if not (lab.folder / "last").exists():
        plain = config(retention="covered")
        plain["checkpoint"] = {"every": 100}
        lab.run("train", lab.write_config(plain, "last.yaml"), "run.dir=last", "--quiet")
    output = lab.run("replay", "last", *options, expect=1)
    assert "nothing is left to replay up to version 4: no checkpoint below it has all later rows" in output
    assert "store.retention=all, set before training, keeps all" in output


def test_g10_a_damaged_row_is_named(copied: Path) -> None:
    segment = max((copied / "store").glob("payload-*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[200:210] = b"\xff" * 10
    segment.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged: the record at byte"):
        replay(copied, first_step=0)
