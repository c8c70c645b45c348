"""The training backend of one process, in PyTorch. Start with `backend.py`."""

from flexmarl.training.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
