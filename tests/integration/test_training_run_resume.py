"""G5: a run that was stopped and resumed asks the same of the same queries as one that was not, and draws the same."""

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flexmarl.core.events import RunStarted, StepDispatched, StepRestored
from flexmarl.core.messages import TurnRequested
from flexmarl.core.records import DispatchRecord
from flexmarl.telemetry.event_log import read_events
from flexmarl.testing.runs import GatedRun, RunLab, records_of, scripted_config, trained

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lab = RunLab(tmp_path_factory.mktemp("undisturbed"))
    lab.run("train", lab.write_config(scripted_config()), "run.dir=run")
    return lab.folder / "run"


@pytest.fixture(scope="module", params=["SIGINT", "SIGKILL"])
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    gated = GatedRun(RunLab(tmp_path_factory.mktemp("resumed")), scripted_config())
    with gated.live:
        gated.wait_for_mid_step()
        os.kill(gated.live.process.pid, signal.Signals[request.param])
        assert gated.live.wait() == (130 if request.param == "SIGINT" else -signal.SIGKILL), gated.live.output()
    gated.open_gate()
    gated.lab.run("train", "run", "--resume")
    return gated.run_dir


def dispatches(run_dir: Path) -> dict[int, DispatchRecord]:
    """The last dispatch of each step; the log of a killed run may lack what a resumed one restores."""
    found = [record.dispatch for record in records_of(run_dir, StepDispatched)]
    found += [record.dispatch for record in records_of(run_dir, StepRestored)]
    return {dispatch.step: dispatch for dispatch in found}


def requests(run_dir: Path) -> dict[int, dict[str, tuple[int, object]]]:
    """Per step, its requests, each with the length of its prompt and its sampling parameters."""
    found: dict[int, dict[str, tuple[int, object]]] = {}
    for event in read_events(run_dir / "events.jsonl"):
        match event.record:
            case TurnRequested():
                of_step = found.setdefault(event.record.key.step, {})
                of_step[event.record.request_id] = (len(event.record.prompt_tokens), event.record.sampling)
    return found


def payloads(run_dir: Path) -> list[tuple[object, ...]]:
    """Key, version and checksum of prompt, tokens and log-probs of every committed row."""
    with closing(sqlite3.connect(run_dir / "store" / "index.db")) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'rows_*'")]
        columns = "step, query, trajectory, agent, branch, turn, policy_version, advantage, payload_checksum"
        rows = [
            row
            for table in sorted(tables)
            for row in connection.execute(f"SELECT {columns} FROM {table} WHERE status='committed'")
        ]
    return sorted(rows)


def test_g5_a_resumed_run_dispatches_the_same_queries(undisturbed: Path, resumed: Path) -> None:
    started = records_of(resumed, RunStarted)
    assert [record.is_resumed for record in started] == [False, True]
    assert dispatches(resumed) == dispatches(undisturbed)
    queries = [query for dispatch in dispatches(undisturbed).values() for query in dispatch.queries]
    assert sorted(queries) == list(range(12))  # an epoch: each query once


def test_g5_a_resumed_run_asks_the_same_of_them(undisturbed: Path, resumed: Path) -> None:
    expected = requests(undisturbed)
    assert all(len(of_step) >= 18 for of_step in expected.values())
    found = requests(resumed)
    assert found.keys() == expected.keys()
    for step, of_step in found.items():  # those of ended trajectories may be lost with the log of a killed run
        assert of_step.items() <= expected[step].items()


def test_g5_a_resumed_run_draws_the_same_tokens_and_trains_the_same(undisturbed: Path, resumed: Path) -> None:
    assert len(payloads(undisturbed)) >= 72
    assert payloads(resumed) == payloads(undisturbed)
    assert trained(resumed) == trained(undisturbed)
