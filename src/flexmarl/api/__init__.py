"""The functions behind the commands. Start with `train.py`; `build.py` chooses the parts of a run."""

from flexmarl.api.evaluate import evaluate
from flexmarl.api.train import TrainResult, train
from flexmarl.api.validate import ValidationReport, validate

__all__ = ["TrainResult", "ValidationReport", "evaluate", "train", "validate"]
