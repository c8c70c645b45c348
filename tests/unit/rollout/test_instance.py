"""The content of an instance: versions, digests, exactly one answer."""

import math
from collections.abc import Sequence

import pytest

from flexmarl.core.errors import BackendError, ConfigError, InvariantError
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey
from flexmarl.core.messages import (
    CancelRequests,
    Generate,
    Generated,
    GenerationFailed,
    GenerationFailureKind,
    LoadWeights,
    WeightsLoaded,
    WorkerReady,
)
from flexmarl.core.protocols import BackendStep, CompletionStamp
from flexmarl.core.records import FinishReason, GenerationRequest, SamplingParams, VersionSpan
from flexmarl.rollout.instance import InstanceService

pytestmark = pytest.mark.unit

ACTOR = PolicyName("actor")
STOP = 2


class FakeBackend:
    """Answers every request in its next step with `output`; holds what it was told to load."""

    def __init__(self) -> None:
        self.loaded: list[ObjectKey] = []
        self.digest = "digest-0"
        self.open: list[GenerationRequest] = []
        self.output: tuple[Sequence[int], Sequence[float], bool] = ((5, STOP), (-0.5, -0.25), True)
        self.num_new = 0

    def load_weights(self, weights: ObjectKey) -> str:
        self.loaded.append(weights)
        return self.digest

    def num_generated(self) -> dict[RequestId, int]:
        return {request.request_id: self.num_new for request in self.open}

    def add(self, request: GenerationRequest) -> None:
        if len(request.prompt_tokens) > 4:
            raise ConfigError("the prompt is over the context")
        self.open.append(request)

    def cancel(self, request_id: RequestId) -> None:
        self.open = [request for request in self.open if request.request_id != request_id]

    def step(self, describe: CompletionStamp) -> BackendStep:
        tokens, logprobs, is_stopped = self.output
        done, self.open = self.open, []
        answers = [Generated(completion=describe(each, tokens, logprobs, is_stopped=is_stopped)) for each in done]
        return BackendStep(answers=tuple(answers), cost_s=1.5)

    @property
    def num_unfinished(self) -> int:
        return len(self.open)


def load(*, version: int = 0, weights: int = 0, digest: str = "digest-0", policy: str = "actor") -> LoadWeights:
    return LoadWeights(
        policy=PolicyName(policy),
        policy_version=version,
        weights_version=weights,
        object_key=ObjectKey("weights", policy, weights),
        digest=digest,
    )


def generate(
    name: str, *, low: int = 0, high: int = 0, policy: str = "actor", prompt: tuple[int, ...] = (1, 2)
) -> Generate:
    return Generate(
        request=GenerationRequest(
            request_id=RequestId(name),
            purpose=Purpose.TRAIN,
            key=SampleKey(0, 0, 0, AgentName("solver"), 0, 0),
            attempt=0,
            policy=PolicyName(policy),
            min_version=low,
            max_version=high,
            prompt_tokens=prompt,
            sampling=SamplingParams(max_new_tokens=3),
            seed=1,
            stop_token_ids=(STOP,),
        )
    )


def serving(backend: FakeBackend, *, version: int = 0) -> InstanceService:
    service = InstanceService(backend, instance_id=InstanceId("i0"))
    service.handle(load(version=version))
    assert isinstance(messages_of(service)[0], WeightsLoaded)
    return service


def messages_of(service: InstanceService) -> list[object]:
    messages: list[object] = []
    while (step := service.step()) is not None:
        messages.extend(step.messages)
    return messages


def failure_of(service: InstanceService) -> GenerationFailed:
    (failure,) = messages_of(service)
    assert isinstance(failure, GenerationFailed)
    return failure


def test_completion_is_stamped() -> None:
    service = InstanceService(FakeBackend(), instance_id=InstanceId("i0"))
    service.handle(load(version=4, weights=3))
    assert messages_of(service) == [WeightsLoaded(policy=ACTOR, policy_version=4, weights_version=3, digest="digest-0")]
    service.handle(generate("a", low=4, high=4))
    step = service.step()
    assert step is not None
    assert step.cost_s == 1.5
    (answer,) = step.messages
    assert isinstance(answer, Generated)
    completion = answer.completion
    assert completion.request_id == "a"
    assert completion.tokens == (5, STOP)
    assert completion.logprobs == (-0.5, -0.25)
    assert completion.version_spans == (VersionSpan(start=0, end=2, policy_version=4),)
    assert completion.weights_version == 3
    assert completion.instance_id == "i0"
    assert completion.finish_reason is FinishReason.STOP
    assert service.step() is None


def test_held_weights_are_relabelled_without_loading() -> None:
    backend = FakeBackend()
    service = serving(backend)
    service.handle(load(version=7, weights=0))
    assert messages_of(service) == [WeightsLoaded(policy=ACTOR, policy_version=7, weights_version=0, digest="digest-0")]
    assert backend.loaded == [ObjectKey("weights", "actor", 0)]
    service.handle(generate("a", low=7, high=7))
    (answer,) = messages_of(service)
    assert isinstance(answer, Generated)
    assert answer.completion.version_spans[0].policy_version == 7


def test_another_policy_of_equal_version_is_loaded() -> None:
    backend = FakeBackend()
    service = serving(backend)
    service.handle(load(policy="critic"))
    messages_of(service)
    assert backend.loaded == [ObjectKey("weights", "actor", 0), ObjectKey("weights", "critic", 0)]


def test_wrong_digest_ends_the_worker_and_serves_nothing() -> None:
    backend = FakeBackend()
    service = serving(backend)
    backend.digest = "digest-damaged"
    service.handle(load(version=1, weights=1, digest="digest-1"))
    with pytest.raises(BackendError, match=r"digest-damaged.*expected digest-1"):
        service.step()
    service.handle(generate("a", low=0, high=1))
    assert failure_of(service).failure_kind is GenerationFailureKind.WRONG_VERSION


def test_relabelling_checks_the_digest_too() -> None:
    service = serving(FakeBackend())
    service.handle(load(version=1, weights=0, digest="digest-other"))
    with pytest.raises(BackendError, match=r"digest-0.*expected digest-other"):
        service.step()


def test_weights_are_not_changed_under_a_request_that_may_not_go_on_with_them() -> None:
    backend = FakeBackend()
    service = serving(backend)
    service.handle(generate("a", high=1))
    service.handle(generate("b"))
    service.handle(load(version=1, weights=1))
    with pytest.raises(BackendError, match="version 1 while it generates for 1 requests that may not .* the first b"):
        service.step()
    assert backend.loaded == [ObjectKey("weights", "actor", 0)]


def test_weights_of_another_policy_are_not_loaded_under_a_request() -> None:
    service = serving(FakeBackend())
    service.handle(generate("a", high=9))
    service.handle(load(version=1, weights=1, policy="critic"))
    with pytest.raises(BackendError, match="to load critic version 1 while it generates"):
        service.step()


def test_g3_tokens_are_labelled_with_the_version_that_generated_them() -> None:
    backend = FakeBackend()
    backend.output = ((7, 8, 9), (-1.0,) * 3, False)
    service = serving(backend)
    service.handle(generate("a", high=5))
    # The requests of version 1 generate nothing; version 3 is a relabelling of the weights of 2.
    for version, held, num_new in ((1, 1, 0), (2, 2, 1), (3, 2, 2)):
        backend.num_new = num_new
        service.handle(load(version=version, weights=held))
        answers = service.step()
        assert answers is not None
        assert isinstance(answers.messages[0], WeightsLoaded)
    service.handle(generate("b", low=3, high=3))
    (a, b) = messages_of(service)
    assert isinstance(a, Generated)
    assert isinstance(b, Generated)
    assert [(span.start, span.end, span.policy_version) for span in a.completion.version_spans] == [
        (0, 1, 1),
        (1, 2, 2),
        (2, 3, 3),
    ]
    assert a.completion.weights_version == 1  # of the oldest span
    assert b.completion.version_spans == (VersionSpan(start=0, end=3, policy_version=3),)
    assert b.completion.weights_version == 2


def test_tokens_that_an_engine_loses_in_a_swap_are_a_failure() -> None:
    backend = FakeBackend()
    service = serving(backend)
    service.handle(generate("a", high=1))
    backend.num_new = 3  # and its answer has 2
    service.handle(load(version=1, weights=1))
    assert isinstance(service.step().messages[0], WeightsLoaded)  # type: ignore[union-attr]
    assert "2 tokens, but 3 had been generated when weights were loaded" in failure_of(service).message


@pytest.mark.parametrize(("low", "high"), [(0, 4), (6, 9)])
def test_versions_outside_the_bounds_are_refused(low: int, high: int) -> None:
    backend = FakeBackend()
    service = serving(backend, version=5)
    service.handle(generate("a", low=low, high=high))
    failure = failure_of(service)
    assert failure.request_id == "a"
    assert failure.failure_kind is GenerationFailureKind.WRONG_VERSION
    assert "version 5" in failure.message
    assert f"[{low}, {high}]" in failure.message
    assert backend.num_unfinished == 0


@pytest.mark.parametrize(("low", "high"), [(5, 9), (0, 5), (5, 5)])
def test_versions_inside_the_bounds_are_served(low: int, high: int) -> None:
    service = serving(FakeBackend(), version=5)
    service.handle(generate("a", low=low, high=high))
    assert isinstance(messages_of(service)[0], Generated)


def test_another_policy_is_never_answered() -> None:
    service = serving(FakeBackend())
    service.handle(generate("a", policy="critic"))
    assert failure_of(service).failure_kind is GenerationFailureKind.WRONG_VERSION


def test_without_weights_nothing_is_served() -> None:
    service = InstanceService(FakeBackend(), instance_id=InstanceId("i0"))
    service.handle(generate("a"))
    failure = failure_of(service)
    assert failure.failure_kind is GenerationFailureKind.WRONG_VERSION
    assert "holds no weights" in failure.message


def test_what_the_engine_refuses_is_answered_as_refused() -> None:
    service = serving(FakeBackend())
    service.handle(generate("a", prompt=(1, 2, 3, 4, 5)))
    failure = failure_of(service)
    assert failure.failure_kind is GenerationFailureKind.REFUSED
    assert failure.message == "the prompt is over the context"


def test_cancelled_requests_are_not_answered() -> None:
    backend = FakeBackend()
    service = serving(backend)
    service.handle(generate("a"))
    service.handle(generate("b"))
    service.handle(CancelRequests(request_ids=(RequestId("a"), RequestId("unknown"))))
    (answer,) = messages_of(service)
    assert isinstance(answer, Generated)
    assert answer.completion.request_id == "b"


def test_a_request_that_comes_twice_is_our_bug() -> None:
    service = serving(FakeBackend())
    service.handle(generate("a"))
    service.handle(generate("a"))
    with pytest.raises(InvariantError, match="request a came twice"):
        service.step()


def test_an_answer_nobody_asked_for_is_our_bug() -> None:
    backend = FakeBackend()
    service = serving(backend)
    service.handle(generate("a"))
    service.handle(CancelRequests(request_ids=(RequestId("a"),)))
    service.handle(generate("b"))
    backend.cancel = lambda request_id: None  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="answered a, which is not open"):
        messages_of(service)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "is_stopped", "problem"),
    [
        ((5, STOP), (-0.5,), True, "2 tokens but 1 log-probs"),
        ((), (), False, "0 tokens"),
        ((5, 5, 5, 5), (-1.0,) * 4, False, "4 tokens, expected 1 to max_new_tokens=3"),
        ((5, STOP), (-0.5, math.nan), True, "token 1 has log-prob nan"),
        ((5, STOP), (-math.inf, -0.5), True, "token 0 has log-prob -inf"),
        ((5, STOP), (0.01, -0.5), True, "token 0 has log-prob 0.01"),
        ((STOP, 5), (-0.5, -0.5), True, "stopped with token 5"),
    ],
)
def test_bad_output_is_a_failure_of_its_request(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], is_stopped: bool, problem: str
) -> None:
    backend = FakeBackend()
    backend.output = (tokens, logprobs, is_stopped)
    service = serving(backend)
    service.handle(generate("a"))
    failure = failure_of(service)
    assert failure.failure_kind is GenerationFailureKind.ENGINE
    assert problem in failure.message


def test_rounding_above_zero_is_no_failure() -> None:
    backend = FakeBackend()
    backend.output = ((5, STOP), (1e-6, 0.0), True)
    service = serving(backend)
    service.handle(generate("a"))
    assert isinstance(messages_of(service)[0], Generated)


def test_closed_service_answers_nothing() -> None:
    service = serving(FakeBackend())
    service.handle(generate("a"))
    service.close()
    assert service.step() is None


def test_a_foreign_message_is_our_bug() -> None:
    service = InstanceService(FakeBackend(), instance_id=InstanceId("i0"))
    with pytest.raises(InvariantError, match="WorkerReady"):
        service.handle(WorkerReady(pid=1))
