"""FlexMARL trains teams of LLM agents by reinforcement learning.

Every name is loaded when first used, so that `import flexmarl` stays fast and needs no torch. `flexmarl.workflow` is
a package that is also the decorator: importing one of its modules does not take the decorator away.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexmarl.api import (
        InspectReport,
        ReplayResult,
        TrainResult,
        ValidationReport,
        evaluate,
        inspect,
        replay,
        train,
        validate,
    )
    from flexmarl.config import RootConfig, load_config
    from flexmarl.core.errors import FlexMARLError
    from flexmarl.workflow import AgentHandle, Episode, Outcome, Turn, workflow

__all__ = [
    "AgentHandle",
    "Episode",
    "FlexMARLError",
    "InspectReport",
    "Outcome",
    "ReplayResult",
    "RootConfig",
    "TrainResult",
    "Turn",
    "ValidationReport",
    "evaluate",
    "inspect",
    "load_config",
    "replay",
    "train",
    "validate",
    "workflow",
]

_HOMES = {
    "flexmarl.api": (
        "InspectReport",
        "ReplayResult",
        "TrainResult",
        "ValidationReport",
        "evaluate",
        "inspect",
        "replay",
        "train",
        "validate",
    ),
    "flexmarl.config": ("RootConfig", "load_config"),
    "flexmarl.core.errors": ("FlexMARLError",),
    "flexmarl.workflow": ("AgentHandle", "Episode", "Outcome", "Turn"),
}


def __getattr__(name: str) -> object:
    if name == "workflow":
        return importlib.import_module("flexmarl.workflow")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'flexmarl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
