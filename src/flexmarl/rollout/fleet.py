"""What the rollout manager keeps of its instances and requests."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from flexmarl.core.ids import InstanceId, ObjectKey, PolicyName, RequestId, WorkerId
from flexmarl.core.messages import GenerationFailed
from flexmarl.core.protocols import Timer, WorkerHandle
from flexmarl.core.records import Completion, GenerationRequest
from flexmarl.telemetry import PolicyQueue

Answer = Completion | GenerationFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """What every instance of a policy shall serve."""

    policy: PolicyName
    policy_version: int
    weights_version: int
    object_key: ObjectKey
    digest: str


class InstanceState(Enum):
    """Life of an instance."""

    STARTING = "starting"
    IDLE = "idle"
    """Ready, but holds no version that is published."""
    DRAINING = "draining"
    """Finishes requests that may not go on with the published version, takes no new ones, then loads it."""
    LOADING = "loading"
    SERVING = "serving"
    WAITING = "waiting"
    """Dead; a restart is due."""
    GIVEN_UP = "given_up"


@dataclass(slots=True, kw_only=True)
class Request:
    """A submitted request that has no answer yet."""

    request: GenerationRequest
    on_answer: Callable[[Answer], None]
    num_tries: int = 0
    timer: Timer | None = None


@dataclass(slots=True, kw_only=True)
class Instance:
    """An instance over all its incarnations."""

    instance_id: InstanceId
    policy: PolicyName
    state: InstanceState = InstanceState.STARTING
    handle: WorkerHandle | None = None
    incarnation: int = 0
    num_deaths: int = 0
    """Since it answered a request: a run of days shall not end because of a death now and then."""
    policy_version: int | None = None
    requests: dict[RequestId, Request] = field(default_factory=dict)
    num_outstanding_tokens: int = 0
    """Sum of the token limits of `requests`."""
    load_timer: Timer | None = None
    kill_reason: str | None = None
    """Why the manager has ended this incarnation, if it has."""

    @property
    def worker_id(self) -> WorkerId:
        """Its present incarnation."""
        return WorkerId(f"{self.instance_id}.{self.incarnation}")

    def hold(self, request: Request) -> None:
        """Count a request that was sent to it."""
        self.requests[request.request.request_id] = request
        self.num_outstanding_tokens += request.request.sampling.max_new_tokens

    def forget(self, request_id: RequestId) -> Request | None:
        """Stop counting a request and its deadline; None when it is not there."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.num_outstanding_tokens -= request.request.sampling.max_new_tokens
            if request.timer is not None:
                request.timer.cancel()
                request.timer = None
        return request


def policy_queues(
    published: Mapping[PolicyName, PublishedWeights],
    waiting: Iterable[Request],
    instances: Iterable[Instance],
    *,
    num_slots: int,
) -> dict[str, PolicyQueue]:
    """Return the requests of each policy; an instance runs at most `num_slots` of those it holds."""
    num_waiting = Counter(each.request.policy for each in waiting)
    num_running: Counter[PolicyName] = Counter()
    for instance in instances:
        running = min(len(instance.requests), num_slots)
        num_running[instance.policy] += running
        num_waiting[instance.policy] += len(instance.requests) - running
    return {
        policy: PolicyQueue(
            num_waiting=num_waiting[policy], num_running=num_running[policy], weights_version=weights.weights_version
        )
        for policy, weights in published.items()
    }
