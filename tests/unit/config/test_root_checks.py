"""Checks across sections name both fields and both values."""

from collections.abc import Sequence

import pytest

from flexmarl.config import parse_config
from flexmarl.core.errors import ConfigError

pytestmark = pytest.mark.unit

BASE = {
    "data": {"source": "tasks:load"},
    "workflow": {"path": "team.py:play"},
    "policies": {"p": {"model": "folder"}},
    "agents": {"a": {"policy": "p"}},
    "pipeline": {"num_steps": 3},
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agents.a.policy=q"], "agents.a.policy is 'q', but policies has only: p"),
        (["policies.q.model=m"], "policies.q is bound to no agent"),
        (["agents.a b.policy=p"], "a name has only letters, digits, - and _"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9: training needs rollout.top_p=1"),
        (["rollout.top_k=5"], "rollout.top_k=5: training needs rollout.top_k=null"),
        (["rollout.ignore_stop=true"], "rollout.ignore_stop=true .* set algorithm.truncated=train"),
        (
            ["rollout.deterministic=true", "rollout.backend.kind=scripted"],
            "rollout.deterministic=true has no effect with rollout.backend.kind=scripted",
        ),
        (["algorithm.normaliser=constant"], "normaliser=constant with algorithm.constant_tokens=None"),
        (["algorithm.constant_tokens=8"], "normaliser=token_mean with algorithm.constant_tokens=8"),
        (["optimizer.schedule=linear"], "schedule=linear with optimizer.decay_steps=None"),
        (["optimizer.decay_steps=8"], "schedule=constant with optimizer.decay_steps=8"),
        (
            ["optimizer.schedule=cosine", "optimizer.decay_steps=5", "optimizer.warmup_steps=5"],
            "decay_steps=5 with optimizer.warmup_steps=5: .* raise it",
        ),
        (["optimizer.min_lr_frac=0.1"], "min_lr_frac=0.1 has no effect with optimizer.schedule=constant"),
        (["pipeline.trajectories_per_query=1"], "makes groups of one"),
        (["data.train_file=x.jsonl"], "exactly one of data.source and data.train_file"),
        (["data.source=null"], "exactly one of data.source and data.train_file"),
        (["data.source=null", "data.train_file=x"], "evaluation is on but data.held_out_file is not set"),
        (["algorithm.num_epochs=2"], "num_epochs=2, num_minibatches=1 with pipeline.mode=strict"),
        (["algorithm.correction=decoupled_ppo"], "decoupled_ppo has no effect with algorithm.num_epochs=1"),
        (
            ["algorithm.correction=truncated_is", "algorithm.num_epochs=2", "pipeline.mode=serial"],
            "truncated_is with algorithm.num_epochs=2, num_minibatches=1: .* give decoupled_ppo",
        ),
        (["algorithm.reference_model=m"], "reference_model=m has no effect with algorithm.kl_coef=0"),
        (["algorithm.weight_column=c"], "weight_column=c, but store.columns has c: nothing"),
        (["algorithm.weight_column=c", "store.columns={c: str}"], "store.columns has c: str"),
        (["store.columns={'a b': int}"], "a name is an identifier"),
        (["pipeline.mode=bounded_async"], "mode=bounded_async with pipeline.max_staleness=None"),
        (["pipeline.max_staleness=2"], "mode=strict with pipeline.max_staleness=2"),
        (["rollout.on_publish=continue"], "on_publish=continue has no effect with pipeline.mode=strict"),
        (
            ["pipeline.mode=bounded_async", "pipeline.max_staleness=1", "rollout.deterministic=true"],
            "deterministic=true with pipeline.mode=bounded_async",
        ),
        (["store.kind=plugin"], "store.kind=plugin with store.factory=None"),
        (["store.factory=a:b"], "store.kind=sqlite with store.factory=a:b"),
        (
            ["workflow.path=__main__:team", "workflow.num_workers=1"],
            "__main__:team with workflow.num_workers=1: other processes cannot import __main__",
        ),
        (["runtime.kind=simulated"], "rollout.backend.kind=scripted .is transformers."),
    ],
)
def test_contradictions_are_refused(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(BASE, overrides)


def test_settings_of_a_policy_replace_the_section() -> None:
    config = parse_config(
        BASE, ["policies.p.optimizer.learning_rate=0.5", "optimizer.weight_decay=0.1", "algorithm.truncated=train"]
    )
    assert config.optimizer_of("p").learning_rate == 0.5
    assert config.optimizer_of("p").weight_decay == 0.0
    assert config.algorithm_of("p").truncated == "train"
