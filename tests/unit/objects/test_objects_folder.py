import os
import stat
from pathlib import Path

import pytest

from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.objects import create_run_folder, folder, list_run_folders, remove_run_folder

pytestmark = pytest.mark.unit


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(folder, "SHARED_MEMORY", shared)
    monkeypatch.setattr(os, "getuid", lambda: 123)
    return shared


def test_lies_in_shared_memory_for_this_user_only(shared_memory: Path, tmp_path: Path) -> None:
    made = create_run_folder("relay-7", tmp_path / "run", needed_bytes=1)

    assert made == shared_memory / "flexmarl-123-relay-7"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert not (tmp_path / "run").exists()


def test_lies_in_the_run_folder_where_shared_memory_is_small(shared_memory: Path, tmp_path: Path) -> None:
    made = create_run_folder("relay-7", tmp_path / "run", needed_bytes=1 << 60)

    assert made == tmp_path / "run" / "objects"
    assert list(shared_memory.iterdir()) == []


def test_lies_in_the_run_folder_where_there_is_no_shared_memory(shared_memory: Path, tmp_path: Path) -> None:
    shared_memory.rmdir()

    assert create_run_folder("relay-7", tmp_path / "run", needed_bytes=1) == tmp_path / "run" / "objects"
    assert list_run_folders() == []


def test_never_shares_the_folder_of_another_run(shared_memory: Path, tmp_path: Path) -> None:
    create_run_folder("relay-7", tmp_path, needed_bytes=1)

    with pytest.raises(StoreError, match="flexmarl-123-relay-7 exists"):
        create_run_folder("relay-7", tmp_path, needed_bytes=1)


@pytest.mark.parametrize("run_id", ["", "a/b", "../x", ".hidden", "a b"])
def test_refuses_ids_that_are_no_file_names(shared_memory: Path, tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        create_run_folder(run_id, tmp_path, needed_bytes=1)


def test_lists_the_folders_of_this_user(shared_memory: Path, tmp_path: Path) -> None:
    for name in ("flexmarl-124-other", "flexmarl-1234-other", "else"):
        (shared_memory / name).mkdir()
    made = [create_run_folder(run_id, tmp_path, needed_bytes=1) for run_id in ("b", "a")]

    assert list_run_folders() == made[::-1]


def test_removal_leaves_nothing_and_may_be_repeated(shared_memory: Path, tmp_path: Path) -> None:
    made = create_run_folder("relay-7", tmp_path, needed_bytes=1)
    (made / "objects").mkdir()
    (made / "objects" / "x").write_bytes(b"x")

    remove_run_folder(made)
    remove_run_folder(made)

    assert list(shared_memory.iterdir()) == []


def test_removes_no_folder_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")

    with pytest.raises(StoreError, match="not removed"):
        remove_run_folder(tmp_path)
    assert (tmp_path / "precious").exists()
