"""The scripted backend: what its integers depend on."""

import subprocess
import sys

import pytest

from flexmarl.config import AlgorithmConfig, ScriptedTrainingConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.records import Denominators, Sample
from flexmarl.testing.training import MemoryObjectPlane, make_sample
from flexmarl.training.backends.scripted import ScriptedBackend

pytestmark = pytest.mark.unit

STATE, WEIGHTS, SEAL = (ObjectKey(kind, "actor", 1) for kind in ("state", "weights", "seal"))
SAMPLES = [make_sample(number, response=[3] * (number + 1), advantage=number - 1.5) for number in range(4)]


def make(
    objects: MemoryObjectPlane | None = None, *, seed: int = 0, policy: str = "actor", algorithm: str = "token_mean"
) -> ScriptedBackend:
    backend = ScriptedBackend(
        policy=PolicyName(policy),
        seed=seed,
        objects=objects or MemoryObjectPlane(),
        config=ScriptedTrainingConfig(num_parameters=6, token_s=0.5, update_s=2.0),
        algorithm=AlgorithmConfig.model_validate({"normaliser": algorithm}),
    )
    backend.load_model()
    return backend


def trained(backend: ScriptedBackend, samples: list[Sample]) -> str:
    backend.update(backend.accumulate(samples).denominators)
    return backend.weights_digest()


def test_order_and_split_change_no_bit() -> None:
    split = make()
    split.accumulate(SAMPLES[2:])
    split.accumulate(SAMPLES[:2])
    split.update(Denominators(num_samples=4, num_tokens=10))
    assert split.weights_digest() == trained(make(), SAMPLES)


@pytest.mark.parametrize(
    "other",
    [
        SAMPLES[:3],
        [*SAMPLES[:3], make_sample(4, response=[3] * 4, advantage=1.5)],
        [*SAMPLES[:3], make_sample(3, response=[3, 3, 3, 4], advantage=1.5)],
        [*SAMPLES[:3], make_sample(3, response=[3] * 4, advantage=1.6)],
    ],
)
def test_key_tokens_and_advantage_of_every_sample_matter(other: list[Sample]) -> None:
    assert trained(make(), other) != trained(make(), SAMPLES)


def test_seed_policy_normaliser_and_weights_matter() -> None:
    base = make()
    digests = {trained(base, SAMPLES), trained(make(seed=1), SAMPLES), trained(make(policy="other"), SAMPLES)}
    digests |= {trained(make(algorithm="sample_mean"), SAMPLES), trained(base, SAMPLES)}
    assert len(digests) == 5


def test_the_gradient_is_linear_in_the_advantage() -> None:
    objects = MemoryObjectPlane()
    backend = make(objects)
    backend.accumulate([make_sample(advantage=0.5)])
    backend.accumulate([make_sample(advantage=-0.5)])
    backend.seal(SEAL)
    assert bytes(objects.packed(SEAL).bytes_of("gradient")) == bytes(48)


def test_state_and_seal_carry_everything() -> None:
    objects = MemoryObjectPlane()
    alone = make(objects)
    trained(alone, SAMPLES[:2])
    alone.publish(state=STATE, weights=WEIGHTS)
    alone.accumulate(SAMPLES[2:3])
    alone.seal(SEAL)
    heir = make(objects, seed=99)
    heir.load_state(STATE)
    assert heir.load_seal(SEAL) == Denominators(num_samples=1, num_tokens=3)
    for backend in (alone, heir):
        backend.accumulate(SAMPLES[3:])
        backend.update(Denominators(num_samples=2, num_tokens=7))
    assert trained(heir, SAMPLES) == trained(alone, SAMPLES)


def test_modelled_time() -> None:
    backend = make()
    result = backend.accumulate(SAMPLES[:1])
    assert result.cost_s == 1.5
    assert backend.update(result.denominators).cost_s == 2.0


def test_refuses_foreign_denominators_and_foreign_objects() -> None:
    objects = MemoryObjectPlane()
    backend = make(objects)
    with pytest.raises(InvariantError, match="cache counts"):
        backend.update(Denominators(num_samples=1, num_tokens=1))
    backend.seal(SEAL)
    with pytest.raises(BackendError, match="this policy needs"):
        backend.load_state(SEAL)


def test_loads_no_torch() -> None:
    program = "import sys, flexmarl.training.backends.scripted, flexmarl.training.process_group; "
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
