"""`flexmarl inspect` on live, finished, killed, read-only and damaged runs."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import inspect
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import PolicyName
from flexmarl.core.records import StepExtension
from flexmarl.store.lifecycle import RowStatus
from flexmarl.store.schema import encode_record
from flexmarl.testing.runs import GatedRun, RunLab, scripted_config, trained_steps

pytestmark = pytest.mark.e2e


def config() -> dict[str, Any]:
    """4 steps of 3 queries x 3 trajectories, two policies, each turn with columns of its own."""
    return {**scripted_config(), "store": {"columns": {"num_characters": "int"}}} | {
        "workflow": {"path": "team.py:team", "dry_run": False}
    }


TEAM = """
import flexmarl
from flexmarl.testing.teams import pair


@flexmarl.workflow
async def team(episode):
    outcome = await pair(episode)
    for turn in episode.turns():
        turn.columns["num_characters"] = len(turn.text)
    return outcome
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> RunLab:
    lab = RunLab(tmp_path_factory.mktemp("inspect"))
    (lab.folder / "team.py").write_text(TEAM)
    return lab


@pytest.fixture(scope="module")
def finished(lab: RunLab) -> Path:
    lab.run("train", lab.write_config(config()), "run.dir=finished", "--quiet")
    return lab.folder / "finished"


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file; `-shm` is shared memory of readers, which SQLite keeps as a file."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- what it says -----------------------------------------------------------------------------------------------------


def test_a_finished_run_from_afar_and_from_close_by(finished: Path) -> None:
    before = contents(finished)
    report = inspect(finished, step=1)
    assert contents(finished) == before
    digests = trained_steps(finished)
    assert (report.name, report.live_pid, report.policy_version) == ("scripted", None, 4)
    assert report.store_bytes == sum(
        path.stat().st_size for path in (finished / "store").iterdir() if path.name != "lock"
    )
    assert [version.policy_version for version in report.versions] == [1, 2, 3, 4]
    assert [{each.policy: each.weights_digest for each in version.policies} for version in report.versions] == [
        dict(digests[step].weights_digests) for step in range(4)
    ]
    assert [(step.step, step.policy_version, step.num_queries, step.num_trajectories) for step in report.steps] == [
        (number, number + 1, 3, 9) for number in range(4)
    ]
    assert all(step.num_ended == 9 and step.num_failed == 0 for step in report.steps)
    for step in report.steps:
        num_trained = sum(len(keys) for keys in digests[step.step].keys.values())
        assert step.rows[RowStatus.COMMITTED] == num_trained
    assert report.detail is not None
    assert report.detail.step == 1
    keys = [key for policy_keys in digests[1].keys.values() for key in policy_keys]
    assert sum(lease.num_rows for lease in report.detail.leases if lease.status == "committed") == len(keys)
    of_query = Counter((key.query, key.agent) for key in keys)
    groups = {(group.query, {"wr": "writer", "ju": "judge"}[group.policy]): group for group in report.detail.groups}
    assert {place: group.num_rows for place, group in groups.items()} == dict(of_query)
    for group in groups.values():
        assert (group.num_trajectories, group.num_ended, group.num_failed) == (3, 3, 0)
        assert group.reward_mean is not None
        assert group.reward_min is not None
        assert group.reward_max is not None
        assert group.reward_min <= group.reward_mean <= group.reward_max


def test_a_trajectory_with_its_turns_and_user_columns(finished: Path) -> None:
    detail = inspect(finished).detail
    assert detail is not None
    assert detail.step == 3
    query = detail.groups[0].query
    found = inspect(finished, step=3, query=query, trajectory=2).trajectory
    assert found is not None
    assert str(found.key) == f"s3/q{query}/t2"
    assert [(each.attempt, each.ended) for each in found.attempts] == [(0, "outcome")]
    assert {turn.key.agent for turn in found.turns} == {"writer", "judge"}
    rewards = found.attempts[0].rewards
    for turn in found.turns:
        assert turn.status == "committed"
        assert turn.reward == rewards[turn.key.agent]
        assert turn.advantage is not None
        assert turn.columns.keys() == {"num_characters"}
        assert turn.num_response_tokens > 0
        assert turn.policy_version == 3


def test_filters_leave_the_rest_out(finished: Path) -> None:
    report = inspect(finished, policy="ju")
    assert {each.policy for version in report.versions for each in version.policies} == {"ju"}
    detail = report.detail
    assert detail is not None
    for facts in (detail.rows, detail.groups, detail.leases, detail.seals):
        assert {each.policy for each in facts} == {"ju"}
    query = detail.groups[1].query
    of_query = inspect(finished, query=query).detail
    assert of_query is not None
    assert {group.query for group in of_query.groups} == {query}


def test_a_live_run_is_shown_as_it_stands_and_goes_on(tmp_path: Path) -> None:
    gated = GatedRun(RunLab(tmp_path), scripted_config())
    with gated.live:
        gated.wait_for_mid_step()
        report = inspect(gated.run_dir)
        output = gated.lab.run("inspect", "run")
        gated.open_gate()
        assert gated.live.wait() == 0, gated.live.output()
    assert report.live_pid == gated.live.process.pid
    newest = report.steps[-1]
    assert newest.policy_version is None
    assert 0 < newest.num_ended < newest.num_trajectories
    assert newest.rows[RowStatus.ACKNOWLEDGED] > 0
    assert report.detail is not None
    assert report.detail.step == newest.step
    assert any(lease.status in ("acknowledged", "sealed") for lease in report.detail.leases)
    assert f"live (pid {gated.live.process.pid})" in output
    assert inspect(gated.run_dir).live_pid is None


def test_a_killed_run_is_shown_as_it_was(tmp_path: Path) -> None:
    gated = GatedRun(RunLab(tmp_path), scripted_config())
    with gated.live:
        gated.wait_for_mid_step()
        gated.live.process.send_signal(signal.SIGKILL)
        gated.live.wait()
    before = contents(gated.run_dir)
    report = inspect(gated.run_dir)
    assert report.live_pid is None
    assert report.steps[-1].policy_version is None
    assert contents(gated.run_dir) == before


def test_tables_and_json(lab: RunLab, finished: Path) -> None:
    output = lab.run("inspect", "finished")
    digests = trained_steps(finished)[3].weights_digests
    for text in ("not live, version 4", "versions", "steps", "groups of step 3", "leases of step 3", "seals of step 3"):
        assert text in output
    for digest in digests.values():
        assert digest[:12] in output
        assert digest not in output
    plain = json.loads(lab.run("inspect", "finished", "--step", "0", "--policy", "wr", "--json"))
    assert plain["policy_version"] == 4
    assert [each["policy"] for each in plain["versions"][3]["policies"]] == ["wr"]
    assert plain["versions"][3]["policies"][0]["weights_digest"] == digests[PolicyName("wr")]
    query = plain["detail"]["groups"][0]["query"]
    output = lab.run("inspect", "finished", "--step", "0", "--query", str(query), "--trajectory", "0")
    assert f"turns of s0/q{query}/t0" in output
    assert "writer/b0/n0" in output
    assert "num_characters=" in output


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step", "9"), "--step 9: the steps are 0 to 3"),
        (("--policy", "jury"), "--policy jury: the store has ju, wr"),
        (("--query", "99"), "--query 99 is not in step 3; its queries: "),
        (("--trajectory", "1"), "--trajectory 1 needs --step and --query"),
    ],
)
@pytest.mark.usefixtures("finished")
def test_g10_what_is_not_there_is_named(lab: RunLab, options: tuple[str, ...], message: str) -> None:
    output = lab.run("inspect", "finished", *options, expect=2)
    assert output.startswith("error: ")
    assert message in output
    assert "Traceback" not in output


def test_g10_a_trajectory_that_is_not_there_is_named(lab: RunLab, finished: Path) -> None:
    detail = inspect(finished, step=0).detail
    assert detail is not None
    query = str(detail.groups[0].query)
    output = lab.run("inspect", "finished", "--step", "0", "--query", query, "--trajectory", "3", expect=2)
    assert output == f"error: --trajectory 3: of query {query} in step 0 the trajectories are 0 to 2\n"


def test_g10_a_trajectory_that_has_not_begun_is_named_and_extensions_count(finished: Path, tmp_path: Path) -> None:
    detail = inspect(finished, step=0).detail
    assert detail is not None
    query = detail.groups[0].query
    copied = Path(shutil.copytree(finished, tmp_path / "run"))
    extension = StepExtension(step=0, query=query, first_trajectory=3, num_trajectories=2)
    with closing(sqlite3.connect(copied / "store" / "index.db")) as index, index:
        index.execute("INSERT INTO extensions VALUES (0, 0, ?)", (encode_record(extension),))
    with pytest.raises(StoreError, match=f"trajectory s0/q{query}/t4 has not begun"):
        inspect(copied, step=0, query=query, trajectory=4)
    with pytest.raises(ConfigError, match="the trajectories are 0 to 4"):
        inspect(copied, step=0, query=query, trajectory=5)


def test_g10_no_run_no_store_damaged_newer(lab: RunLab, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a run folder"):
        inspect(tmp_path)
    assert "is not a run folder" in lab.run("inspect", tmp_path, expect=2)
    (tmp_path / "config.yaml").write_bytes((finished / "config.yaml").read_bytes())
    with pytest.raises(StoreError, match="store"):
        inspect(tmp_path)
    (tmp_path / "store").mkdir()
    index = tmp_path / "store" / "index.db"
    content = (finished / "store" / "index.db").read_bytes()
    index.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(StoreError, match="damaged"):
        inspect(tmp_path)
    index.write_bytes(b"not a database, but a text that is long enough to be one" * 100)
    with pytest.raises(StoreError, match=r"index.db"):
        inspect(tmp_path)
    index.write_bytes(content)
    with closing(sqlite3.connect(index)) as connection, connection:
        connection.execute("UPDATE meta SET value=99 WHERE name='format_version'")
    with pytest.raises(StoreError, match="format_version 99"):
        inspect(tmp_path)
    assert "format_version 99" in lab.run("inspect", tmp_path, expect=1)


@pytest.fixture
def read_only(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """The finished run, mounted so that nobody can write to it; only root can do that."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    commands = (
        ["mount", "--bind", str(finished), str(folder)],
        ["mount", "-o", "remount,bind,ro", str(folder)],
    )
    if os.getuid() != 0 or any(subprocess.run(each, check=False, capture_output=True).returncode for each in commands):
        pytest.skip("cannot mount a folder read-only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_read_only_folder_can_be_read(finished: Path, read_only: Path) -> None:
    with pytest.raises(OSError, match="Read-only"):
        (read_only / "x").touch()
    assert inspect(read_only).versions == inspect(finished).versions
