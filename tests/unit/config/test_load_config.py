from pathlib import Path
from typing import Any

import pytest

from flexmarl.config import RootConfig, ScriptedRolloutConfig, load_config, parse_config, resolved_yaml
from flexmarl.core.errors import ConfigError

pytestmark = pytest.mark.unit


def plain_config(**sections: Any) -> dict[str, Any]:
    return {
        "data": {"source": "tasks:load"},
        "workflow": {"path": "team.py:play"},
        "policies": {"p": {"model": "folder"}},
        "agents": {"a": {"policy": "p"}},
        "pipeline": {"num_steps": 3},
    } | sections


def test_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(resolved_yaml(parse_config(plain_config())))
    config = load_config(path, ["pipeline.num_steps=5", "optimizer.learning_rate=1e-4", "policies.p.num_instances=2"])
    assert config.pipeline.num_steps == 5
    assert config.optimizer.learning_rate == 1e-4
    assert config.policies["p"].num_instances == 2


def test_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse_config(
        plain_config(data={"source": "t:l", "options": {"text": "1e-5", "number": 1e-5, "list": [1, None, "yes"]}}),
        ["run.name='on'", "rollout.backend.kind=scripted", "agents.a.system_prompt='say: \"x\"'"],
    )
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(path) == config


def test_variant_without_kind_is_the_default_one() -> None:
    config = parse_config(plain_config(), ["rollout.backend.num_slots=8", "training.backend.accumulation=canonical"])
    assert (config.rollout.backend.kind, config.rollout.backend.num_slots) == ("transformers", 8)
    assert config.training.backend.kind == "torch"
    scripted = parse_config(plain_config(), ["rollout.backend={kind: scripted, token_s: 0.5}"])
    assert scripted.rollout.backend == ScriptedRolloutConfig(token_s=0.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.num_step=3", "pipeline.num_step: unknown key; did you mean num_steps?"),
        ("pipline.num_steps=3", "pipline: unknown key; did you mean pipeline?"),
        ("rollout.backend.nm_slots=8", "rollout.backend.nm_slots: unknown key; did you mean num_slots?"),
        ("policies.p.optimizer.betta1=0", "policies.p.optimizer.betta1: unknown key; did you mean beta1?"),
        ("agents.a.zzz=1", "agents.a.zzz: unknown key; known: policy, system_prompt,"),
        ("pipeline.num_steps=0", "pipeline.num_steps: Input should be greater than or equal to 1, got 0"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: Input should be a finite number, got inf"),
        ("rollout.backend.kind=vlm", "rollout.backend: Input tag 'vlm'"),
        ("agents.b.system_prompt=hi", "agents.b.policy: required, but missing"),
        ("pipeline", "override 'pipeline': expected section.key=value"),
        ("pipeline..x=1", "expected section.key=value"),
        ("run.name.x=1", "run.name is a value, not a section"),
        ("run.name={a", "the value:1:3 is not valid YAML"),
        ("run.name=2024-01-01", r"2024, 1, 1\) is a date"),
    ],
)
def test_a_wrong_override_says_what_and_where(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(plain_config(run={"name": "n"}), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping of sections, got NoneType"),
        ("- 1", "expected a mapping of sections, got list"),
        ("run: {name: a}\nrun: {name: b}", "the key 'run' is given twice"),
        ("1: 2", "key 1 is a int; keys are names"),
        ("a: &a [*a]", "does an alias contain itself"),
        ("a: !!python/object:os.system {}", "is not valid YAML"),
        ('a: "\\ud800"', "not valid"),
        ("a: !!binary aGk=", "is a bytes"),
        ("a: !!set {x}", "is a set"),
        ("a: [" * 5000, "not valid YAML"),
        ("run: {seed: " + "9" * 5000 + "}", "not valid YAML"),
    ],
)
def test_any_text_gives_a_config_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_aliases_cannot_unfold_without_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30)]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load_config(path)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "latin.yaml")


def test_configuration_is_frozen_and_does_not_share_with_its_source() -> None:
    plain = plain_config()
    config = parse_config(plain, ["run.name=x"])
    assert "run" not in plain
    assert isinstance(config, RootConfig)
    with pytest.raises(ValueError, match="frozen"):
        config.run = config.run
