"""The scripted backend: what its integers depend on."""

import subprocess
import sys
from dataclasses import replace

import pytest

from flexmarl.config import AlgorithmConfig, ScriptedTrainingConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.records import Denominators, Sample, TokenColumn
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


def make_with(**algorithm: object) -> ScriptedBackend:
    backend = ScriptedBackend(
        policy=PolicyName("actor"),
        seed=0,
        objects=MemoryObjectPlane(),
        config=ScriptedTrainingConfig(num_parameters=6, token_s=0.5, update_s=2.0),
        algorithm=AlgorithmConfig.model_validate(algorithm),
    )
    backend.load_model()
    return backend


def scored(sample: Sample, **columns: float) -> Sample:
    """The sample with columns of one repeated number."""
    count = len(sample.turn.response_tokens)
    return replace(sample, token_columns={TokenColumn(name): (value,) * count for name, value in columns.items()})


def test_every_column_and_the_terms_it_is_used_in_matter() -> None:
    sample = make_sample(0, response=[3, 4, 5], advantage=0.5)
    several = {"num_epochs": 2}
    old = scored(sample, old_logprobs=-1.0)
    digests = [
        trained(make_with(), [sample]),
        trained(make_with(**several), [old]),
        trained(make_with(**several), [scored(sample, old_logprobs=-1.5)]),
        trained(make_with(**several, correction="decoupled_ppo"), [scored(sample, old_logprobs=-1.5)]),
        trained(make_with(kl_coef=0.1), [scored(sample, reference_logprobs=-1.0)]),
        trained(make_with(kl_coef=0.1), [scored(sample, reference_logprobs=-1.1)]),
        trained(make_with(kl_coef=0.2), [scored(sample, reference_logprobs=-1.0)]),
        trained(make_with(correction="truncated_is"), [sample]),
        trained(
            make_with(correction="truncated_is"),
            [make_sample(0, response=[3, 4, 5], advantage=0.5, logprobs=[-2.0] * 3)],
        ),
    ]
    assert len(set(digests)) == len(digests)
    swapped = replace(sample, token_columns={TokenColumn.OLD_LOGPROBS: (-1.0, -1.0, -1.5)})
    turned = replace(sample, token_columns={TokenColumn.OLD_LOGPROBS: (-1.5, -1.0, -1.0)})
    assert trained(make_with(**several), [swapped]) != trained(make_with(**several), [turned])


def test_scores_follow_from_weights_or_from_the_reference_alone() -> None:
    backend = make_with()
    turns = [sample.turn for sample in SAMPLES]
    old, reference = (backend.score(column, turns).values for column in TokenColumn)
    assert [len(each.values) for each in old] == [1, 2, 3, 4]
    assert all(-3.0 <= value < 0.0 for each in (*old, *reference) for value in each.values)
    trained(backend, SAMPLES)
    assert backend.score(TokenColumn.REFERENCE_LOGPROBS, turns).values == reference
    assert backend.score(TokenColumn.OLD_LOGPROBS, turns).values != old
    # 3 tokens of half a second, a third of it.
    assert backend.score(TokenColumn.OLD_LOGPROBS, turns[:1]).cost_s == pytest.approx(0.5)


def test_a_sample_without_its_column_is_refused() -> None:
    with pytest.raises(InvariantError, match="reference_logprobs was not scored"):
        make_with(kl_coef=0.1).accumulate(SAMPLES)


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
