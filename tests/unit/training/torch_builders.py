"""A torch backend over a tiny model, and samples for it."""

from collections.abc import Callable
from pathlib import Path

from flexmarl.config import AlgorithmConfig, OptimizerConfig, TorchTrainingConfig
from flexmarl.core.ids import ObjectKey
from flexmarl.core.records import Denominators
from flexmarl.testing.training import MemoryObjectPlane, make_sample
from flexmarl.training.backends.torch import TorchBackend

Build = Callable[..., TorchBackend]
STATE, WEIGHTS, SEAL = (ObjectKey(kind, "actor", 1) for kind in ("state", "weights", "seal"))
SAMPLES = [
    make_sample(0, prompt=[1, 2, 3], response=[4, 5, 6, 7], advantage=0.7, temperature=0.7),
    make_sample(1, prompt=[9], response=[8], advantage=-1.3),
    make_sample(2, prompt=[3, 1, 4, 1, 5, 9, 2, 6], response=[5, 3], advantage=0.4, temperature=1.5),
    make_sample(3, prompt=[2, 2], response=[1, 1, 1, 1, 1, 1], advantage=-0.2),
]
COUNTED = Denominators(num_samples=4, num_tokens=13)


def make_backend(
    folder: Path,
    *,
    objects: MemoryObjectPlane | None = None,
    canonical: bool = False,
    algorithm: AlgorithmConfig | None = None,
    is_loaded: bool = True,
    reference_folder: Path | None = None,
    **optimizer: float | None,
) -> TorchBackend:
    backend = TorchBackend(
        model_folder=folder,
        objects=objects or MemoryObjectPlane(),
        config=TorchTrainingConfig(accumulation="canonical" if canonical else "float"),
        algorithm=algorithm or AlgorithmConfig(),
        optimizer=OptimizerConfig.model_validate({"learning_rate": 0.01, **optimizer}),
        reference_folder=reference_folder,
    )
    if is_loaded:
        backend.load_model()
    return backend
