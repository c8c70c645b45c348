"""Numbers that no worker could be told."""

from typing import Any

import pytest

from flexmarl.config import parse_config
from flexmarl.core.errors import ConfigError

pytestmark = pytest.mark.unit

PLAIN: dict[str, Any] = {
    "data": {"source": "a:b"},
    "workflow": {"path": "a:b"},
    "policies": {"p": {"model": "m"}},
    "agents": {"a": {"policy": "p"}},
    "pipeline": {"num_steps": 1},
    "eval": {"at_ends": False},
}


@pytest.mark.parametrize("key", ["run.seed", "rollout.max_new_tokens", "optimizer.warmup_steps"])
def test_g10_a_whole_number_over_63_bits_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*63 bits"):
        parse_config(PLAIN, [f"{key}={10**30}"])
    parse_config(PLAIN, [f"{key}={2**63 - 1}"])
