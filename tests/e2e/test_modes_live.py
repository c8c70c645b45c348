"""Every pipeline mode trains the shipped model with the embedded engines and workflows in processes of their own."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.messages import Generated
from flexmarl.telemetry.metrics_log import read_metrics
from flexmarl.testing.runs import RunLab, records_of, trained_steps

pytestmark = pytest.mark.e2e

NUM_STEPS = 4
TURNS_PER_STEP = 4 * 4 * 2


def config() -> dict[str, Any]:
    return {
        "run": {"name": "modes"},
        "data": {"source": "flexmarl.workflow.tasks.chain_sum:load_queries"},
        "workflow": {"path": "flexmarl.workflow.teams.relay:relay", "num_workers": 2},
        "policies": {"reducer": {"model": "shipped:chain_sum"}, "finisher": {"model": "shipped:chain_sum"}},
        "agents": {"reducer": {"policy": "reducer"}, "finisher": {"policy": "finisher"}},
        "algorithm": {"truncated": "train"},
        "optimizer": {"learning_rate": 1e-4},
        "pipeline": {"num_steps": NUM_STEPS, "queries_per_step": 4, "trajectories_per_query": 4},
        "rollout": {"max_new_tokens": 12},
        "eval": {"at_ends": False},
    }


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (["pipeline.mode=one_step_off", "algorithm.num_epochs=2", "algorithm.num_minibatches=2"], 1),
        (["pipeline.mode=bounded_async", "pipeline.max_staleness=2", "algorithm.kl_coef=0.05"], 2),
        (
            ["pipeline.mode=bounded_async", "pipeline.max_staleness=1", "rollout.on_publish=continue"],
            1,
        ),
    ],
    ids=["one_step_off", "drain", "continue"],
)
def test_g2_g3_a_mode_trains_every_turn_within_its_bound(tmp_path: Path, overrides: list[str], bound: int) -> None:
    lab = RunLab(tmp_path)
    lab.run("train", lab.write_config(config()), "run.dir=run", *overrides)
    steps = trained_steps(tmp_path / "run")
    trained = Counter(key for step in steps.values() for keys in step.keys.values() for key in keys)
    assert len(trained) == sum(trained.values()) == NUM_STEPS * TURNS_PER_STEP
    assert len({str(step.weights_digests) for step in steps.values()}) == NUM_STEPS
    for record in records_of(tmp_path / "run", Generated):
        step = int(record.completion.request_id.split("/")[1].removeprefix("s"))
        versions = [span.policy_version for span in record.completion.version_spans]
        assert 0 <= step - min(versions) <= bound
        assert max(versions) <= step
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    for policy in ("reducer", "finisher"):
        assert max(row[f"policy/{policy}/staleness_max"] for row in rows) <= bound  # type: ignore[type-var,operator]
        for row in rows:
            assert isinstance(row[f"policy/{policy}/logprob_gap_mean"], float)
            assert isinstance(row[f"policy/{policy}/importance_weight_mean"], float)
