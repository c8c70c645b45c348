"""A run breaks off at some event and is resumed: it goes on with the step in flight and comes to the same weights.

Under virtual time, over the real store. The nightly profile tries each event; otherwise every `STRIDE`-th.
"""

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexmarl.api import TrainResult, train
from flexmarl.config import parse_config
from flexmarl.core.errors import ConfigError, FlexMARLError, StoreError, WorkflowError
from flexmarl.core.events import AttemptDiverged, StepCommitted, StepRestored
from flexmarl.core.messages import Generated, Scored, WorkDone
from flexmarl.orchestrator.checkpoint import list_checkpoints
from flexmarl.store import SqliteStore
from flexmarl.telemetry import EventLog, read_events, read_metrics
from flexmarl.testing.runs import trained_steps
from flexmarl.workflow import Episode, Outcome

pytestmark = pytest.mark.integration

STRIDE = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 89
NUM_STEPS = 3


def load_queries(*, split: str, num_queries: int | None, seed: int, word: str = "q") -> list[dict[str, Any]]:
    return [{"text": f"{split} {word} {number}"} for number in range(num_queries or 4)]


async def team(episode: Episode) -> Outcome:
    """Two agents, three turns; every third trajectory fails after its first one."""
    writer = episode.agent("writer")
    first = await writer.chat(episode.query["text"])
    if first.key.trajectory == 2:
        raise ValueError("no third one")
    verdict = await episode.agent("judge").chat(first.text)
    second = await writer.chat(verdict.text)
    return Outcome(rewards={"writer": float(len(second.text)), "judge": float(len(first.text) % 3)})


NUM_STARTS = Counter[str]()


async def fickle(episode: Episode) -> Outcome:
    """Asks something else each time it is started."""
    key = episode.query["text"]
    NUM_STARTS[key] += 1
    turn = await episode.agent("writer").chat(f"{key} {NUM_STARTS[key]}")
    verdict = await episode.agent("judge").chat(turn.text)
    return Outcome(rewards={"writer": float(len(turn.text)), "judge": float(len(verdict.text))})


class Break(Exception):
    """Stands for the end of the process."""


def run(folder: Path, *overrides: str, resume: bool = False, workflow: str = "team") -> TrainResult:
    plain = {
        "run": {"name": "flight", "dir": str(folder)},
        "data": {"source": f"{__name__}:load_queries"},
        "workflow": {"path": f"{__name__}:{workflow}", "dry_run": False},
        "policies": {"wr": {"model": "none"}, "ju": {"model": "none"}},
        "agents": {"writer": {"policy": "wr"}, "judge": {"policy": "ju"}},
        "algorithm": {"truncated": "train"},
        "pipeline": {"num_steps": NUM_STEPS, "queries_per_step": 2, "trajectories_per_query": 3},
        "rollout": {"backend": {"kind": "scripted", "token_s": 0.01}, "max_new_tokens": 12},
        "training": {
            "backend": {"kind": "scripted", "token_s": 0.002, "num_parameters": 4},
            "micro_batch_tokens": 40,
            "seal_every": 2,
        },
        "checkpoint": {"every": 2},
        "eval": {"at_ends": False},
        "runtime": {"kind": "simulated"},
    }
    return train(parse_config(plain, overrides), resume=resume)


def records(folder: Path, kind: type[Any]) -> list[Any]:
    return [event.record for event in read_events(folder / "events.jsonl") if isinstance(event.record, kind)]


def break_at(monkeypatch: pytest.MonkeyPatch, seq: int, folder: Path, *overrides: str, **options: Any) -> None:
    """Run until event `seq` is about to be written."""
    emit = EventLog.emit
    left = [seq]

    def counted(self: EventLog, record: object, *, source: str = "orchestrator") -> int:
        left[0] -= 1
        if left[0] == 0:
            raise Break
        return emit(self, record, source=source)

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "emit", counted)
        with pytest.raises(Break):
            run(folder, *overrides, **options)


def metrics(folder: Path) -> list[dict[str, Any]]:
    timed = ("_s", "num_failed")
    return [
        {name: value for name, value in row.items() if not name.endswith(timed)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


VARIANTS = {
    "strict": [],
    "serial": ["pipeline.mode=serial"],
    "one_step_off": ["pipeline.mode=one_step_off"],
    "updates": ["pipeline.mode=serial", "algorithm.num_epochs=2", "algorithm.num_minibatches=2"],
    "kl": ["algorithm.kl_coef=0.1"],
    "kl_in_reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "pipeline.mode=one_step_off"],
    "extended": ["pipeline.max_extensions=1", "rollout.backend.mean_tokens=1"],
    "one_slot": ["training.num_slots=1"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_g2_g5_a_run_that_broke_off_at_any_event_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    overrides = VARIANTS[variant]
    run(tmp_path / "whole", *overrides)
    whole = trained_steps(tmp_path / "whole")
    num_events = sum(1 for _ in read_events(tmp_path / "whole/events.jsonl"))
    for seq in range(2 + list(VARIANTS).index(variant), num_events, STRIDE):
        folder = tmp_path / str(seq)
        break_at(monkeypatch, seq, folder, *overrides)
        stored = [each.name.split()[1] for each in records(folder, WorkDone) if each.name.startswith("store.put_turn")]
        run(folder, *overrides, resume=True)
        where = f"{variant}: broke off at event {seq} of {num_events}"
        assert trained_steps(folder) == whole, where
        for row, expected in zip(metrics(folder), metrics(tmp_path / "whole"), strict=True):
            assert row == pytest.approx(expected, rel=1e-9), where  # sums of floats, in another order
        generated = Counter(record.completion.request_id for record in records(folder, Generated))
        for key in stored:
            again = [request_id for request_id in generated if key in request_id and generated[request_id] > 1]
            assert not again, f"{where}: {again} was stored, and generated again"


def test_g3_bounded_async_keeps_its_bound_across_a_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["pipeline.mode=bounded_async", "pipeline.max_staleness=2", "pipeline.num_steps=5"]
    run(tmp_path / "whole", *overrides)
    keys = {step: each.keys for step, each in trained_steps(tmp_path / "whole").items()}
    num_events = sum(1 for _ in read_events(tmp_path / "whole/events.jsonl"))
    for seq in range(5, num_events, STRIDE):
        folder = tmp_path / str(seq)
        break_at(monkeypatch, seq, folder, *overrides)
        run(folder, *overrides, resume=True)
        assert {step: each.keys for step, each in trained_steps(folder).items()} == keys
        assert max(row["policy/wr/staleness_max"] for row in metrics(folder)) <= 2


def test_two_breaks_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "whole")
    folder = tmp_path / "parts"
    break_at(monkeypatch, 60, folder)
    break_at(monkeypatch, 40, folder, resume=True)
    run(folder, resume=True)
    assert trained_steps(folder) == trained_steps(tmp_path / "whole")
    restored = records(folder, StepRestored)
    assert len(restored) == 2
    assert restored[1].num_ended >= restored[0].num_ended


def test_g2_a_trajectory_that_asks_something_else_gets_a_new_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    break_at(monkeypatch, 60, folder, workflow="fickle")
    run(folder, workflow="fickle", resume=True)
    assert records(folder, AttemptDiverged)
    for each in trained_steps(folder).values():
        assert {policy: len(keys) for policy, keys in each.keys.items()} == {"wr": 6, "ju": 6}


def test_without_replay_everything_goes_back_to_the_checkpoint_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole")
    folder = tmp_path / "parts"
    num_events = sum(1 for _ in read_events(tmp_path / "whole/events.jsonl"))
    break_at(monkeypatch, num_events - 20, folder)
    assert [version for version, _ in list_checkpoints(folder / "checkpoints")] == [2]
    run(folder, "checkpoint.replay=false", resume=True)
    assert trained_steps(folder) == trained_steps(tmp_path / "whole")
    assert records(folder, StepRestored) == []
    assert [record.commit.step for record in records(folder, StepCommitted)] == [0, 1, 2]


def test_g10_other_options_than_those_of_the_stored_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    break_at(monkeypatch, 60, folder)
    with pytest.raises(ConfigError) as caught:
        run(folder, "optimizer.learning_rate=0.5", resume=True)
    for part in ("optimizer.learning_rate: 1e-05 -> 0.5", "checkpoint.replay=false"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"algorithm.kl_coef: 0.0 -> 0.1"):
        run(folder, "algorithm.kl_coef=0.1", resume=True)
    run(folder, "algorithm.kl_coef=0.1", "checkpoint.replay=false", resume=True)
    assert len(trained_steps(folder)) == NUM_STEPS


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=9", "run.seed: 0 -> 9"),
        ("pipeline.queries_per_step=1", "pipeline.queries_per_step: 2 -> 1"),
        ("data.seed=4", "data.seed: 0 -> 4"),
        ("data.options={word: other}", "began with other training data"),
    ],
)
def test_g10_what_decides_the_queries_cannot_change_without_a_checkpoint_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    folder = tmp_path / "run"
    break_at(monkeypatch, 60, folder)
    with pytest.raises(ConfigError) as caught:
        run(folder, override, resume=True)
    assert message in str(caught.value)
    run(folder, resume=True)


def test_a_checkpoint_that_is_newer_than_the_store_is_gone_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, "pipeline.num_steps=1", "checkpoint.every=1")
    shutil.copytree(folder / "store", tmp_path / "older")
    run(folder, "pipeline.num_steps=2", resume=True)
    shutil.rmtree(folder / "store")
    shutil.move(tmp_path / "older", folder / "store")
    run(folder, resume=True)
    run(tmp_path / "whole")
    whole = trained_steps(tmp_path / "whole")
    assert trained_steps(folder) == {step: whole[step] for step in (0, 2)}


def test_replay_false_counts_for_one_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    break_at(monkeypatch, 60, folder)
    run(folder, "checkpoint.replay=false", "pipeline.num_steps=1", resume=True)
    assert "replay: true" in (folder / "config.yaml").read_text()


def test_a_resume_that_cannot_open_its_engines_leaves_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run(folder, "pipeline.num_steps=2")
    with pytest.raises(FlexMARLError):
        run(folder, "training.backend.num_parameters=7", resume=True)
    run(folder, resume=True)
    run(tmp_path / "whole")
    assert trained_steps(folder) == trained_steps(tmp_path / "whole")


def test_g10_the_store_of_a_run_cannot_change(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, "pipeline.num_steps=1")
    with pytest.raises(ConfigError, match="store.kind: sqlite -> memory"):
        run(folder, "store.kind=memory", resume=True)


def test_g10_stored_rows_without_a_baseline_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    break_at(monkeypatch, 60, folder)
    (folder / "baseline.json").unlink()
    with pytest.raises(StoreError, match=r"baseline.json is missing.*checkpoint.replay=false"):
        run(folder, resume=True)
    run(folder, "checkpoint.replay=false", resume=True)


async def no_store(folder: Path, call: Any) -> None:
    """A factory that is wrong."""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_store", "returned None, expected an ExperienceStore"),
        ("load_queries", "it must be an async function of .folder, call."),
        ("absent", "expected module:function"),
    ],
)
def test_g10_a_wrong_store_factory_is_named(tmp_path: Path, factory: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", "store.kind=plugin", f"store.factory={__name__}:{factory}")


async def plain_store(folder: Path, call: Any) -> SqliteStore:
    """The built-in store, as a plug-in."""
    return await SqliteStore.open(folder, call)


def test_a_store_as_a_plug_in_is_resumed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ["store.kind=plugin", f"store.factory={__name__}:plain_store"]
    folder = tmp_path / "run"
    break_at(monkeypatch, 90, folder, *plugin)
    run(folder, *plugin, resume=True)
    run(tmp_path / "whole")
    assert trained_steps(folder) == trained_steps(tmp_path / "whole")


IS_MENDED = [False]


async def broken(episode: Episode) -> Outcome:
    """Fails until somebody mends it."""
    if not IS_MENDED[0]:
        raise ValueError("a bug")
    return await team(episode)


def test_g7_a_step_in_which_everything_failed_runs_again_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(WorkflowError, match="all 6 trajectories of step 0 failed"):
        run(folder, workflow="broken")
    IS_MENDED[0] = True
    run(folder, workflow="broken", resume=True)
    run(tmp_path / "whole", workflow="broken")
    assert trained_steps(folder) == trained_steps(tmp_path / "whole")


def test_what_was_scored_before_the_break_is_not_scored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    overrides = VARIANTS["kl"]
    run(tmp_path / "whole", *overrides)
    at = next(event.seq for event in read_events(tmp_path / "whole/events.jsonl") if isinstance(event.record, Scored))
    break_at(monkeypatch, at + 12, folder, *overrides)
    run(folder, *overrides, resume=True)
    scored = Counter(key for record in records(folder, Scored) for key in [record.score_id])
    assert scored
    assert trained_steps(folder) == trained_steps(tmp_path / "whole")
