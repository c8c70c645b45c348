import logging
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    commit,
    commit_record,
    counts,
    dispatch,
    key,
    lease_of,
    make_ready,
    open_store,
    put_trajectory,
    ready_keys,
    run,
    seal_record,
    turn_row,
)

from flexmarl.core.errors import FencedError, StoreError
from flexmarl.store import RecoveryReport, SqliteStore, database
from flexmarl.store.schema import FORMAT_VERSION

pytestmark = pytest.mark.unit

SOLVER, CHECKER = key(agent="solver"), key(agent="checker")


def _die(store: SqliteStore) -> None:
    """Let go of the files without anything that a close does for the store's content."""
    assert store._index is not None
    assert store._lock is not None
    store._index.close()
    store._lock.release()


def _committed_step(folder: Path) -> SqliteStore:
    store = open_store(folder)
    run(store.open_step(dispatch()))
    make_ready(store, SOLVER)
    acknowledge(store, SOLVER)
    commit(store, commit_record({"red": ["m0"]}))
    return store


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    store = _committed_step(tmp_path / "store")
    run(store.open_step(dispatch(step=1)))
    make_ready(store, key(step=1), key(step=1, agent="checker"))
    run(store.close())
    store = open_store(tmp_path / "store")
    assert store.recovery == RecoveryReport()
    assert run(store.last_commit()) == commit_record({"red": ["m0"]})
    assert run(store.trained_ids(0)) == {RED: [SOLVER]}
    _, samples = run(store.lease(BLUE, HOLDER, "m0", [key(step=1, agent="checker")]))
    assert samples[0].turn == turn_row(key(step=1, agent="checker"))
    run(store.close())


def test_g2_leases_and_seals_of_the_dead_process_are_released(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch(num_trajectories=2)))
    keys = [key(query=query) for query in range(4)]
    for sample in keys:
        make_ready(store, sample)
    partial = key(query=0, trajectory=1)
    put_trajectory(store, [partial])
    acknowledge(store, keys[0], micro_batch_id="m0")
    run(store.seal(HOLDER, seal_record(1, ["m0"])))
    acknowledge(store, keys[1], micro_batch_id="m1")
    stale = lease_of(store, keys[2], micro_batch_id="m2")
    _die(store)
    with caplog.at_level(logging.INFO):
        store = open_store(tmp_path)
    assert store.recovery == RecoveryReport(num_released_rows=2, num_unsealed_rows=1)
    assert "mended after its last process died" in caplog.text
    assert ready_keys(store) == keys
    assert counts(store) == {"ready": 4, "partial": 1}
    assert run(store.current_seal(RED, 0)) is None
    with pytest.raises(FencedError):
        run(store.acknowledge(stale))
    assert lease_of(store, *keys, micro_batch_id="m0").lease_id > stale.lease_id
    assert run(store.begin_attempt(partial.trajectory_key)) == 1
    assert counts(store) == {"leased": 4, "superseded": 1}
    run(store.close())


def test_a_turn_that_was_being_written_is_cut_off_and_reported(tmp_path: Path) -> None:
    store = _committed_step(tmp_path)
    run(store.close())
    size = (tmp_path / "payload-1.bin").stat().st_size
    with (tmp_path / "payload-1.bin").open("ab") as file:
        file.write(b"half a record")
    for expected in (RecoveryReport(num_torn_bytes=13), RecoveryReport()):
        store = open_store(tmp_path)
        assert store.recovery == expected
        assert (tmp_path / "payload-1.bin").stat().st_size == size
        run(store.close())


def test_a_torn_tail_that_was_synced_before_the_kill_is_no_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run(store.open_step(dispatch()))
    assert store._index is not None
    store._index.payload.append([b"its row never came"], 0)
    run(store.open_step(dispatch(step=1)))
    _die(store)
    for expected in (RecoveryReport(num_torn_bytes=26), RecoveryReport()):
        store = open_store(tmp_path)
        assert store.recovery == expected
        run(store.close())


@pytest.mark.parametrize("damage", ["cut", "zeros", "older record"])
def test_steps_whose_payloads_were_lost_with_power_run_again(tmp_path: Path, damage: str) -> None:
    store = _committed_step(tmp_path)
    synced_bytes = (tmp_path / "payload-1.bin").stat().st_size
    run(store.open_step(dispatch(step=1)))
    put_trajectory(store, [key(step=1), key(step=1, turn=1)])
    run(store.close())
    content = (tmp_path / "payload-1.bin").read_bytes()
    num_bytes = (len(content) - synced_bytes) // 2
    tail = {"cut": b"", "zeros": bytes(num_bytes), "older record": content[synced_bytes - num_bytes : synced_bytes]}
    (tmp_path / "payload-1.bin").write_bytes(content[:-num_bytes] + tail[damage])
    store = open_store(tmp_path)
    assert (store.recovery.num_lost_rows, store.recovery.rewound_to_step) == (1, 1)
    assert run(store.progress(1)) == {}
    assert run(store.trained_ids(0)) == {RED: [SOLVER]}
    run(store.open_step(dispatch(step=1)))
    assert put_trajectory(store, [key(step=1)]) == 0
    run(store.close())
    store = open_store(tmp_path)
    assert store.recovery == RecoveryReport()
    run(store.close())


def test_g2_a_committed_step_whose_payloads_are_gone_is_refused(tmp_path: Path) -> None:
    run(_committed_step(tmp_path).close())
    content = (tmp_path / "payload-1.bin").read_bytes()
    (tmp_path / "payload-1.bin").write_bytes(content[:-1])
    with pytest.raises(StoreError, match=r"payload-1\.bin has \d+ bytes, its index had synced \d+: restore the file"):
        open_store(tmp_path)
    (tmp_path / "payload-1.bin").write_bytes(content)
    run(open_store(tmp_path).close())


def test_rewinding_gives_the_payload_bytes_back(tmp_path: Path) -> None:
    store = _committed_step(tmp_path)
    size = (tmp_path / "payload-1.bin").stat().st_size
    run(store.open_step(dispatch(step=1)))
    put_trajectory(store, [key(step=1), key(step=1, turn=1)])
    run(store.rewind(1))
    assert (tmp_path / "payload-1.bin").stat().st_size == size
    _die(store)
    store = open_store(tmp_path)
    assert store.recovery == RecoveryReport()
    run(store.rewind(0))
    assert run(store.last_commit()) is None
    assert (tmp_path / "payload-1.bin").stat().st_size == 8
    run(store.close())


@pytest.mark.parametrize("found", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_a_store_of_older_or_newer_code_is_refused_by_name(tmp_path: Path, found: int) -> None:
    run(_committed_step(tmp_path).close())
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("UPDATE meta SET value=? WHERE name='format_version'", (found,))
    connection.close()
    message = rf"index\.db has store format_version {found}, this version of FlexMARL reads {FORMAT_VERSION}: use"
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_g2_an_older_segment_that_is_gone_is_refused(tmp_path: Path, damage: str) -> None:
    store = _committed_step(tmp_path)
    run(store.prune(0))
    run(store.open_step(dispatch(step=1)))
    put_trajectory(store, [key(step=1)])
    run(store.close())
    path = tmp_path / "payload-1.bin"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=r"payload-1\.bin has \d+ bytes, its index had synced \d+: restore the file"):
        open_store(tmp_path)
    path.write_bytes(content)
    run(open_store(tmp_path).close())


def test_steps_that_lost_payloads_in_a_later_segment_run_again(tmp_path: Path) -> None:
    store = _committed_step(tmp_path)
    assert store._index is not None
    store._index.payload._segment_bytes = 1
    run(store.open_step(dispatch(step=1)))
    put_trajectory(store, [key(step=1), key(step=1, turn=1)])
    run(store.close())
    (tmp_path / "payload-3.bin").unlink()
    store = open_store(tmp_path)
    assert (store.recovery.num_lost_rows, store.recovery.rewound_to_step) == (1, 1)
    run(store.open_step(dispatch(step=1)))
    put_trajectory(store, [key(step=1)])
    run(store.close())
    store = open_store(tmp_path)
    assert store.recovery == RecoveryReport()
    run(store.close())


def test_a_damaged_record_of_a_committed_step_is_named_when_it_is_read(tmp_path: Path) -> None:
    run(_committed_step(tmp_path).close())
    path = tmp_path / "payload-1.bin"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match=r"payload-1\.bin is damaged: the record at byte 8 .* restore the file"):
        run(store.micro_batch(RED, 0, "m0"))
    run(store.close())


def test_other_databases_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(StoreError, match=r"index\.db is a database of something else"):
        open_store(tmp_path)
    (tmp_path / "index.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match=r"index\.db: .*the file is damaged; restore it"):
        open_store(tmp_path)


def test_a_folder_that_cannot_be_made_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file/store: Not a directory"):
        open_store(tmp_path / "file" / "store")


def test_a_second_process_is_kept_out_and_the_lock_ends_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); "
        "fcntl.lockf(fd, fcntl.LOCK_EX); os.write(fd, b'4711'); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(StoreError, match="is in use by process 4711: end that run, or choose another run.dir"):
            open_store(tmp_path)
        owner.kill()
    run(open_store(tmp_path).close())


def test_a_tool_that_holds_the_database_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.0)
    store = open_store(tmp_path)
    tool = sqlite3.connect(tmp_path / "index.db")
    tool.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"index\.db: database is locked: another process has locked it"):
        run(store.open_step(dispatch()))
    tool.close()
    run(store.open_step(dispatch()))
    run(store.close())
