"""Runs, stops, resumes and evaluations of the whole API under virtual time, on runs of a few trajectories."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import TrainResult, evaluate, train
from flexmarl.config import parse_config
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.events import CheckpointWritten, EvaluationDone, RunEnded, RunStarted, StepCommitted, StepReplayed
from flexmarl.core.messages import Generated
from flexmarl.orchestrator.checkpoint import list_checkpoints
from flexmarl.orchestrator.run import Orchestrator
from flexmarl.telemetry import EventLog, SilentListener, read_events, read_metrics
from flexmarl.workflow import Episode, Outcome

pytestmark = pytest.mark.integration


def load_queries(*, split: str, num_queries: int | None, seed: int, word: str = "q") -> list[dict[str, Any]]:
    return [{"text": f"{word} {number}"} for number in range(num_queries or 4)]


async def team(episode: Episode) -> Outcome:
    turn = await episode.agent("a").chat(episode.query["text"])
    return Outcome(rewards={"a": float(len(turn.text))}, success=len(turn.text) % 2 == 0)


def plain(folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": "resume", "dir": str(folder)},
        "data": {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:team"},
        "policies": {"p": {"model": "none"}},
        "agents": {"a": {"policy": "p"}},
        "algorithm": {"truncated": "train"},
        "pipeline": {"num_steps": 4, "queries_per_step": 2, "trajectories_per_query": 2},
        "rollout": {"backend": {"kind": "scripted", "token_s": 0.01}, "max_new_tokens": 8},
        "training": {"backend": {"kind": "scripted", "token_s": 0.001, "num_parameters": 4}},
        "checkpoint": {"every": 2},
        "eval": {"at_ends": False, "num_queries": 3},
        "runtime": {"kind": "simulated"},
    }


def run(folder: Path, *overrides: str, resume: bool = False) -> TrainResult:
    return train(parse_config(plain(folder), overrides), resume=resume)


def digest(result: TrainResult) -> str:
    return str(result.summary["policies"]["p"]["weights_digest"]["after"])


def records(folder: Path, kind: type[Any]) -> list[Any]:
    return [event.record for event in read_events(folder / "events.jsonl") if isinstance(event.record, kind)]


def test_g5_a_resumed_run_comes_to_the_same_weights(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", "pipeline.num_steps=2")
    resumed = run(tmp_path / "parts", resume=True)
    assert digest(resumed) == digest(whole)
    assert resumed.summary["policies"]["p"]["weights_digest"] == whole.summary["policies"]["p"]["weights_digest"]
    starts = records(tmp_path / "parts", RunStarted)
    assert [(start.policy_version, start.is_resumed) for start in starts] == [(0, False), (2, True)]
    commits = [[record.commit for record in records(tmp_path / name, StepCommitted)] for name in ("whole", "parts")]
    assert commits[0] == commits[1]
    rows = list(read_metrics(tmp_path / "parts/metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("replay", ["true", "false"])
def test_g5_steps_after_the_last_checkpoint_train_again_or_run_again(tmp_path: Path, replay: str) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", "pipeline.num_steps=3")
    for version, path in list_checkpoints(tmp_path / "parts/checkpoints"):
        if version == 3:
            (path / "manifest.json").unlink()
    resumed = run(tmp_path / "parts", f"checkpoint.replay={replay}", resume=True)
    assert digest(resumed) == digest(whole)
    commits = [record.commit for record in records(tmp_path / "parts", StepCommitted)]
    if replay == "true":
        assert [commit.step for commit in commits] == [0, 1, 2, 3]
        assert [record.step for record in records(tmp_path / "parts", StepReplayed)] == [2]
    else:
        assert [commit.step for commit in commits] == [0, 1, 2, 2, 3]
        assert commits[2] == commits[3]
    generated = [record.completion.request_id for record in records(tmp_path / "parts", Generated)]
    assert (len(set(generated)) == len(generated)) == (replay == "true")
    assert [row["step"] for row in read_metrics(tmp_path / "parts/metrics.jsonl")] == [0, 1, 2, 3]


def test_checkpoints_are_written_when_due_and_at_the_end(tmp_path: Path) -> None:
    run(tmp_path / "run", "pipeline.num_steps=5", "checkpoint.every=2", "checkpoint.keep_last=9")
    assert [record.policy_version for record in records(tmp_path / "run", CheckpointWritten)] == [2, 4, 5]


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(tmp_path / "run")
    again = run(tmp_path / "run", resume=True)
    assert digest(again) == digest(first)
    assert len(records(tmp_path / "run", StepCommitted)) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.seed=9"], "run.seed of the checkpoint is 0, of this configuration 9"),
        (["data.options={word: other}"], "training data (digest) of the checkpoint is"),
        (
            ["policies={q: {model: none}}", "agents={a: {policy: q}}"],
            "policies of the checkpoint is ['p'], of this configuration ['q']",
        ),
    ],
)
def test_g10_a_checkpoint_of_another_run_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    run(tmp_path / "run", "pipeline.num_steps=2")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", *overrides, resume=True)
    assert message in str(caught.value)


def test_g10_a_damaged_checkpoint_says_how_to_go_on(tmp_path: Path) -> None:
    run(tmp_path / "run", "checkpoint.keep_last=9")
    newest = list_checkpoints(tmp_path / "run/checkpoints")[-1][1]
    path = newest / "p.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"p.safetensors is damaged.*remove .*step_4"):
        run(tmp_path / "run", "pipeline.num_steps=6", resume=True)
    for each in newest.iterdir():
        each.unlink()
    newest.rmdir()
    resumed = run(tmp_path / "run", "pipeline.num_steps=6", resume=True)
    assert resumed.summary["steps"] == 6
    assert digest(resumed) == digest(run(tmp_path / "whole", "pipeline.num_steps=6"))


def test_g10_resume_needs_a_folder() -> None:
    config = parse_config({**plain(Path("x")), "run": {"name": "resume"}})
    with pytest.raises(ConfigError, match=r"--resume needs the run to go on with: set run.dir=FOLDER"):
        train(config, resume=True)


def test_a_stop_writes_a_checkpoint_and_a_resume_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = Orchestrator._committed

    def stop_at_three(self: Orchestrator, *arguments: Any) -> None:
        committed(self, *arguments)
        if self._version == 3:  # the next step has just begun
            self.request_stop("SIGINT")

    monkeypatch.setattr(Orchestrator, "_committed", stop_at_three)
    stopped = run(tmp_path / "parts")
    monkeypatch.undo()
    assert (stopped.stopped_by, stopped.summary["steps"]) == ("SIGINT", 3)
    assert records(tmp_path / "parts", RunEnded) == [RunEnded(policy_version=3, reason="SIGINT")]
    assert list_checkpoints(tmp_path / "parts/checkpoints")[-1][0] == 3
    resumed = run(tmp_path / "parts", resume=True)
    assert resumed.stopped_by is None
    assert digest(resumed) == digest(run(tmp_path / "whole"))


def test_evaluations_run_when_due(tmp_path: Path) -> None:
    run(tmp_path / "run", "eval.at_ends=true", "eval.every=3")
    done = records(tmp_path / "run", EvaluationDone)
    assert [record.policy_version for record in done] == [0, 3, 4]
    assert all(record.error is None for record in done)


def test_a_resumed_run_compares_with_the_first_version(tmp_path: Path) -> None:
    run(tmp_path / "run", "eval.at_ends=true", "pipeline.num_steps=2")
    resumed = run(tmp_path / "run", "eval.at_ends=true", resume=True)
    summary = resumed.summary["eval"]
    assert summary["before"]["policy_version"] == 0
    assert summary["after"]["policy_version"] == 4
    assert summary["difference"] == {"mean": 0.0, "lower_95": 0.0, "num_queries": 3}


def test_an_evaluation_that_takes_too_long_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "eval.at_ends=true", "eval.timeout_s=0.02")
    done = records(tmp_path / "run", EvaluationDone)
    assert [record.policy_version for record in done] == [0, 4]
    assert all("took longer than eval.timeout_s=0.02" in record.error for record in done)
    assert result.summary["steps"] == 4
    assert digest(result) == digest(run(tmp_path / "other"))


def test_evaluate_gives_the_figures_of_the_run_and_leaves_its_folder_alone(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "eval.at_ends=true")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    config = parse_config(plain(tmp_path / "other"), ["eval.at_ends=true"])
    report = evaluate(config, run_dir=tmp_path / "run")
    assert report.policy_version == 4
    assert report.success_frac == result.summary["eval"]["after"]["success"]
    assert evaluate(config).policy_version == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert not (tmp_path / "other").exists()


def test_sampled_trajectories_are_written_with_their_texts(tmp_path: Path) -> None:
    run(tmp_path / "run", "telemetry.trajectories_per_step=1")
    lines = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        (turn,) = line["turns"]
        assert line["query"]["text"] in turn["prompt"]
        assert line["rewards"] == {"a": float(len(turn["response"]))}


@pytest.mark.parametrize("first", range(3))
def test_g5_a_stop_at_any_event_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    overrides = ["eval.at_ends=true", "pipeline.num_steps=2", "checkpoint.every=1", "eval.num_queries=2"]
    whole = run(tmp_path / "whole", *overrides)
    num_events = sum(1 for _ in read_events(tmp_path / "whole/events.jsonl"))
    emit, go = EventLog.emit, Orchestrator.run
    orchestrators: list[Orchestrator] = []

    async def run_watched(self: Orchestrator) -> Any:
        orchestrators.append(self)
        return await go(self)

    for stop_at in range(first * 4, num_events, 12):

        def emit_and_stop(self: EventLog, record: object, *, source: str = "orchestrator", at: int = stop_at) -> int:
            seq = emit(self, record, source=source)
            if seq == at:
                orchestrators[-1].request_stop("SIGTERM")
            return seq

        folder = tmp_path / str(stop_at)
        with monkeypatch.context() as patch:
            patch.setattr(Orchestrator, "run", run_watched)
            patch.setattr(EventLog, "emit", emit_and_stop)
            stopped = run(folder, *overrides)
        resumed = run(folder, *overrides, resume=True)
        where = f"stopped at event {stop_at} of {num_events} with version {stopped.summary['steps']}"
        assert digest(resumed) == digest(whole), where
        assert resumed.summary["steps"] == 2, where
        evaluations = [resumed.summary["eval"][name]["success"] for name in ("before", "after")]
        assert evaluations == [whole.summary["eval"][name]["success"] for name in ("before", "after")], where


def test_a_run_stopped_before_its_last_step_has_no_evaluation_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = Orchestrator._committed

    def stop_then_commit(self: Orchestrator, *args: Any) -> None:
        self.request_stop("SIGINT")
        committed(self, *args)

    monkeypatch.setattr(Orchestrator, "_committed", stop_then_commit)

    stopped = run(tmp_path / "run", "eval.at_ends=true")

    assert stopped.stopped_by == "SIGINT"
    assert set(stopped.summary["eval"]) == {"before"}
    monkeypatch.undo()
    resumed = run(tmp_path / "run", "eval.at_ends=true", resume=True)
    assert set(resumed.summary["eval"]) == {"before", "after", "difference"}


def test_the_share_of_samples_without_a_signal_is_reported(tmp_path: Path) -> None:
    run(tmp_path / "run")

    for row in read_metrics(tmp_path / "run/metrics.jsonl"):
        # Groups of two: an advantage is zero exactly where both rewards are equal.
        assert row["policy/p/zero_advantage_frac"] in (0.0, 0.5, 1.0)


def test_sampled_trajectories_are_of_different_queries(tmp_path: Path) -> None:
    run(tmp_path / "run", "telemetry.trajectories_per_step=2")

    lines = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert all(line["trajectory"] == 0 for line in lines)
    assert all(a["query"] != b["query"] for a, b in zip(lines[::2], lines[1::2], strict=True))


def test_a_refused_resume_leaves_the_configuration_of_the_run(tmp_path: Path) -> None:
    run(tmp_path / "run")
    before = (tmp_path / "run/config.yaml").read_text()

    with pytest.raises(ConfigError, match="run.seed"):
        run(tmp_path / "run", "run.seed=5", "pipeline.num_steps=6", resume=True)

    assert (tmp_path / "run/config.yaml").read_text() == before
    run(tmp_path / "run", "pipeline.num_steps=6", resume=True)
    assert "num_steps: 6" in (tmp_path / "run/config.yaml").read_text()


class Messages(SilentListener):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)


def test_a_resume_without_checkpoints_says_that_all_runs_again(tmp_path: Path) -> None:
    run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    listener = Messages()

    train(parse_config(plain(tmp_path / "run")), resume=True, listener=listener)

    assert "4 committed steps run again from the first" in listener.messages[0]


def test_a_resume_with_a_new_store_says_what_is_gone(tmp_path: Path) -> None:
    run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/store")
    listener = Messages()

    train(parse_config(plain(tmp_path / "run"), ["pipeline.num_steps=5"]), resume=True, listener=listener)

    assert "knows 0 of the 4 steps before the checkpoint" in listener.messages[0]


async def odd_text(episode: Episode) -> Outcome:
    await episode.agent("a").chat(episode.query["text"])
    if episode.query["text"].endswith("0"):
        raise ValueError("\udcff")
    return Outcome(rewards={"a": 1.0})


def test_g10_text_that_no_file_can_hold_does_not_end_a_run(tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        f"workflow.path={__name__}:odd_text",
        "workflow.dry_run=false",
        "telemetry.trajectories_per_step=9",
    )

    lines = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    assert any("\udcff" in (line["failure"] or "") for line in lines)


async def idle(episode: Episode) -> Outcome:
    return Outcome()


def test_a_step_that_trains_nothing_is_told(tmp_path: Path) -> None:
    listener = Messages()
    config = parse_config(plain(tmp_path / "run"), [f"workflow.path={__name__}:idle", "workflow.dry_run=false"])

    train(config, listener=listener)

    assert sum("no sample trained" in message for message in listener.messages) == 4


def test_more_slots_than_policies_are_as_many_as_policies(tmp_path: Path) -> None:
    assert digest(run(tmp_path / "a", "training.num_slots=100000000000")) == digest(run(tmp_path / "b"))


def test_a_path_in_place_of_a_configuration_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="load_config"):
        train("team.yaml")  # type: ignore[arg-type]
