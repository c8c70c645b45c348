"""The functions behind the commands. Start with `train.py`; `build.py` chooses the parts of a run."""

from flexmarl.api.evaluate import evaluate
from flexmarl.api.inspect import inspect
from flexmarl.api.inspect_records import InspectReport
from flexmarl.api.replay import ReplayedPolicy, ReplayedStep, ReplayResult, replay
from flexmarl.api.train import TrainResult, train
from flexmarl.api.validate import ValidationReport, validate

__all__ = [
    "InspectReport",
    "ReplayResult",
    "ReplayedPolicy",
    "ReplayedStep",
    "TrainResult",
    "ValidationReport",
    "evaluate",
    "inspect",
    "replay",
    "train",
    "validate",
]
