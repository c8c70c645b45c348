import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from flexmarl.core.errors import ConfigError
from flexmarl.telemetry import RunFolder, default_run_dir
from flexmarl.telemetry.run_folder import LOCK_NAME

pytestmark = pytest.mark.unit


def a_run(path: Path) -> Path:
    with RunFolder.open(path, name="first") as folder:
        folder.write_config("run: {}\n")
    return path


def no_sleep(seconds: float) -> None:
    """Stands for time that passes."""


def test_a_new_folder_holds_what_is_written(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "a" / "b", name="r") as folder:
        folder.write_config("run: {}\n")
        folder.write_summary({"steps": 1})
        folder.write_summary({"steps": 2})
        assert folder.path == tmp_path / "a" / "b"
    assert json.loads((folder.path / "summary.json").read_text()) == {"steps": 2}
    assert {path.name for path in folder.path.iterdir()} == {"config.yaml", "summary.json", LOCK_NAME}
    folder.close()


def test_a_folder_in_use_is_refused_by_name_and_pid(tmp_path: Path) -> None:
    for resume in (False, True):
        with RunFolder.open(tmp_path / f"run-{resume}", name="first") as folder:
            folder.write_config("")
            with pytest.raises(ConfigError, match=rf"is in use by run first \(pid {os.getpid()}\)"):
                RunFolder.open(folder.path, name="second", resume=resume)


def test_the_lock_ends_with_the_run(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    for _ in range(2):
        RunFolder.open(path, name="again", resume=True).close()


def test_workers_of_a_dead_run_are_waited_for(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    orphan = RunFolder.open(path, name="dead", resume=True)
    (path / LOCK_NAME).write_text(json.dumps({"name": "dead", "pid": 2**22 + 1}))  # above the kernel's largest pid
    waits: list[float] = []

    def orphan_ends(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            orphan.close()

    RunFolder.open(path, name="next", resume=True, sleep=orphan_ends).close()
    assert len(waits) == 3


def test_what_a_dead_run_left_behind_is_named_and_not_waited_for_without_end(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    with RunFolder.open(path, name="dead", resume=True) as folder:
        (path / LOCK_NAME).write_text(json.dumps({"name": "dead", "pid": 2**22 + 1}))
        child = subprocess.Popen(["sleep", "30"], pass_fds=[folder._lock_fd])
        try:
            with pytest.raises(ConfigError, match=rf"run dead \(pid \d+, ended\) left behind \(pids {child.pid}\)"):
                RunFolder.open(path, name="next", resume=True, sleep=no_sleep)
        finally:
            child.kill()
            child.wait()


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run: add --resume"):
        RunFolder.open(path, name="second")


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"not empty and not a run folder \(it holds thesis.tex\)"):
        RunFolder.open(tmp_path, name="r")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder.open(tmp_path / "none", name="r", resume=True)
    assert not (tmp_path / "none").exists()


def test_run_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder that can be read"):
        RunFolder.open(tmp_path / "file", name="r")


def test_a_run_that_died_before_its_configuration_was_written_leaves_a_new_folder(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run", name="r").close()
    RunFolder.open(tmp_path / "run", name="r").close()


def test_default_name_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = time.struct_time((2024, 5, 6, 7, 8, 9, 0, 1, 0))
    first = default_run_dir("relay", now=now)
    assert str(first) == "runs/relay-20240506-070809"
    first.mkdir(parents=True)
    assert str(default_run_dir("relay", now=now)) == "runs/relay-20240506-070809-2"
