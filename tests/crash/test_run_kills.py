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
from pathlib import Path

import pytest

from flexmarl.core.events import RequestDispatched, WorkerRestarted
from flexmarl.core.ids import PolicyName
from flexmarl.core.messages import CacheSealed, UpdateApplied
from flexmarl.telemetry.event_log import read_events
from flexmarl.testing.runs import (
    GatedRun,
    LiveRun,
    RunLab,
    Trained,
    lease_ids,
    records_of,
    scripted_config,
    trained,
    wait_until,
)

pytestmark = pytest.mark.crash

KILLING = (sys.executable, "-m", "flexmarl.testing.kill_points")


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


@pytest.fixture
def gated(lab: RunLab) -> Iterator[GatedRun]:
    run = GatedRun(lab, scripted_config())
    with run.live:
        yield run


def check_ended(gated: GatedRun, undisturbed: Trained) -> None:
    assert gated.live.wait() == 0, gated.live.output()
    gated.live.check_nothing_is_left()
    assert trained(gated.run_dir) == undisturbed


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def resume_and_check(lab: RunLab, undisturbed: Trained) -> None:
    lab.run("train", "run", "--resume")
    assert trained(lab.folder / "run") == undisturbed
    assert json.loads((lab.folder / "run" / "summary.json").read_text())["steps"] == 4


# --- workers ----------------------------------------------------------------------------------------------------------


def test_g2_sigkill_of_an_instance_in_mid_step_loses_no_request(gated: GatedRun, undisturbed: Trained) -> None:
    gated.wait_for_mid_step()
    kill(gated.live.worker_pid("instance-ju"))
    gated.open_gate()  # the judge's turns of these trajectories are requested while it is dead
    check_ended(gated, undisturbed)
    assert [record.worker for record in records_of(gated.run_dir, WorkerRestarted)] == ["instance-ju-0"]


def test_g2_sigkill_of_an_instance_with_requests_in_flight_retries_them(lab: RunLab, undisturbed: Trained) -> None:
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
    assert {record.instance_id for record in retried} == {"instance-wr-0.1"}


def test_g2_sigkill_of_a_process_group_in_mid_step_trains_every_row_once(gated: GatedRun, undisturbed: Trained) -> None:
    gated.wait_for_mid_step()
    kill(gated.live.worker_pid("trainer-wr"))
    gated.open_gate()
    check_ended(gated, undisturbed)
    assert [record.worker for record in records_of(gated.run_dir, WorkerRestarted)] == ["trainer-wr"]
    assert records_of(gated.run_dir, CacheSealed)


def test_g2_sigkill_of_every_worker_at_once_trains_every_row_once(gated: GatedRun, undisturbed: Trained) -> None:
    gated.wait_for_mid_step()
    for name in ("instance-wr", "instance-ju", "trainer-wr", "trainer-ju"):
        kill(gated.live.worker_pid(name))
    gated.open_gate()
    check_ended(gated, undisturbed)


def test_g2_sigkill_of_the_fork_server_in_mid_step_trains_every_row_once(gated: GatedRun, undisturbed: Trained) -> None:
    gated.wait_for_mid_step()
    kill(gated.live.worker_pid("fork_server"))
    gated.open_gate()
    check_ended(gated, undisturbed)
    assert len(records_of(gated.run_dir, WorkerRestarted)) == 4


def test_g2_sigkill_of_a_process_group_on_a_shared_slot_trains_every_row_once(
    lab: RunLab, undisturbed: Trained
) -> None:
    config = scripted_config()
    config["training"]["num_slots"] = 1
    gated = GatedRun(lab, config)
    with gated.live:
        gated.wait_for_mid_step()
        kill(gated.live.worker_pid("trainer-"))
        gated.open_gate()
        check_ended(gated, undisturbed)


def test_g4_sigkill_of_a_process_group_between_its_update_and_its_report(lab: RunLab, undisturbed: Trained) -> None:
    """The modelled time of an update passes after its result is published and before it is reported."""
    config = scripted_config()
    config["training"]["backend"]["update_s"] = 1.0
    run_dir = lab.folder / "run"
    with lab.start("train", lab.write_config(config), "run.dir=run") as live:
        in_cache = "status IN ('acknowledged', 'sealed')"
        num_rows = len(undisturbed.steps[0].keys[PolicyName("wr")]) + len(undisturbed.steps[0].keys[PolicyName("ju")])
        wait_until(lambda: len(lease_ids(run_dir, f"step=0 AND {in_cache}")) == num_rows, "an update")
        time.sleep(0.3)
        kill(live.worker_pid("trainer-wr"))
        assert live.wait() == 0, live.output()
        live.check_nothing_is_left()
    assert trained(run_dir) == undisturbed
    assert [record.worker for record in records_of(run_dir, WorkerRestarted)] == ["trainer-wr"]
    first_update = next(record.policy for record in records_of(run_dir, UpdateApplied))
    assert first_update == "ju"  # that of wr was not reported


def test_g8_the_other_instance_of_a_policy_takes_over(lab: RunLab, undisturbed: Trained) -> None:
    config = scripted_config()
    config["policies"]["wr"]["num_instances"] = 2
    gated = GatedRun(lab, config)
    with gated.live:
        gated.wait_for_mid_step()
        kill(gated.live.worker_pid("instance-wr"))
        gated.open_gate()
        check_ended(gated, undisturbed)


def test_g8_sigkill_of_an_instance_in_an_evaluation_changes_no_result(lab: RunLab) -> None:
    config = scripted_config()
    config["eval"] = {"num_queries": 6, "samples_per_query": 2}
    config["pipeline"]["num_steps"] = 1
    lab.run("train", lab.write_config(config), "run.dir=undisturbed")
    gated = GatedRun(lab, config, gated_split="held_out")
    with gated.live:
        gated.wait_for_gate()
        kill(gated.live.worker_pid("instance-ju"))
        gated.open_gate()  # the judge's turns of these trajectories are requested while it is dead
        assert gated.live.wait() == 0, gated.live.output()
    expected, found = (
        json.loads((lab.folder / name / "summary.json").read_text())["eval"] for name in ("undisturbed", "run")
    )
    for moment in ("before", "after"):
        del expected[moment]["duration_s"], found[moment]["duration_s"]
    assert found == expected
    assert records_of(lab.folder / "run", WorkerRestarted)


@pytest.mark.parametrize("name", ["instance-ju", "trainer-ju"])
def test_g7_a_stopped_worker_is_replaced(lab: RunLab, undisturbed: Trained, name: str) -> None:
    config = scripted_config()
    config["runtime"] = {"heartbeat_timeout_s": 1.0}
    gated = GatedRun(lab, config)
    with gated.live:
        gated.wait_for_mid_step()
        os.kill(gated.live.worker_pid(name), signal.SIGSTOP)
        gated.open_gate()
        check_ended(gated, undisturbed)
        (restarted,) = records_of(gated.run_dir, WorkerRestarted)
        assert restarted.reason == "no heartbeat for 1 s"


def test_g7_a_row_that_kills_its_process_group_again_and_again_ends_the_run_with_its_name(
    lab: RunLab, undisturbed: Trained
) -> None:
    config = scripted_config()
    config["training"] |= {"micro_batch_tokens": 1, "seal_every": 100}
    row = undisturbed.steps[0].keys[PolicyName("ju")][4]
    # Other rows are trained in between, so it is not three deaths in a row.
    plan = " then ".join([f"send:accumulate_gradient/{row!r}:1 then kill trainer-ju"] * 6)
    with lab.start(plan, "train", lab.write_config(config), "run.dir=run", command=KILLING) as live:
        assert live.wait() == 1, live.output()
        assert live.output().count("kill point: kill trainer-ju") == 3
        assert "training.max_attempts=3" in live.output()
        assert f"(rows {row})" in live.output()
        assert "Traceback" not in live.output()
        live.check_nothing_is_left()


# --- the orchestrator -------------------------------------------------------------------------------------------------


def test_g2_sigkill_of_the_orchestrator_in_mid_step_and_resume(gated: GatedRun, undisturbed: Trained) -> None:
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
        "event:update_applied:5",  # the first policy of step 2 has its update, the second has not
        "event:work_done/store.commit:3",  # durable, but nobody knows yet
        "os.rename:.step_4.draft:1",
    ],
)
def test_g4_sigkill_of_the_orchestrator_at_a_point_and_resume(lab: RunLab, undisturbed: Trained, point: str) -> None:
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
