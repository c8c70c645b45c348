"""FlexMARL trains teams of LLM agents by reinforcement learning.

What workflows are written with is loaded here; the rest when first used, so that `import flexmarl` stays fast and needs
no torch.
"""

import importlib
from typing import TYPE_CHECKING

# Not lazy: the decorator has the name of its package, which would take its place here once that package is imported.
from flexmarl.workflow import AgentHandle, Episode, Outcome, Turn, workflow

if TYPE_CHECKING:
    from flexmarl.api import TrainResult, ValidationReport, evaluate, train, validate
    from flexmarl.config import RootConfig, load_config
    from flexmarl.core.errors import FlexMARLError

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
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'flexmarl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
