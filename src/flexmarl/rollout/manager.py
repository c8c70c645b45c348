"""The rollout manager: requests in, exactly one answer each out, over instances that may die at any moment.

Invariants (tests name them):

* every submitted request is answered exactly once, unless it is cancelled;
* a request is only ever sent to an instance of its policy that has verified a version in the request's bounds;
* an instance serves only after it has reported the digest that the publication names;
* no request goes on with weights outside its bounds: its instance finishes it first, then loads;
* nothing waits without a deadline: a request, a load and a start that take too long end their instance.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from flexmarl.config import RolloutConfig
from flexmarl.core.errors import BackendError, CapacityError, InvariantError
from flexmarl.core.events import RequestDispatched, WorkerRestarted
from flexmarl.core.ids import InstanceId, PolicyName, RequestId, WorkerId
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
from flexmarl.core.protocols import EventSink, Inbox, Runtime, ServiceKind, WorkerSpec
from flexmarl.core.records import GenerationRequest
from flexmarl.rollout.fleet import Answer, Instance, InstanceState, PublishedWeights, Request, policy_queues
from flexmarl.scheduling import InstanceLoad, dispatch_least_loaded
from flexmarl.telemetry import PolicyQueue

logger = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.1
LONGEST_RESTART_DELAY_S = 10.0

__all__ = ["Answer", "PublishedWeights", "RolloutManager"]


class RolloutManager:
    """Owns the instances of all policies. Its methods are handlers: synchronous, called from the inbox."""

    def __init__(
        self,
        config: RolloutConfig,
        specs: Mapping[PolicyName, tuple[int, Callable[[WorkerId], WorkerSpec]]],
        *,
        runtime: Runtime,
        inbox: Inbox,
        events: EventSink,
    ) -> None:
        """Take the number of instances and the maker of worker specs of each policy; start nothing yet."""
        self._config = config
        self._runtime = runtime
        self._inbox = inbox
        self._events = events
        self._make_spec = {policy: make for policy, (_, make) in specs.items()}
        self._instances = {
            instance_id: Instance(instance_id=instance_id, policy=policy)
            for policy, (count, _) in specs.items()
            for instance_id in (InstanceId(f"instance-{policy}-{n}") for n in range(count))
        }
        self._by_worker: dict[WorkerId, Instance] = {}
        self._published: dict[PolicyName, PublishedWeights] = {}
        self._queue: dict[RequestId, Request] = {}
        self._on_published: Callable[[], None] | None = None
        self._is_closing = False

    # --- commands of the orchestrator ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every instance."""
        for instance in self._instances.values():
            self._start(instance)

    def publish(
        self,
        weights: Mapping[PolicyName, PublishedWeights],
        on_done: Callable[[], None],
        *,
        may_have_requests: bool = False,
    ) -> None:
        """Make every instance serve `weights`.

        `on_done` is called once every instance has verified them or is being restarted, with at least one verified per
        policy. Without `may_have_requests` nothing may be in flight. With it, `rollout.on_publish` says what an
        instance does that works on requests: with `drain` it takes no new ones and loads when they are answered, with
        `continue` it loads at once and goes on with those whose bounds admit the new version.
        """
        if self._on_published is not None:
            raise InvariantError("a publication began before the last one was done")
        busy = sorted(request_id for instance in self._instances.values() for request_id in instance.requests)
        if busy and not may_have_requests:
            raise InvariantError(f"publication with requests in flight: {', '.join(busy[:3])}")
        self._published = dict(weights)
        self._on_published = on_done
        for instance in self._instances.values():
            if instance.state in (InstanceState.IDLE, InstanceState.SERVING):
                self._renew(instance)
        for request in list(self._queue.values()):
            self._refuse_if_outdated(request)
        self._check_published()

    def submit(self, request: GenerationRequest, on_answer: Callable[[Answer], None]) -> None:
        """Generate a request; `on_answer` is called exactly once, unless it is cancelled before."""
        if request.request_id in self._queue or any(
            request.request_id in instance.requests for instance in self._instances.values()
        ):
            raise InvariantError(f"request {request.request_id} was submitted twice")
        self._wait(Request(request=request, on_answer=on_answer))
        self._dispatch()

    def cancel(self, request_ids: list[RequestId]) -> None:
        """Forget requests; they are not answered any more."""
        for request_id in request_ids:
            self._queue.pop(request_id, None)
        for instance in self._instances.values():
            held = tuple(request_id for request_id in request_ids if request_id in instance.requests)
            for request_id in held:
                instance.forget(request_id)
            if held and instance.handle is not None:
                instance.handle.send(CancelRequests(request_ids=held))
                self._load_when_drained(instance)

    def close(self) -> None:
        """Start nothing any more; deaths are expected from now on."""
        self._is_closing = True

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that no instance works on yet."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that an instance works on."""
        return sum(len(instance.requests) for instance in self._instances.values())

    def queues(self) -> dict[str, PolicyQueue]:
        """Return the requests of each policy. O(requests that wait here + instances)."""
        return policy_queues(
            self._published,
            self._queue.values(),
            self._instances.values(),
            num_slots=self._config.backend.num_slots,
        )

    # --- facts --------------------------------------------------------------------------------------------------------

    def _receive(self, worker_id: WorkerId, fact: object) -> None:
        self._inbox.post(worker_id, fact, lambda: self._handle(worker_id, fact))

    def _handle(self, worker_id: WorkerId, fact: object) -> None:
        instance = self._by_worker.get(worker_id)
        if instance is None:
            return
        match fact:
            case WorkerReady():
                instance.state = InstanceState.IDLE
                if instance.policy in self._published:
                    self._load(instance)
            case WeightsLoaded():
                self._weights_loaded(instance, fact)
            case Generated():
                instance.num_deaths = 0
                self._answered(instance, fact.completion.request_id, fact.completion)
            case GenerationFailed():
                self._failed(instance, fact)
            case WorkerExited():
                self._exited(worker_id, instance, fact)
            case _:
                raise InvariantError(f"{worker_id} sent an unexpected {type(fact).__name__}")

    def _weights_loaded(self, instance: Instance, fact: WeightsLoaded) -> None:
        if instance.load_timer is not None:
            instance.load_timer.cancel()
        wanted = self._published[instance.policy]
        if fact.policy_version != wanted.policy_version:
            self._load(instance)
            return
        if fact.digest != wanted.digest:
            # Verified by the instance already; a difference here means that it serves something else.
            self._kill(instance, f"it holds weights with digest {fact.digest}, published is {wanted.digest}")
            return
        instance.state = InstanceState.SERVING
        instance.policy_version = fact.policy_version
        self._check_published()
        self._dispatch()

    def _answered(self, instance: Instance, request_id: RequestId, answer: Answer) -> None:
        request = instance.forget(request_id)
        self._load_when_drained(instance)
        if request is not None:
            request.on_answer(answer)

    def _failed(self, instance: Instance, fact: GenerationFailed) -> None:
        request = instance.forget(fact.request_id)
        self._load_when_drained(instance)
        if request is None:
            return
        if fact.failure_kind is GenerationFailureKind.REFUSED or request.num_tries > self._config.max_retries:
            request.on_answer(fact)
            return
        logger.warning("%s: %s failed (%s); retrying", instance.instance_id, fact.request_id, fact.message)
        self._wait(request)
        self._dispatch()

    def _exited(self, worker_id: WorkerId, instance: Instance, fact: WorkerExited) -> None:
        del self._by_worker[worker_id]
        reason, instance.kill_reason = instance.kill_reason or fact.reason, None
        instance.handle = None
        instance.policy_version = None
        if instance.load_timer is not None:
            instance.load_timer.cancel()
        if self._is_closing:
            return
        instance.num_deaths += 1
        if instance.num_deaths > self._config.max_restarts:
            instance.state = InstanceState.GIVEN_UP
            logger.error("%s ended (%s) and is not restarted: rollout.max_restarts", instance.instance_id, reason)
            if all(i.state is InstanceState.GIVEN_UP for i in self._instances.values() if i.policy == instance.policy):
                self._inbox.fail(
                    BackendError(
                        f"policy {instance.policy}: every instance died {instance.num_deaths} times without an answer "
                        f"(rollout.max_restarts={self._config.max_restarts}); the last time: {reason}"
                    )
                )
                return
        else:
            delay_s = min(FIRST_RESTART_DELAY_S * 2.0 ** (instance.num_deaths - 1), LONGEST_RESTART_DELAY_S)
            instance.state = InstanceState.WAITING
            instance.incarnation += 1
            logger.warning("%s ended (%s); restarting in %.1f s", instance.instance_id, reason, delay_s)
            self._events.emit(
                WorkerRestarted(worker=instance.instance_id, incarnation=instance.incarnation, reason=reason)
            )
            self._inbox.set_timer(f"restart {instance.instance_id}", delay_s, lambda: self._start(instance))
        self._requeue(instance, reason)
        self._check_published()
        self._dispatch()

    def _requeue(self, instance: Instance, reason: str) -> None:
        for request_id in list(instance.requests):
            request = instance.forget(request_id)
            if request is None:
                continue  # an answer below made its trajectory give up this one too
            if request.num_tries > self._config.max_retries:
                request.on_answer(
                    GenerationFailed(
                        request_id=request_id,
                        failure_kind=GenerationFailureKind.ENGINE,
                        message=f"{request.num_tries} instances died with it, the last: {reason}",
                    )
                )
            else:
                self._wait(request)

    def _wait(self, request: Request) -> None:
        """Let a request wait for an instance."""
        self._queue[request.request.request_id] = request
        self._refuse_if_outdated(request)

    def _refuse_if_outdated(self, waiting: Request) -> None:
        """Answer a request that waits for a version which no instance will serve any more: versions only rise."""
        request = waiting.request
        published = self._published.get(request.policy)
        if published is None or published.policy_version <= request.max_version:
            return
        if self._queue.pop(request.request_id, None) is None:
            return  # an answer before this one made its trajectory give it up
        waiting.on_answer(
            GenerationFailed(
                request_id=request.request_id,
                failure_kind=GenerationFailureKind.WRONG_VERSION,
                message=f"it wants version {request.max_version} at most, {published.policy_version} is published",
            )
        )

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _start(self, instance: Instance) -> None:
        if self._is_closing:
            return
        instance.state = InstanceState.STARTING
        self._by_worker[instance.worker_id] = instance
        spec = self._make_spec[instance.policy](instance.worker_id)
        if spec.kind is not ServiceKind.INSTANCE:
            raise InvariantError(f"{spec.worker_id} is a {spec.kind}, not an instance")
        instance.handle = self._runtime.start(spec, self._receive)

    def _renew(self, instance: Instance) -> None:
        """Bring an instance to the published version, now or when it is drained."""
        instance.state = InstanceState.DRAINING
        self._load_when_drained(instance)

    def _load_when_drained(self, instance: Instance) -> None:
        if instance.state is not InstanceState.DRAINING:
            return
        can_go_on = self._config.on_publish == "continue"
        version = self._published[instance.policy].policy_version
        if all(can_go_on and version <= each.request.max_version for each in instance.requests.values()):
            self._load(instance)

    def _load(self, instance: Instance) -> None:
        weights = self._published[instance.policy]
        assert instance.handle is not None
        instance.state = InstanceState.LOADING
        instance.handle.send(
            LoadWeights(
                policy=weights.policy,
                policy_version=weights.policy_version,
                weights_version=weights.weights_version,
                object_key=weights.object_key,
                digest=weights.digest,
            )
        )
        instance.load_timer = self._inbox.set_timer(
            f"load {instance.instance_id}",
            self._config.request_timeout_s,
            partial(self._kill, instance, f"loading weights took longer than {self._timeout_name()}"),
        )

    def _check_published(self) -> None:
        if self._on_published is None:
            return
        for policy in self._published:
            states = [i.state for i in self._instances.values() if i.policy == policy]
            is_behind = InstanceState.LOADING in states or InstanceState.DRAINING in states
            if is_behind or InstanceState.SERVING not in states:
                return
        on_done, self._on_published = self._on_published, None
        on_done()

    def _dispatch(self) -> None:
        for request_id in list(self._queue):
            request = self._queue.get(request_id)
            if request is None:
                continue
            instance = self._choose(request.request)
            if instance is None or instance.handle is None:
                continue
            del self._queue[request_id]
            request.num_tries += 1
            instance.hold(request)
            request.timer = self._inbox.set_timer(
                f"request {request_id}",
                self._config.request_timeout_s,
                partial(self._kill, instance, f"request {request_id} took longer than {self._timeout_name()}"),
            )
            self._events.emit(
                RequestDispatched(
                    request_id=request_id,
                    instance_id=InstanceId(instance.worker_id),
                    rule="least_loaded",
                    retry=request.num_tries - 1,
                )
            )
            instance.handle.send(Generate(request=request.request))

    def _choose(self, request: GenerationRequest) -> Instance | None:
        loads = [
            InstanceLoad(
                instance_id=instance.instance_id,
                policy_version=instance.policy_version,
                num_outstanding_tokens=instance.num_outstanding_tokens,
            )
            for instance in self._instances.values()
            if instance.policy == request.policy
            and instance.state is InstanceState.SERVING
            and instance.policy_version is not None
        ]
        try:
            chosen = dispatch_least_loaded(loads, min_version=request.min_version, max_version=request.max_version)
        except CapacityError:  # the next publication or restart looks again
            return None
        return self._instances[chosen]

    def _timeout_name(self) -> str:
        return f"rollout.request_timeout_s={self._config.request_timeout_s:g}"

    def _kill(self, instance: Instance, reason: str) -> None:
        logger.error("%s: %s; killing it", instance.worker_id, reason)
        if instance.handle is not None:
            instance.kill_reason = instance.kill_reason or reason
            instance.handle.kill()
