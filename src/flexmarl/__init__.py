"""FlexMARL trains teams of LLM agents by reinforcement learning.

The public names below are loaded when first used, so that `import flexmarl` stays fast and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexmarl.api import TrainResult, ValidationReport, evaluate, train, validate
    from flexmarl.config import RootConfig, load_config
    from flexmarl.core.errors import FlexMARLError
    from flexmarl.workflow import AgentHandle, Episode, Outcome, Turn, workflow

__all__ = [
    "AgentHandle",
    "Episode",
    "FlexMARLError",
    "Outcome",
    "RootConfig",
    "TrainResult",
    "Turn",
    "ValidationReport",
    "evaluate",
    "load_config",
    "train",
    "validate",
    "workflow",
]

_HOMES = {
    "flexmarl.api": ("TrainResult", "ValidationReport", "evaluate", "train", "validate"),
    "flexmarl.config": ("RootConfig", "load_config"),
    "flexmarl.core.errors": ("FlexMARLError",),
    "flexmarl.workflow": ("AgentHandle", "Episode", "Outcome", "Turn", "workflow"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'flexmarl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
