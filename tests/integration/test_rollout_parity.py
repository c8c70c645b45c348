"""At learning rate 0 the embedded engine and the trainer give a token the same log-prob, at any temperature.

What is left is the rounding of two ways to compute one number in float32: key-value cache and slots against whole rows.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flexmarl.telemetry.metrics_log import read_metrics
from flexmarl.testing.runs import RunLab

pytestmark = pytest.mark.integration

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
NUM_STEPS = 3
AGENTS = ("reducer", "finisher")


def shrunk(temperature: float) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    config["pipeline"] |= {
        "mode": "strict",
        "num_steps": NUM_STEPS,
        "queries_per_step": 4,
        "trajectories_per_query": 4,
    }
    config["optimizer"] = {"learning_rate": 0.0}
    config["rollout"]["temperature"] = temperature
    config["eval"] = {"at_ends": False}
    return config


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_f2_05_rollout_and_training_logprobs_agree_at_learning_rate_zero(tmp_path: Path, temperature: float) -> None:
    """F2-04, F2-05, F2-06: no bias at a temperature other than 1, no drift over steps whose weights are the same."""
    lab = RunLab(tmp_path)
    lab.run("train", lab.write_config(shrunk(temperature)), "run.dir=run")
    rows = [row for row in read_metrics(lab.folder / "run" / "metrics.jsonl") if "run/step_s" in row]
    assert len(rows) == NUM_STEPS
    for row in rows:
        for owner in (f"{kind}/{name}" for kind in ("policy", "agent") for name in AGENTS):
            found = {
                name.removeprefix(f"{owner}/"): value for name, value in row.items() if isinstance(value, int | float)
            }
            assert found["trained_tokens"] > 0
            assert found["logprob_gap_mean"] <= 1e-5
            assert found["logprob_gap_max"] <= 1e-4
            assert found["mismatch_kl_mean"] <= 1e-7
            assert found["staleness_max"] == 0.0
            # The log-probs are not all zero: the model is not certain of its tokens.
            assert found["entropy"] > 0.01
