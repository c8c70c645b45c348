"""G10: whatever a configuration holds, `flexmarl validate` ends with a report or one message, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flexmarl.cli.commands import app
from flexmarl.testing.runs import scripted_config

pytestmark = pytest.mark.property

PATHS = st.sampled_from(
    [
        "flexmarl.testing.teams:pair",
        "flexmarl.testing.teams:load_queries",
        "flexmarl.workflow.teams.relay:relay",
        "flexmarl.core.errors:ConfigError",
        "json:dumps",
        "os:_exit",
        "no.such:thing",
        "none.py:f",
        ":",
        "a:b:c",
        "..:x",
        "",
    ]
)
MODELS = st.sampled_from(["none", "shipped:chain_sum", "shipped:none", "shipped:", "/", "/proc", "~", "\x00", ""])
COUNTS = st.sampled_from([1, 2, 12, 13, 10**9])
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "data.source": PATHS | st.none(),
    "data.train_file": st.sampled_from(["/dev/null", "/", "none.jsonl", "\x00"]) | st.none(),
    "data.options": st.dictionaries(st.sampled_from(["gated_query", "x"]), st.integers() | st.text(), max_size=1),
    "data.num_train": st.sampled_from([1, 2, 13]) | st.none(),  # the source makes as many as it is asked for
    "workflow.path": PATHS | st.text(max_size=8),
    "policies.wr.model": MODELS,
    "policies.ju.model": MODELS,
    "agents.third": st.just({"policy": "ju"}) | st.just({"policy": "none"}),
    "agents.writer.max_new_tokens": COUNTS,
    "agents.writer.system_prompt": st.text(max_size=200),
    "pipeline.queries_per_step": COUNTS,
    "pipeline.trajectories_per_query": COUNTS,
    "rollout.max_new_tokens": COUNTS,
    "rollout.ignore_stop": st.booleans(),
    "rollout.backend": st.sampled_from([{"kind": "scripted"}, {"kind": "transformers"}]),
    "training.backend": st.sampled_from([{"kind": "scripted"}, {"kind": "torch"}]),
    "eval.at_ends": st.booleans(),
    "eval.num_queries": st.sampled_from([1, 13, 1000]),
    "telemetry.trackers": st.lists(st.sampled_from(["tensorboard", "wandb", "x"]), max_size=2),
    "runtime.kind": st.sampled_from(["local", "simulated"]),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), keys=st.lists(st.sampled_from(sorted(CHANGES)), max_size=4, unique=True))
def test_g10_validate_never_ends_with_a_traceback(data: st.DataObject, keys: list[str], tmp_path: Path) -> None:
    config = scripted_config()
    config["workflow"]["dry_run"] = True
    for key in keys:
        *sections, last = key.split(".")
        place: Any = config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = data.draw(CHANGES[key], label=key)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["validate", str(file)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    if result.exit_code == 0:
        assert result.stdout.endswith("valid\n")
    else:
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert result.stdout == ""
