"""G5: a run that stops and is resumed generates and trains what an undisturbed one does.

With `rollout.deterministic` and canonical accumulation the tokens, their log-probs and the weights are the same bits;
by default at least 99.9 % of the tokens of the first step after the resume.
"""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.ids import SampleKey
from flexmarl.store import SqliteStore
from flexmarl.testing.runs import RunLab, call_inline

pytestmark = pytest.mark.e2e

NUM_STEPS = 4
STOP_AFTER = 2
NUM_TRAJECTORIES = 4
DETERMINISTIC = ("rollout.deterministic=true", "training.backend.accumulation=canonical")

Turn = tuple[list[int], list[float]]
"""Tokens and log-probs."""


def config() -> dict[str, Any]:
    return {
        "run": {"name": "bits"},
        "data": {"source": "flexmarl.workflow.tasks.chain_sum:load_queries"},
        "workflow": {"path": "flexmarl.workflow.teams.relay:relay"},
        "policies": {"reducer": {"model": "shipped:chain_sum"}, "finisher": {"model": "shipped:chain_sum"}},
        "agents": {"reducer": {"policy": "reducer"}, "finisher": {"policy": "finisher"}},
        # Large enough for one wrong bit to show in the next step.
        "optimizer": {"learning_rate": 1e-3},
        "pipeline": {"num_steps": NUM_STEPS, "queries_per_step": 4, "trajectories_per_query": NUM_TRAJECTORIES},
        "rollout": {"max_new_tokens": 12},
        "store": {"retention": "all"},
        "eval": {"at_ends": False},
    }


def undisturbed_and_resumed(folder: Path, *overrides: str) -> tuple[Path, Path]:
    """Run the configuration at once, and in two parts."""
    lab = RunLab(folder)
    path = lab.write_config(config())
    with lab.start("train", path, "run.dir=whole", *overrides) as whole:
        lab.run("train", path, "run.dir=parts", f"pipeline.num_steps={STOP_AFTER}", *overrides)
        lab.run("train", path, "run.dir=parts", "--resume", *overrides)
        assert whole.wait() == 0, whole.output()
        whole.check_nothing_is_left()
    return folder / "whole", folder / "parts"


def turns_of(run_dir: Path) -> dict[SampleKey, Turn]:
    """Return what each committed turn generated."""
    return asyncio.run(_turns_of(run_dir))


async def _turns_of(run_dir: Path) -> dict[SampleKey, Turn]:
    store = await SqliteStore.open(run_dir / "store", call_inline)
    turns: dict[SampleKey, Turn] = {}
    try:
        for commit in await store.commits_after(0):
            for policy, part in commit.policies.items():
                for name in part.micro_batches:
                    for sample in await store.micro_batch(policy, commit.step, name):
                        turns[sample.turn.key] = (list(sample.turn.response_tokens), list(sample.turn.logprobs))
    finally:
        await store.close()
    return turns


def digests_of(run_dir: Path) -> list[dict[str, str]]:
    """Return the digests of all weights after each step."""
    with closing(sqlite3.connect(run_dir / "store" / "index.db")) as index:
        commits = [json.loads(text) for (text,) in index.execute("SELECT record FROM commits ORDER BY step")]
    return [{name: each["weights_digest"] for name, each in commit["policies"].items()} for commit in commits]


def share_of_equal_tokens(turns: Sequence[Turn], others: Sequence[Turn]) -> float:
    """Return the share of places at which both have a token and it is the same."""
    pairs = list(zip(turns, others, strict=True))
    num_equal = sum(a == b for (first, _), (second, _) in pairs for a, b in zip(first, second, strict=False))
    return num_equal / sum(max(len(first), len(second)) for (first, _), (second, _) in pairs)


def test_g5_a_resumed_run_has_the_same_tokens_and_weights_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = undisturbed_and_resumed(tmp_path, *DETERMINISTIC)
    turns = turns_of(whole)
    assert len(turns) == NUM_STEPS * 4 * NUM_TRAJECTORIES * 2
    assert turns_of(parts) == turns
    digests = digests_of(whole)
    assert len({each["reducer"] for each in digests}) == NUM_STEPS, "the weights did not change"
    assert digests_of(parts) == digests


def test_g5_by_default_the_first_resumed_step_has_nearly_all_the_same_tokens(tmp_path: Path) -> None:
    whole, parts = (turns_of(run_dir) for run_dir in undisturbed_and_resumed(tmp_path, "optimizer.learning_rate=1e-4"))
    assert whole.keys() == parts.keys()
    first = sorted(key for key in whole if key.step == STOP_AFTER)
    assert len(first) == 4 * NUM_TRAJECTORIES * 2
    assert share_of_equal_tokens([whole[key] for key in first], [parts[key] for key in first]) >= 0.999
