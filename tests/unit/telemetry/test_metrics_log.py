import json
from pathlib import Path

import pytest

from flexmarl.core.errors import InvariantError
from flexmarl.telemetry import MetricsLog, read_metrics

pytestmark = pytest.mark.unit


def test_a_row_per_step_in_key_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(0, {"run/step_s": 0.5, "agent/a/reward": 1.0, "run/note": None})
    log.write(1, {"agent/a/reward": float("nan"), "run/step_s": float("inf")})
    log.close()
    lines = path.read_text().splitlines()
    assert list(json.loads(lines[0])) == ["step", "agent/a/reward", "run/note", "run/step_s"]
    assert read_metrics(path)[1] == {"step": 1, "agent/a/reward": None, "run/step_s": None}


def test_a_row_is_there_when_write_has_returned(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(0, {"x": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "x": 1}]
    log.close()


def test_steps_rise(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(3, {})
    with pytest.raises(InvariantError, match="row of step 3 after that of step 3"):
        log.write(3, {})
    log.close()


def test_a_resumed_run_forgets_the_steps_it_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(4):
        log.write(step, {"attempt": 1})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "att')
    log = MetricsLog(path, first_step=2)
    log.write(2, {"attempt": 2})
    log.close()
    assert [(row["step"], row["attempt"]) for row in read_metrics(path)] == [(0, 1), (1, 1), (2, 2)]
