"""Processes of whole scripted runs are killed in mid-step; the run, or its resume, trains what the undisturbed one did.

Rollouts and training are scripted and take some time per token, so that there is a middle of a step. The gradient of
scripted training depends on the weights and on every sample, so equal digests mean equal work, once each.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.events import RequestDispatched, WorkerRestarted
from flexmarl.core.ids import PolicyName
from flexmarl.core.messages import CacheSealed
from flexmarl.telemetry.event_log import read_events
from flexmarl.telemetry.metrics_log import read_metrics
from flexmarl.testing.runs import LiveRun, RunLab, TrainedStep, lease_ids, scripted_config, trained_steps, wait_until

pytestmark = pytest.mark.crash

KILLING = (sys.executable, "-m", "flexmarl.testing.kill_points")
GATED_QUERY = 5


@dataclass(frozen=True)
class Trained:
    """What a run has trained."""

    steps: dict[int, TrainedStep]
    metrics: list[dict[str, Any]]
    """Of each step, without those of time."""


def trained(run_dir: Path) -> Trained:
    rows = [
        {name: value for name, value in row.items() if not name.endswith(("_s", "num_failed"))}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]
    return Trained(trained_steps(run_dir), rows)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What the run trains when nobody disturbs it."""
    lab = RunLab(tmp_path_factory.mktemp("undisturbed"))
    lab.run("train", lab.write_config(scripted_config()), "run.dir=run")
    result = trained(lab.folder / "run")
    assert sorted(result.steps) == [row["step"] for row in result.metrics] == [0, 1, 2, 3]
    assert len({str(step.weights_digests) for step in result.steps.values()}) == 4
    return result


@pytest.fixture
def lab(tmp_path: Path) -> RunLab:
    return RunLab(tmp_path)


class GatedRun:
    """A live run whose step with query `GATED_QUERY` cannot end before `open_gate`."""

    def __init__(self, lab: RunLab, **sections: Any) -> None:
        self.lab = lab
        self.run_dir = lab.folder / "run"
        self.gate = lab.folder / "gate"
        config = scripted_config()
        config["data"]["options"] = {"gate": str(self.gate), "gated_query": GATED_QUERY}
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        self.config = lab.write_config(config)
        self.live = lab.start("train", self.config, "run.dir=run")

    def wait_for_mid_step(self) -> None:
        """Return when the gated trajectories wait, some rows are in a gradient cache and none can be added any more."""
        waiting = self.gate.with_name("gate.waiting")
        wait_until(waiting.exists, f"a trajectory at the gate\n{self.live.output()}")
        wait_until(lambda: lease_ids(self.run_dir, "status='acknowledged'"), "acknowledged rows")

    def open_gate(self) -> None:
        self.gate.touch()

    def check_ended(self, undisturbed: Trained) -> None:
        assert self.live.wait() == 0, self.live.output()
        self.live.check_nothing_is_left()
        assert trained(self.run_dir) == undisturbed

    def records(self, kind: type) -> list[Any]:
        return [event.record for event in read_events(self.run_dir / "events.jsonl") if isinstance(event.record, kind)]


@pytest.fixture
def gated(lab: RunLab) -> Iterator[GatedRun]:
    run = GatedRun(lab)
    with run.live:
        yield run


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def resume_and_check(lab: RunLab, undisturbed: Trained) -> None:
    lab.run("train", "run", "--resume")
    assert trained(lab.folder / "run") == undisturbed
    assert json.loads((lab.folder / "run" / "summary.json").read_text())["steps"] == 4


# --- workers ----------------------------------------------------------------------------------------------------------


def test_g2_sigkill_of_an_instance_in_mid_step_loses_no_request(
    gated: GatedRun, undisturbed: Trained
) -> None:
    gated.wait_for_mid_step()
    kill(gated.live.worker_pid("instance-ju"))
    gated.open_gate()  # the judge's turns of these trajectories are requested while it is dead
    gated.check_ended(undisturbed)
    assert [record.worker for record in gated.records(WorkerRestarted)] == ["instance-ju-0"]


def test_g2_sigkill_of_an_instance_with_requests_in_flight_retries_them(
    lab: RunLab, undisturbed: Trained
) -> None:
    config = scripted_config()
    config["rollout"]["backend"]["token_s"] = 0.03
    with lab.start("train", lab.write_config(config), "run.dir=run") as live:
        pid = live.worker_pid("instance-wr")
        wait_until(lambda: lease_ids(lab.folder / "run", "status='partial'"), "a finished turn")
        kill(pid)
        assert live.wait() == 0, live.output()
        live.check_nothing_is_left()
    assert trained(lab.folder / "run") == undisturbed
    events = [event.record for event in read_events(lab.folder / "run" / "events.jsonl")]
    retried = [record for record in events if isinstance(record, RequestDispatched) and record.retry == 1]
    assert retried
    assert {record.instance_id for record in retried} == {"instance-wr-0"}


def test_g2_sigkill_of_a_process_group_in_mid_step_trains_every_row_once(
    gated: GatedRun, undisturbed: Trained
) -> None:
    gated.wait_for_mid_step()
    kill(gated.live.worker_pid("trainer-wr"))
    gated.open_gate()
    gated.check_ended(undisturbed)
    assert [record.worker for record in gated.records(WorkerRestarted)] == ["trainer-wr"]
    assert gated.records(CacheSealed)


def test_g2_sigkill_of_every_worker_at_once_trains_every_row_once(
    gated: GatedRun, undisturbed: Trained
) -> None:
    gated.wait_for_mid_step()
    for name in ("instance-wr", "instance-ju", "trainer-wr", "trainer-ju"):
        kill(gated.live.worker_pid(name))
    gated.open_gate()
    gated.check_ended(undisturbed)


def test_g2_sigkill_of_the_fork_server_in_mid_step_trains_every_row_once(
    gated: GatedRun, undisturbed: Trained
) -> None:
    gated.wait_for_mid_step()
    kill(gated.live.worker_pid("fork_server"))
    gated.open_gate()
    gated.check_ended(undisturbed)
    assert len(gated.records(WorkerRestarted)) == 4


@pytest.mark.parametrize("name", ["instance-ju", "trainer-ju"])
def test_g7_a_stopped_worker_is_replaced(lab: RunLab, undisturbed: Trained, name: str) -> None:
    gated = GatedRun(lab, runtime={"heartbeat_timeout_s": 1.0})
    with gated.live:
        gated.wait_for_mid_step()
        os.kill(gated.live.worker_pid(name), signal.SIGSTOP)
        gated.open_gate()
        gated.check_ended(undisturbed)
        (restarted,) = gated.records(WorkerRestarted)
        assert restarted.reason == "no heartbeat for 1 s"


def test_g7_a_row_that_kills_its_process_group_again_and_again_ends_the_run_with_its_name(
    lab: RunLab, undisturbed: Trained
) -> None:
    config = scripted_config()
    config["training"] |= {"micro_batch_tokens": 1, "seal_every": 100}
    config["training"]["backend"]["token_s"] = 0.004
    row = undisturbed.steps[0].keys[PolicyName("ju")][4]
    poison = f"status='leased' AND step=0 AND query={row.query} AND trajectory={row.trajectory} AND agent='judge'"
    killed: set[int | None] = set()
    with lab.start("train", lab.write_config(config), "run.dir=run") as live:
        live.mark()
        while live.process.poll() is None and len(killed) < 6:
            # Other rows are trained in between, so it is not three deaths in a row.
            for lease_id in set(lease_ids(lab.folder / "run", poison)) - killed:
                killed.add(lease_id)
                kill(live.worker_pid("trainer-ju"))
            time.sleep(0.005)
        assert live.wait() == 1, live.output()
        assert len(killed) == 3
        assert "training.max_attempts=3" in live.output()
        assert f"(rows {row})" in live.output()
        assert "Traceback" not in live.output()
        live.check_nothing_is_left()


# --- the orchestrator -------------------------------------------------------------------------------------------------


def test_g2_sigkill_of_the_orchestrator_in_mid_step_and_resume(
    gated: GatedRun, undisturbed: Trained
) -> None:
    gated.wait_for_mid_step()
    check_live(gated.live)
    gated.live.process.kill()
    gated.live.wait()
    gated.live.check_nothing_is_left(timeout_s=5.0)
    gated.open_gate()
    resume_and_check(gated.lab, undisturbed)


def check_live(live: LiveRun) -> None:
    """The look for leftovers does find what there is while the run lives."""
    live.mark()
    kinds = ("fm:fork_server", "fm:trainer-wr", "/dev/shm/flexmarl", ".json")
    assert all(any(kind in left for left in live.left()) for kind in kinds), live.left()


@pytest.mark.parametrize(
    "point",
    [
        "event:step_dispatched:3",
        "event:gradient_accumulated:6",
        "event:cache_sealed:2",
        "event:update_applied:5",  # the first policy of step 2 has its update, the second has not
        "event:weights_loaded:7",
        "event:work_done/store.commit:3",  # durable, but nobody knows yet
        "os.mkdir:.step_2.draft:1",
        "os.rename:.step_4.draft:1",
        "event:checkpoint_written:1",
    ],
)
def test_g4_sigkill_of_the_orchestrator_at_a_point_and_resume(
    lab: RunLab, undisturbed: Trained, point: str
) -> None:
    config = lab.write_config(scripted_config())
    with lab.start(point, "train", config, "run.dir=run", command=KILLING) as live:
        live.mark()
        assert live.wait() == -signal.SIGKILL, live.output()
        live.check_nothing_is_left(timeout_s=5.0)
    resume_and_check(lab, undisturbed)


def test_g2_two_kills_and_two_resumes(lab: RunLab, undisturbed: Trained) -> None:
    config = lab.write_config(scripted_config())
    lab.run("event:group_closed:8", "train", config, "run.dir=run", command=KILLING, expect=-signal.SIGKILL)
    lab.run("event:group_closed:2", "train", "run", "--resume", command=KILLING, expect=-signal.SIGKILL)
    resume_and_check(lab, undisturbed)


def test_g7_sigkill_of_a_process_group_that_opens_a_resumed_run(lab: RunLab, undisturbed: Trained) -> None:
    """Its seals of step 0 are in the store; their objects have gone with the first process."""
    config = lab.write_config(scripted_config())
    sealing = "training.seal_every=1"
    lab.run("event:group_closed:8", "train", config, "run.dir=run", sealing, command=KILLING, expect=-signal.SIGKILL)
    with lab.start("train", "run", "--resume") as live:
        kill(live.worker_pid("trainer-wr"))
        assert live.wait() == 0, live.output()
    assert trained(lab.folder / "run") == undisturbed


def test_g4_a_checkpoint_cut_short_is_not_taken_for_one(lab: RunLab, undisturbed: Trained) -> None:
    config = lab.write_config(scripted_config())
    point = "open:step_2.draft/manifest.json:1"
    lab.run(point, "train", config, "run.dir=run", command=KILLING, expect=-signal.SIGKILL)
    assert [path.name for path in (lab.folder / "run" / "checkpoints").iterdir()] == [".step_2.draft"]
    resume_and_check(lab, undisturbed)
    assert sorted(path.name for path in (lab.folder / "run" / "checkpoints").iterdir()) == ["step_2", "step_4"]
