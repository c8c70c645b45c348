"""The service of a process group: commands, their facts, and what it refuses. The backend is the scripted one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from flexmarl.config import AlgorithmConfig, ScriptedTrainingConfig, TorchTrainingConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import ObjectKey, PolicyName, WorkerId
from flexmarl.core.messages import (
    AccumulateGradient,
    Activate,
    Activated,
    ApplyUpdate,
    CacheSealed,
    GradientAccumulated,
    PublishState,
    Score,
    Scored,
    SealCache,
    StatePublished,
    UpdateApplied,
    WorkerReady,
)
from flexmarl.core.protocols import WorkerContext
from flexmarl.core.records import Denominators, Sample, TokenColumn
from flexmarl.testing.training import MemoryObjectPlane, StillClock, make_sample
from flexmarl.training.backends.scripted import ScriptedBackend
from flexmarl.training.process_group import ProcessGroupService, build_process_group

pytestmark = pytest.mark.unit

ACTOR = PolicyName("actor")
SAMPLES = tuple(make_sample(number, response=[3] * (number + 1), advantage=number - 1.5) for number in range(4))
COUNTED = Denominators(num_samples=4, num_tokens=10)
ACTIVATE = Activate(policy=ACTOR, policy_version=0, state=None, seal=None)

Start = Callable[[], ProcessGroupService]


@pytest.fixture
def objects() -> MemoryObjectPlane:
    return MemoryObjectPlane()


@pytest.fixture
def start(objects: MemoryObjectPlane) -> Start:
    context = WorkerContext(worker_id=WorkerId("w"), objects=objects, clock=StillClock(), send=lambda fact: None)
    options = {
        "policy": "actor",
        "model_folder": "unused",
        "reference_folder": "",
        "backend": ScriptedTrainingConfig(token_s=0.5, update_s=7.0, num_parameters=5).model_dump(),
        "algorithm": AlgorithmConfig().model_dump(),
        "optimizer": {},
        "seed": 3,
    }
    return lambda: build_process_group(context, options)


def ask(service: ProcessGroupService, command: object) -> object:
    service.handle(command)
    step = service.step()
    assert step is not None
    assert service.step() is None
    (fact,) = step.messages
    return fact


def accumulate(*samples: Sample, name: str = "m0") -> AccumulateGradient:
    return AccumulateGradient(micro_batch_id=name, policy_version=0, samples=samples)


def update(version: int = 1, denominators: Denominators = COUNTED) -> ApplyUpdate:
    return ApplyUpdate(
        policy_version=version,
        denominators=denominators,
        state_key=ObjectKey("state", "actor", version),
        weights_key=ObjectKey("weights", "actor", version),
    )


def test_every_command_is_answered_by_its_fact(start: Start, objects: MemoryObjectPlane) -> None:
    service = start()
    assert service.step() is None
    activated = ask(service, ACTIVATE)
    assert isinstance(activated, Activated)
    assert (activated.policy, activated.num_parameters, activated.state_bytes) == (ACTOR, 5, 192)
    keys = (ObjectKey("state", "actor", 0), ObjectKey("weights", "actor", 0))
    published = ask(service, PublishState(state_key=keys[0], weights_key=keys[1]))
    assert published == StatePublished(policy=ACTOR, weights_digest=activated.weights_digest)
    assert objects.packed(keys[1]).digest() == activated.weights_digest
    done = ask(service, accumulate(*SAMPLES))
    assert isinstance(done, GradientAccumulated)
    # Four prompts of two tokens and ten response tokens, half a second each.
    assert (done.micro_batch_id, done.denominators, done.duration_s) == ("m0", COUNTED, 9.0)
    seal_key = ObjectKey("seal", "actor", 0)
    sealed = ask(service, SealCache(object_key=seal_key))
    assert sealed == CacheSealed(policy=ACTOR, object_key=seal_key, denominators=COUNTED)
    applied = ask(service, update())
    assert isinstance(applied, UpdateApplied)
    assert (applied.policy_version, applied.duration_s) == (1, 7.0)
    assert applied.weights_digest == objects.packed(ObjectKey("weights", "actor", 1)).digest()
    assert applied.weights_digest != activated.weights_digest


def test_one_command_per_step_and_modelled_time_before_its_fact(start: Start) -> None:
    service = start()
    for command in (ACTIVATE, accumulate(SAMPLES[0])):
        service.handle(command)
    first, second = service.step(), service.step()
    assert first is not None
    assert second is not None
    assert [type(step.messages[0]) for step in (first, second)] == [Activated, GradientAccumulated]
    assert (first.cost_s, second.cost_s) == (0.0, 1.5)


def test_a_repeated_micro_batch_is_answered_and_not_added(start: Start) -> None:
    once, repeated = start(), start()
    digests = []
    for service, times in ((once, 1), (repeated, 3)):
        ask(service, ACTIVATE)
        facts = [ask(service, accumulate(*SAMPLES)) for _ in range(times)]
        assert all(fact == facts[0] for fact in facts)
        applied = ask(service, update())
        assert isinstance(applied, UpdateApplied)
        digests.append(applied.weights_digest)
    assert digests[0] == digests[1]


def test_an_update_with_other_denominators_is_refused(start: Start) -> None:
    service = start()
    ask(service, ACTIVATE)
    ask(service, accumulate(*SAMPLES))
    with pytest.raises(InvariantError, match=r"num_tokens=10.*num_tokens=9"):
        ask(service, update(denominators=Denominators(num_samples=4, num_tokens=9)))


def test_a_successor_goes_on_from_the_seal(start: Start) -> None:
    whole = start()
    ask(whole, ACTIVATE)
    ask(whole, PublishState(state_key=ObjectKey("state", "actor", 0), weights_key=ObjectKey("weights", "actor", 0)))
    ask(whole, accumulate(*SAMPLES[:2]))
    seal_key = ObjectKey("seal", "actor", 0)
    ask(whole, SealCache(object_key=seal_key))
    ask(whole, accumulate(*SAMPLES[2:], name="m1"))
    heir = start()
    ask(heir, Activate(policy=ACTOR, policy_version=0, state=ObjectKey("state", "actor", 0), seal=seal_key))
    ask(heir, accumulate(*SAMPLES[2:], name="m2"))
    assert ask(whole, update()) == ask(heir, update())


def score(column: TokenColumn, *samples: Sample) -> Score:
    return Score(score_id="q0", column=column, turns=tuple(sample.turn for sample in samples))


def test_scoring_fills_a_column_and_changes_nothing(start: Start) -> None:
    asked, untouched = start(), start()
    digests = []
    for service in (asked, untouched):
        ask(service, ACTIVATE)
        ask(service, accumulate(*SAMPLES[:2]))
        if service is asked:
            facts = [ask(service, score(column, *SAMPLES)) for column in TokenColumn]
            # The same turns may be scored again, also while their samples are in the cache.
            assert facts == [ask(service, score(column, *SAMPLES)) for column in TokenColumn]
        ask(service, accumulate(*SAMPLES[2:], name="m1"))
        applied = ask(service, update())
        assert isinstance(applied, UpdateApplied)
        digests.append(applied.weights_digest)
    assert digests[0] == digests[1]
    for column, fact in zip(TokenColumn, facts, strict=True):
        assert isinstance(fact, Scored)
        assert (fact.policy, fact.score_id, fact.column) == (ACTOR, "q0", column)
        assert [(each.key, len(each.values)) for each in fact.values] == [
            (sample.turn.key, len(sample.turn.response_tokens)) for sample in SAMPLES
        ]
        # A third of the modelled time of training: 18 tokens of half a second.
        assert fact.duration_s == pytest.approx(3.0)


def test_updates_of_one_step_use_its_samples_again(start: Start, objects: MemoryObjectPlane) -> None:
    service = start()
    ask(service, ACTIVATE)
    half = Denominators(num_samples=2, num_tokens=3)
    unpublished = ApplyUpdate(policy_version=1, denominators=half, state_key=None, weights_key=None)
    digests = set()
    for number in range(3):
        done = ask(service, accumulate(*SAMPLES[:2], name=f"m{number}"))
        assert isinstance(done, GradientAccumulated)
        applied = ask(service, unpublished)
        assert isinstance(applied, UpdateApplied)
        assert (applied.policy_version, applied.weights_digest) == (1, "")
        assert (applied.metrics["num_updates_sum"], applied.metrics["grad_norm_sum"] > 0) == (1.0, True)
        digests.add(service._backend.weights_digest())
    assert objects.info(ObjectKey("state", "actor", 1)) is None
    ask(service, accumulate(*SAMPLES, name="m3"))
    last = ask(service, update())
    assert isinstance(last, UpdateApplied)
    assert last.weights_digest == objects.packed(ObjectKey("weights", "actor", 1)).digest()
    assert len(digests | {last.weights_digest}) == 4


def test_metrics_of_the_samples_are_added_to_those_of_the_backend(start: Start) -> None:
    service = start()
    ask(service, ACTIVATE)
    samples = tuple(make_sample(n, agent="ab"[n % 2], policy_version=n, reward=0.5) for n in range(3))
    done = ask(service, AccumulateGradient(micro_batch_id="m0", policy_version=3, samples=samples))
    assert isinstance(done, GradientAccumulated)
    # a: versions 0 and 2, b: version 1.
    assert (done.metrics["agent.a.staleness_sum"], done.metrics["agent.a.staleness_max"]) == (4.0, 3.0)
    assert (done.metrics["agent.b.staleness_sum"], done.metrics["agent.b.reward_sum"]) == (2.0, 0.5)
    assert done.metrics["computed_tokens_sum"] == 12.0


def test_activation_forgets_the_cache(start: Start) -> None:
    service = start()
    ask(service, ACTIVATE)
    ask(service, accumulate(*SAMPLES))
    ask(service, ACTIVATE)
    fact = ask(service, SealCache(object_key=ObjectKey("seal", "actor", 0)))
    assert isinstance(fact, CacheSealed)
    assert fact.denominators == Denominators()
    ask(service, accumulate(*SAMPLES))


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ([accumulate(*SAMPLES)], "AccumulateGradient before Activate"),
        ([Activate(policy=PolicyName("other"), policy_version=0, state=None, seal=None)], "asked to activate other"),
        ([ACTIVATE, WorkerReady(pid=1)], "does not know WorkerReady"),
        ([ACTIVATE, accumulate(make_sample(policy="other"))], "belongs to other"),
        ([ACTIVATE, accumulate(SAMPLES[0], SAMPLES[0])], "has the keys"),
        ([ACTIVATE, accumulate()], "has the keys"),
        ([ACTIVATE, accumulate(SAMPLES[0]), accumulate(SAMPLES[1])], "came again with other samples"),
        ([ACTIVATE, accumulate(SAMPLES[0]), accumulate(SAMPLES[0], name="m1")], "repeats s0/q0/t0/solver/b0/n0"),
        ([ACTIVATE, update(denominators=Denominators())], "needs trained samples"),
        ([score(TokenColumn.OLD_LOGPROBS)], "Score before Activate"),
        ([ACTIVATE, score(TokenColumn.OLD_LOGPROBS, make_sample(policy="other"))], "belongs to other"),
        ([ACTIVATE, accumulate(make_sample(policy_version=1))], "by version 1, but version 0 is trained"),
        ([ACTIVATE, replace(update(), weights_key=None)], "publishes both or none"),
    ],
)
def test_refuses_what_does_not_fit(start: Start, commands: list[object], message: str) -> None:
    service = start()
    for command in commands[:-1]:
        ask(service, command)
    with pytest.raises(InvariantError, match=message):
        ask(service, commands[-1])


def test_close_forgets_queued_commands(start: Start) -> None:
    service = start()
    service.handle(ACTIVATE)
    service.close()
    assert service.step() is None


def test_the_kind_of_backend_chooses_the_backend(start: Start, objects: MemoryObjectPlane) -> None:
    from flexmarl.training.backends.torch import TorchBackend

    context = WorkerContext(worker_id=WorkerId("w"), objects=objects, clock=StillClock(), send=lambda fact: None)
    options = {
        "policy": "actor",
        "model_folder": "/nowhere",
        "reference_folder": "/elsewhere",
        "backend": TorchTrainingConfig().model_dump(),
        "algorithm": {},
        "optimizer": {},
        "seed": 3,
    }
    assert isinstance(build_process_group(context, options)._backend, TorchBackend)
    assert isinstance(start()._backend, ScriptedBackend)
