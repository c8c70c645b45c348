"""The content of an instance: an inference engine with the version of its weights. Read `InstanceService` first.

Invariants:
    * A request is answered exactly once, unless it is cancelled, and only by weights of its own policy whose
      policy_version lies in its [min_version, max_version].
    * A version is served only when the digest of the parameters really held is the expected one.
    * Weights never change while a request is unfinished.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from flexmarl.core.errors import BackendError, ConfigError, InvariantError
from flexmarl.core.ids import InstanceId, RequestId
from flexmarl.core.messages import (
    CancelRequests,
    Generate,
    Generated,
    GenerationFailed,
    GenerationFailureKind,
    LoadWeights,
    WeightsLoaded,
)
from flexmarl.core.protocols import InferenceBackend, ServiceStep, WorkerContext
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, VersionSpan

logger = logging.getLogger(__name__)

LOGPROB_TOLERANCE = 1e-4
"""A log-prob may exceed 0 by so much, for rounding."""


class InstanceService:
    """A Service around an InferenceBackend."""

    def __init__(self, backend: InferenceBackend, *, instance_id: InstanceId) -> None:
        """Serve with `backend`, which holds no version yet."""
        self._backend = backend
        self._instance_id = instance_id
        self._commands: deque[object] = deque()
        self._held: LoadWeights | None = None
        self._unanswered: dict[RequestId, GenerationRequest] = {}

    def handle(self, message: object) -> None:
        """Queue a command; `step` carries it out."""
        if not isinstance(message, LoadWeights | Generate | CancelRequests):
            raise InvariantError(f"instance {self._instance_id} got a {type(message).__name__}")
        self._commands.append(message)

    def step(self) -> ServiceStep | None:
        """Carry out the queued commands, else advance the engine.

        Raises:
            BackendError: the engine failed as a whole, or weights cannot be loaded; the instance must end.
        """
        if self._commands:
            messages: list[object] = []
            while self._commands:
                messages.extend(self._carry_out(self._commands.popleft()))
            if messages:
                return ServiceStep(messages=tuple(messages))
        if not self._unanswered:
            return None
        step = self._backend.step(self._completion)
        return ServiceStep(messages=tuple(self._checked(answer) for answer in step.answers), cost_s=step.cost_s)

    def close(self) -> None:
        """Forget everything: answers to open requests are not sent any more."""
        self._commands.clear()
        self._unanswered.clear()

    def _carry_out(self, command: object) -> list[object]:
        """Carry out one command and return what can be answered at once."""
        if isinstance(command, LoadWeights):
            return [self._load(command)]
        if isinstance(command, Generate):
            refusal = self._accept(command.request)
            return [] if refusal is None else [refusal]
        if isinstance(command, CancelRequests):
            for request_id in command.request_ids:
                if self._unanswered.pop(request_id, None) is not None:
                    self._backend.cancel(request_id)
            return []
        raise InvariantError(f"instance {self._instance_id} cannot carry out a {type(command).__name__}")

    def _load(self, command: LoadWeights) -> WeightsLoaded:
        if self._unanswered:
            raise BackendError(
                f"instance {self._instance_id} was told to load {command.object_key} while it generates for "
                f"{len(self._unanswered)} requests, the first {next(iter(self._unanswered))}: drain it first"
            )
        held = self._held
        if held is not None and (held.policy, held.weights_version) == (command.policy, command.weights_version):
            digest = held.digest
        else:
            # Until the new digest is verified, nothing may be served.
            self._held = None
            digest = self._backend.load_weights(command.object_key)
        if digest != command.digest:
            self._held = None
            raise BackendError(
                f"instance {self._instance_id} holds weights with digest {digest} for {command.object_key}, expected "
                f"{command.digest}: the weights are damaged, or belong to another version"
            )
        self._held = command
        logger.info("%s serves %s version %d", self._instance_id, command.policy, command.policy_version)
        return WeightsLoaded(
            policy=command.policy,
            policy_version=command.policy_version,
            weights_version=command.weights_version,
            digest=digest,
        )

    def _accept(self, request: GenerationRequest) -> GenerationFailed | None:
        """Give a request to the engine, or return why not."""
        if request.request_id in self._unanswered:
            raise InvariantError(f"request {request.request_id} came twice to instance {self._instance_id}")
        problem = self._version_problem(request)
        if problem is not None:
            return _failed(request, GenerationFailureKind.WRONG_VERSION, f"{self._instance_id} {problem}")
        try:
            self._backend.add(request)
        except ConfigError as error:
            return _failed(request, GenerationFailureKind.REFUSED, str(error))
        self._unanswered[request.request_id] = request
        return None

    def _version_problem(self, request: GenerationRequest) -> str | None:
        wanted = f"the request wants {request.policy} in [{request.min_version}, {request.max_version}]"
        if self._held is None:
            return f"holds no weights, {wanted}"
        is_wanted = request.min_version <= self._held.policy_version <= request.max_version
        if request.policy != self._held.policy or not is_wanted:
            return f"serves {self._held.policy} version {self._held.policy_version}, {wanted}"
        return None

    def _completion(
        self, request: GenerationRequest, tokens: Sequence[int], logprobs: Sequence[float], *, is_stopped: bool
    ) -> Completion:
        """Stamp what the engine generated; a CompletionStamp."""
        if self._held is None:
            raise InvariantError(f"request {request.request_id} was generated by weights without a version")
        span = VersionSpan(start=0, end=len(tokens), policy_version=self._held.policy_version)
        return Completion(
            request_id=request.request_id,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            version_spans=(span,),
            weights_version=self._held.weights_version,
            instance_id=self._instance_id,
        )

    def _checked(self, answer: Generated | GenerationFailed) -> Generated | GenerationFailed:
        """Return the answer, or a failure in its place when its content cannot be right; the request is answered."""
        request_id = answer.completion.request_id if isinstance(answer, Generated) else answer.request_id
        request = self._unanswered.pop(request_id, None)
        if request is None:
            raise InvariantError(f"the engine of {self._instance_id} answered {request_id}, which is not open")
        if isinstance(answer, Generated) and (problem := _content_problem(request, answer.completion)) is not None:
            return _failed(request, GenerationFailureKind.ENGINE, f"{self._instance_id}: {problem}")
        return answer


def _failed(request: GenerationRequest, kind: GenerationFailureKind, message: str) -> GenerationFailed:
    return GenerationFailed(request_id=request.request_id, failure_kind=kind, message=message)


def _content_problem(request: GenerationRequest, completion: Completion) -> str | None:
    """Return what is wrong with the content of a completion, or None."""
    tokens, logprobs, sampling = completion.tokens, completion.logprobs, request.sampling
    if len(tokens) != len(logprobs):
        return f"{len(tokens)} tokens but {len(logprobs)} log-probs"
    if not 1 <= len(tokens) <= sampling.max_new_tokens:
        return f"{len(tokens)} tokens, expected 1 to max_new_tokens={sampling.max_new_tokens}"
    for place, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= LOGPROB_TOLERANCE):
            return f"token {place} has log-prob {logprob}, expected a finite number of at most 0"
    if completion.finish_reason is FinishReason.STOP and tokens[-1] not in request.stop_token_ids:
        return f"it ends as stopped with token {tokens[-1]}, which is not one of {list(request.stop_token_ids)}"
    return None


def build_instance(context: WorkerContext, options: Mapping[str, Any]) -> InstanceService:
    """Build the service of an instance worker: the `factory` of its WorkerSpec.

    Options are those of `rollout.backends.factory.build_backend`.
    """
    # Imported here: the engines bring torch, which readers of this module need not load.
    from flexmarl.rollout.backends.factory import build_backend

    return InstanceService(build_backend(context.objects, options), instance_id=InstanceId(context.worker_id))
