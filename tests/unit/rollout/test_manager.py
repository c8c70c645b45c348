"""The rollout manager among fake instances that a test answers, fails and kills by hand; and a state machine of it.

Longer than most: cases and state machine share the fakes above them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.config import RolloutConfig
from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.events import RequestDispatched, WorkerRestarted
from flexmarl.core.ids import AgentName, InstanceId, ObjectKey, PolicyName, Purpose, RequestId, SampleKey, WorkerId
from flexmarl.core.messages import (
    CancelRequests,
    Generate,
    Generated,
    GenerationFailed,
    GenerationFailureKind,
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


# --- fakes ------------------------------------------------------------------------------------------------------------


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

    @property
    def pid(self) -> int:
        return 100

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id

    def send(self, message: object) -> None:
        if self.is_alive:
            self.sent.append(message)

    def say(self, fact: object) -> None:
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


def request(name: str, policy: PolicyName = RED, *, version: int = 0, tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        purpose=Purpose.TRAIN,
        key=SampleKey(0, 0, 0, AgentName("a"), 0, 0),
        attempt=0,
        policy=policy,
        min_version=version,
        max_version=version,
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
        self.answers: dict[str, list[Answer]] = {}
        self.num_published = 0
        self.manager.start()

    def publish(self, version: int = 0) -> None:
        self.manager.publish({policy: weights(policy, version) for policy in self.policies}, self._published)

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
        self.answers[name] = []
        self.manager.submit(request(name, policy, **options), self.answers[name].append)

    def where(self, name: str) -> list[str]:
        """The workers that were given a request, in order."""
        return [
            each.worker_id for each in self.runtime.instances for sent in each.requests() if sent.request_id == name
        ]


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_requests_go_to_the_least_loaded_instance() -> None:
    lab = Lab()
    lab.serve()
    lab.submit("long", tokens=30)
    for name in ("b", "c", "d"):
        lab.submit(name, tokens=10)
    # The long one weighs 30: three short ones fit beside it, then both weigh 30 and the smaller id wins.
    assert [lab.where(name) for name in ("long", "b", "c", "d")] == [
        ["instance-red-0.0"],
        *[["instance-red-1.0"]] * 3,
    ]
    lab.submit("e")
    assert lab.where("e") == ["instance-red-0.0"]
    assert lab.events.records[0] == RequestDispatched(
        request_id=RequestId("long"), instance_id=InstanceId("instance-red-0"), rule="least_loaded", retry=0
    )


@pytest.mark.unit
def test_g8_requests_wait_for_an_instance_that_has_verified_their_version() -> None:
    lab = Lab(1, 1)
    lab.submit("early")
    lab.submit("blue", BLUE)
    assert lab.manager.num_waiting == 2
    lab.serve()
    assert (lab.where("early"), lab.where("blue")) == (["instance-red-0.0"], ["instance-blue-0.0"])
    lab.submit("next", version=1)
    assert lab.where("next") == []
    red, blue = lab.alive()
    red.say(completion("early", red))
    blue.say(completion("blue", blue))
    lab.publish(1)
    blue.load()
    assert lab.where("next") == []
    red.load()
    assert lab.where("next") == ["instance-red-0.0"]


@pytest.mark.unit
def test_g8_a_death_moves_requests_with_the_same_key_and_seed() -> None:
    lab = Lab()
    lab.serve()
    lab.submit("a")
    lab.submit("b")
    first, second = lab.alive()
    first.die()
    assert lab.where("a") == ["instance-red-0.0", "instance-red-1.0"]
    sent = [*first.requests(), *second.requests()]
    assert len({each.seed for each in sent if each.request_id == "a"}) == 1
    assert lab.events.records[-2:] == [
        WorkerRestarted(worker="instance-red-0", incarnation=1, reason="exit code 1"),
        RequestDispatched(
            request_id=RequestId("a"), instance_id=InstanceId("instance-red-1"), rule="least_loaded", retry=1
        ),
    ]
    second.say(completion("a", second))
    second.say(completion("b", second))
    assert [len(lab.answers[name]) for name in ("a", "b")] == [1, 1]


@pytest.mark.unit
def test_an_instance_is_restarted_later_and_later() -> None:
    lab = Lab(1)
    lab.serve()
    delays = []
    for _ in range(9):
        lab.alive()[0].die()
        (timer,) = lab.inbox.due("restart")
        delays.append(timer.delay_s)
        lab.inbox.fire("restart")
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert lab.alive()[0].worker_id == "instance-red-0.9"


@pytest.mark.unit
def test_a_late_answer_of_a_dead_incarnation_is_ignored() -> None:
    lab = Lab(1)
    lab.serve()
    lab.submit("a")
    (dead,) = lab.alive()
    dead.die()
    dead.say(completion("a", dead))
    assert lab.answers["a"] == []
    lab.inbox.fire("restart")
    (heir,) = lab.alive()
    heir.say(WorkerReady(pid=2))
    heir.load()
    heir.say(completion("a", heir))
    assert len(lab.answers["a"]) == 1


@pytest.mark.unit
def test_g7_a_request_without_an_answer_ends_its_instance() -> None:
    lab = Lab(1, request_timeout_s=5.0)
    lab.serve()
    lab.submit("a")
    (timer,) = lab.inbox.due("request a")
    assert timer.delay_s == 5.0
    lab.inbox.fire("request a")
    assert lab.alive() == []
    assert lab.manager.num_waiting == 1


@pytest.mark.unit
def test_g7_a_load_without_an_end_ends_its_instance() -> None:
    lab = Lab(1, request_timeout_s=5.0)
    lab.alive()[0].say(WorkerReady(pid=1))
    lab.publish()
    lab.inbox.fire("load instance-red-0")
    assert lab.alive() == []
    assert lab.num_published == 0


@pytest.mark.unit
def test_g8_an_instance_with_a_wrong_digest_never_serves() -> None:
    lab = Lab(2)
    for instance in lab.alive():
        instance.say(WorkerReady(pid=1))
    lab.publish()
    good, bad = lab.alive()
    good.load()
    bad.load(digest="something else")
    assert not bad.is_alive
    assert lab.num_published == 1
    lab.submit("a")
    lab.submit("b")
    assert lab.where("b") == ["instance-red-0.0"]


@pytest.mark.unit
def test_a_publication_is_done_when_each_policy_is_verified_and_the_rest_restarts() -> None:
    lab = Lab(2, 1)
    red_0, red_1, blue = lab.alive()
    for instance in lab.alive():
        instance.say(WorkerReady(pid=1))
    lab.publish()
    red_0.load()
    red_1.die()
    assert lab.num_published == 0  # blue has none
    blue.load()
    assert lab.num_published == 1
    lab.publish(1)
    red_0.die()
    blue.load()
    assert lab.num_published == 1  # red has none now
    lab.inbox.fire("restart instance-red-1")
    heir = lab.alive()[-1]
    heir.say(WorkerReady(pid=1))
    heir.load()
    assert lab.num_published == 2


@pytest.mark.unit
def test_a_publication_that_overtakes_a_load_is_loaded_after_it() -> None:
    lab = Lab(1, 1)
    red, blue = lab.alive()
    red.say(WorkerReady(pid=1))
    blue.say(WorkerReady(pid=1))
    lab.publish()
    red.load()
    blue.load()
    red.die()
    lab.inbox.fire("restart")
    heir = lab.alive()[-1]
    heir.say(WorkerReady(pid=2))
    lab.publish(1)
    blue.load()
    heir.say(WeightsLoaded(policy=RED, policy_version=0, weights_version=0, digest="red@0"))
    assert lab.num_published == 1
    heir.load()
    assert lab.num_published == 2
    lab.submit("a", version=1)
    assert lab.where("a") == ["instance-red-0.1"]


@pytest.mark.unit
def test_retries_are_bounded_and_the_last_failure_is_the_answer() -> None:
    lab = Lab(1, max_retries=2)
    lab.serve()
    lab.submit("a")
    (instance,) = lab.alive()
    for number in range(3):
        assert lab.answers["a"] == []
        instance.say(
            GenerationFailed(
                request_id=RequestId("a"), failure_kind=GenerationFailureKind.ENGINE, message=f"failure {number}"
            )
        )
    (answer,) = lab.answers["a"]
    assert isinstance(answer, GenerationFailed)
    assert answer.message == "failure 2"
    assert len(lab.where("a")) == 3


@pytest.mark.unit
def test_a_refused_request_is_not_tried_again() -> None:
    lab = Lab(1)
    lab.serve()
    lab.submit("a")
    refusal = GenerationFailed(
        request_id=RequestId("a"), failure_kind=GenerationFailureKind.REFUSED, message="too long"
    )
    lab.alive()[0].say(refusal)
    assert lab.answers["a"] == [refusal]


@pytest.mark.unit
def test_deaths_count_as_tries() -> None:
    lab = Lab(1, max_retries=1)
    lab.serve()
    lab.submit("a")
    for incarnation in range(2):
        assert lab.answers["a"] == []
        lab.alive()[0].die()
        if incarnation == 0:
            lab.inbox.fire("restart")
            lab.alive()[0].say(WorkerReady(pid=1))
            lab.alive()[0].load()
    (answer,) = lab.answers["a"]
    assert isinstance(answer, GenerationFailed)
    assert answer.message == "2 instances died with it, the last: exit code 1"


@pytest.mark.unit
def test_an_answer_may_cancel_the_other_requests_of_the_dead_instance() -> None:
    # Two branches of one trajectory: when the first fails for good, the trajectory fails and gives up the second.
    lab = Lab(1, max_retries=0)
    lab.serve()
    answers: list[Answer] = []

    def give_up(answer: Answer) -> None:
        answers.append(answer)
        lab.manager.cancel([RequestId("a"), RequestId("b")])

    for name in ("a", "b"):
        lab.manager.submit(request(name), give_up)
    lab.alive()[0].die()
    assert len(answers) == 1
    assert (lab.manager.num_waiting, lab.manager.num_running) == (0, 0)


@pytest.mark.unit
def test_cancelled_requests_are_not_answered_and_their_instance_is_told() -> None:
    lab = Lab(1)
    lab.submit("waiting", version=0)
    lab.manager.cancel([RequestId("waiting"), RequestId("unknown")])
    lab.serve()
    lab.submit("a")
    lab.submit("b")
    lab.manager.cancel([RequestId("a")])
    (instance,) = lab.alive()
    assert instance.sent[-1] == CancelRequests(request_ids=(RequestId("a"),))
    instance.say(completion("a", instance))
    instance.say(completion("b", instance))
    assert lab.answers == {"waiting": [], "a": [], "b": [completion("b", instance).completion]}
    assert lab.inbox.due("request") == []
    assert lab.where("waiting") == []


@pytest.mark.unit
def test_g7_a_policy_whose_instances_are_all_given_up_ends_the_run_by_name() -> None:
    lab = Lab(2, 1, max_restarts=1)
    lab.serve()
    red = [each for each in lab.alive() if "red" in each.worker_id]
    for instance in red:
        instance.die()
    lab.inbox.fire("restart")
    heirs = [each for each in lab.alive() if "red" in each.worker_id]
    heirs[0].die("out of memory")
    assert lab.inbox.errors == []
    assert lab.inbox.due("restart") == []
    heirs[1].die("out of memory")
    (error,) = lab.inbox.errors
    assert isinstance(error, BackendError)
    assert str(error) == (
        "policy red: every instance died 2 times (rollout.max_restarts=1); the last time: out of memory"
    )


@pytest.mark.unit
def test_nothing_is_restarted_while_the_run_closes() -> None:
    lab = Lab(2)
    lab.serve()
    first, second = lab.alive()
    first.die()
    lab.manager.close()
    second.die()
    lab.inbox.fire("restart")
    assert lab.alive() == []


@pytest.mark.unit
def test_misuse_is_an_invariant_error() -> None:
    lab = Lab(1)
    lab.submit("a")
    with pytest.raises(InvariantError, match="request a was submitted twice"):
        lab.manager.submit(request("a"), print)
    lab.serve()
    with pytest.raises(InvariantError, match="request a was submitted twice"):
        lab.manager.submit(request("a"), print)
    with pytest.raises(InvariantError, match="publication with requests in flight: a"):
        lab.publish(1)
    with pytest.raises(InvariantError, match="sent an unexpected str"):
        lab.alive()[0].say("hello")
    lab.manager.cancel([RequestId("a")])
    lab.publish(1)
    with pytest.raises(InvariantError, match="a publication began before the last one was done"):
        lab.publish(2)


# --- state machine ----------------------------------------------------------------------------------------------------


class ManagerMachine(RuleBasedStateMachine):
    """Requests, answers, failures, deaths, restarts and publications in any order."""

    @initialize(num_red=st.integers(1, 3), num_blue=st.integers(1, 2))
    def open(self, num_red: int, num_blue: int) -> None:
        self.lab = Lab(num_red, num_blue, max_retries=10**6, max_restarts=10**6)
        self.version = 0
        self.num_asked = 1
        self.cancelled: set[str] = set()
        self.lab.publish(0)

    def _pick(self, data: st.DataObject, items: list[Any]) -> Any:
        return data.draw(st.sampled_from(items)) if items else None

    @rule(policy=st.sampled_from([RED, BLUE]), tokens=st.integers(1, 30))
    def submit(self, policy: PolicyName, tokens: int) -> None:
        if self.lab.num_published == self.num_asked:
            self.lab.submit(f"r{len(self.lab.answers)}", policy, version=self.version, tokens=tokens)

    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        instance = self._pick(data, [each for each in self.lab.alive() if not each.sent and not self._is_ready(each)])
        if instance is not None:
            self.ready().add(instance.worker_id)
            instance.say(WorkerReady(pid=1))

    def ready(self) -> set[str]:
        if not hasattr(self, "_ready"):
            self._ready: set[str] = set()
            self._num_loaded: dict[str, int] = {}
        return self._ready

    def _is_ready(self, instance: FakeInstance) -> bool:
        return instance.worker_id in self.ready()

    def _loads(self, instance: FakeInstance) -> list[LoadWeights]:
        return [message for message in instance.sent if isinstance(message, LoadWeights)]

    @rule(data=st.data(), is_wrong=st.booleans())
    def load(self, data: st.DataObject, is_wrong: bool) -> None:
        self.ready()
        behind = [each for each in self.lab.alive() if len(self._loads(each)) > self._num_loaded.get(each.worker_id, 0)]
        instance = self._pick(data, behind)
        if instance is None:
            return
        place = self._num_loaded.get(instance.worker_id, 0)
        self._num_loaded[instance.worker_id] = place + 1
        command = self._loads(instance)[place]
        instance.say(
            WeightsLoaded(
                policy=command.policy,
                policy_version=command.policy_version,
                weights_version=command.weights_version,
                digest="wrong" if is_wrong else command.digest,
            )
        )
        if is_wrong and command.policy_version == self.version:
            assert not instance.is_alive

    def _open(self) -> list[tuple[FakeInstance, str]]:
        found = []
        for instance in self.lab.alive():
            cancelled = {
                name for sent in instance.sent if isinstance(sent, CancelRequests) for name in sent.request_ids
            }
            for sent in instance.requests():
                if not self.lab.answers[sent.request_id] and sent.request_id not in cancelled:
                    found.append((instance, str(sent.request_id)))
        return found

    @rule(data=st.data(), is_good=st.booleans())
    def answer(self, data: st.DataObject, is_good: bool) -> None:
        chosen = self._pick(data, self._open())
        if chosen is None:
            return
        instance, name = chosen
        if is_good:
            instance.say(completion(name, instance))
        else:
            instance.say(
                GenerationFailed(
                    request_id=RequestId(name), failure_kind=GenerationFailureKind.ENGINE, message="broken"
                )
            )

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        instance = self._pick(data, self.lab.alive())
        if instance is not None:
            instance.die()

    @rule()
    def restart(self) -> None:
        self.lab.inbox.fire("restart")

    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        timer = self._pick(data, [*self.lab.inbox.due("request"), *self.lab.inbox.due("load")])
        if timer is not None:
            timer.is_cancelled = True
            timer.handler()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self._pick(data, [name for name, answers in self.lab.answers.items() if not answers])
        if name is not None:
            self.cancelled.add(name)
            self.lab.manager.cancel([RequestId(name)])

    @precondition(lambda self: self.lab.num_published == self.num_asked)
    @rule()
    def publish(self) -> None:
        if self.lab.manager.num_running == self.lab.manager.num_waiting == 0:
            self.version += 1
            self.num_asked += 1
            self.lab.publish(self.version)

    @invariant()
    def answered_at_most_once_and_never_after_a_cancel(self) -> None:
        for name, answers in self.lab.answers.items():
            assert len(answers) <= (0 if name in self.cancelled else 1)

    @invariant()
    def only_verified_instances_of_the_policy_get_requests(self) -> None:
        for instance in self.lab.runtime.instances:
            served = None
            loads = iter(self._loads(instance))
            for message in instance.sent:
                if isinstance(message, LoadWeights):
                    served = next(loads)
                elif isinstance(message, Generate):
                    assert served is not None
                    assert message.request.policy == served.policy
                    assert message.request.min_version <= served.policy_version <= message.request.max_version

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        due = {timer.name for timer in self.lab.inbox.due()}
        for _, name in self._open():
            assert f"request {name}" in due
        assert self.lab.manager.num_running == len([name for name in due if name.startswith("request")])

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        for _ in range(50):
            self.lab.inbox.fire("restart")
            for instance in self.lab.alive():
                if not self._is_ready(instance):
                    self.ready().add(instance.worker_id)
                    instance.say(WorkerReady(pid=1))
                if len(self._loads(instance)) > self._num_loaded.get(instance.worker_id, 0):
                    self._num_loaded[instance.worker_id] = len(self._loads(instance))
                    instance.load()
            for instance, name in self._open():
                instance.say(completion(name, instance))
        assert self.lab.num_published == self.num_asked
        for name, answers in self.lab.answers.items():
            assert len(answers) == (0 if name in self.cancelled else 1)
        assert self.lab.inbox.errors == []


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestG8Manager = pytest.mark.property(ManagerMachine.TestCase)
