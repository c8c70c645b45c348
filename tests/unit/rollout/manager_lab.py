"""A rollout manager among fake instances that a test answers, fails and kills by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flexmarl.config import RolloutConfig
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey, WorkerId
from flexmarl.core.messages import (
    CancelRequests,
    Generate,
    Generated,
    GenerationFailed,
    LoadWeights,
    WeightsLoaded,
    WorkerExited,
    WorkerReady,
)
from flexmarl.core.protocols import ServiceKind, WorkerSpec
from flexmarl.core.records import Completion, FinishReason, GenerationRequest, SamplingParams, VersionSpan
from flexmarl.rollout.manager import Answer, PublishedWeights, RolloutManager
from flexmarl.testing.events import RecordingSink

RED, BLUE = PolicyName("red"), PolicyName("blue")


@dataclass
class FakeTimer:
    name: str
    delay_s: float
    handler: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeInbox:
    """Handles facts at once, in order; timers fire when told."""

    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []
        self.errors: list[BaseException] = []

    def post(self, source: str, fact: object, handler: Callable[[], None]) -> None:
        handler()

    def set_timer(self, name: str, delay_s: float, handler: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(name, delay_s, handler))
        return self.timers[-1]

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    def due(self, prefix: str = "") -> list[FakeTimer]:
        return [timer for timer in self.timers if timer.name.startswith(prefix) and not timer.is_cancelled]

    def fire(self, prefix: str) -> None:
        for timer in self.due(prefix):
            timer.is_cancelled = True
            timer.handler()


@dataclass
class FakeInstance:
    """A started worker; what it was sent lands in `sent`."""

    spec: WorkerSpec
    on_fact: Callable[[WorkerId, object], None]
    sent: list[Any] = field(default_factory=list)
    is_alive: bool = True
    open: dict[str, GenerationRequest] = field(default_factory=dict)
    loads: list[tuple[LoadWeights, list[GenerationRequest]]] = field(default_factory=list)
    """Each with the requests that were open when it came."""

    @property
    def pid(self) -> int:
        return 100

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id

    def send(self, message: object) -> None:
        if not self.is_alive:
            return
        self.sent.append(message)
        match message:
            case Generate():
                self.open[message.request.request_id] = message.request
            case CancelRequests():
                for request_id in message.request_ids:
                    del self.open[request_id]
            case LoadWeights():
                self.loads.append((message, list(self.open.values())))

    def say(self, fact: object) -> None:
        if isinstance(fact, Generated):
            self.open.pop(fact.completion.request_id, None)
        elif isinstance(fact, GenerationFailed):
            self.open.pop(fact.request_id, None)
        self.on_fact(self.worker_id, fact)

    def kill(self) -> None:
        if self.is_alive:
            self.die("signal SIGKILL")

    def stop(self) -> None:
        self.kill()

    def die(self, reason: str = "exit code 1") -> None:
        self.is_alive = False
        self.say(WorkerExited(reason=reason, is_expected=False))

    def load(self, *, digest: str | None = None) -> None:
        """Do as the newest LoadWeights says."""
        command = [message for message in self.sent if isinstance(message, LoadWeights)][-1]
        self.say(
            WeightsLoaded(
                policy=command.policy,
                policy_version=command.policy_version,
                weights_version=command.weights_version,
                digest=digest or command.digest,
            )
        )

    def requests(self) -> list[GenerationRequest]:
        return [message.request for message in self.sent if isinstance(message, Generate)]


class FakeRuntime:
    def __init__(self) -> None:
        self.instances: list[FakeInstance] = []

    def start(self, spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> FakeInstance:
        assert all(each.worker_id != spec.worker_id for each in self.instances)
        self.instances.append(FakeInstance(spec, on_fact))
        return self.instances[-1]


def maker(worker_id: WorkerId) -> WorkerSpec:
    return WorkerSpec(worker_id=worker_id, kind=ServiceKind.INSTANCE, factory="x:y")


def weights(policy: PolicyName, version: int, *, weights_version: int | None = None) -> PublishedWeights:
    held = version if weights_version is None else weights_version
    return PublishedWeights(
        policy=policy,
        policy_version=version,
        weights_version=held,
        object_key=ObjectKey("weights", policy, held),
        digest=f"{policy}@{held}",
    )


def request(
    name: str, policy: PolicyName = RED, *, version: int = 0, slack: int = 0, tokens: int = 10
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, 0, 0, AgentName("a"), 0, 0),
        attempt=0,
        policy=policy,
        min_version=version,
        max_version=version + slack,
        prompt_tokens=(1,),
        sampling=SamplingParams(max_new_tokens=tokens),
        seed=hash(name) % 1000,
    )


def completion(name: str, instance: FakeInstance) -> Generated:
    return Generated(
        completion=Completion(
            request_id=RequestId(name),
            tokens=(1,),
            logprobs=(-1.0,),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(start=0, end=1, policy_version=0),),
            weights_version=0,
            instance_id=InstanceId(instance.worker_id),
        )
    )


class Lab:
    """A manager of `num_red` and `num_blue` instances."""

    def __init__(self, num_red: int = 2, num_blue: int = 0, **settings: Any) -> None:
        self.runtime = FakeRuntime()
        self.inbox = FakeInbox()
        self.events = RecordingSink()
        specs = {policy: (count, maker) for policy, count in ((RED, num_red), (BLUE, num_blue)) if count}
        runtime: Any = self.runtime
        inbox: Any = self.inbox
        self.manager = RolloutManager(
            RolloutConfig(**settings), specs, runtime=runtime, inbox=inbox, events=self.events
        )
        self.policies = list(specs)
        self.requests: dict[str, GenerationRequest] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.num_published = 0
        self.manager.start()

    def publish(self, version: int = 0, *, may_have_requests: bool = False) -> None:
        published = {policy: weights(policy, version) for policy in self.policies}
        self.manager.publish(published, self._published, may_have_requests=may_have_requests)

    def _published(self) -> None:
        self.num_published += 1

    def serve(self, version: int = 0) -> None:
        """Bring every instance to a published version."""
        for instance in self.alive():
            instance.say(WorkerReady(pid=1))
        self.publish(version)
        for instance in self.alive():
            instance.load()

    def alive(self) -> list[FakeInstance]:
        return [instance for instance in self.runtime.instances if instance.is_alive]

    def submit(self, name: str, policy: PolicyName = RED, **options: int) -> None:
        self.requests[name] = request(name, policy, **options)
        self.answers[name] = []
        self.manager.submit(self.requests[name], self.answers[name].append)

    def where(self, name: str) -> list[str]:
        """The workers that were given a request, in order."""
        return [
            each.worker_id for each in self.runtime.instances for sent in each.requests() if sent.request_id == name
        ]
