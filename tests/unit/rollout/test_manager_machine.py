"""The rollout manager under requests, deaths and publications in any order."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manager_lab import BLUE, RED, FakeInstance, Lab, completion

from flexmarl.core.ids import PolicyName, RequestId
from flexmarl.core.messages import (
    Generate,
    GenerationFailed,
    GenerationFailureKind,
    LoadWeights,
    WeightsLoaded,
    WorkerReady,
)


class ManagerMachine(RuleBasedStateMachine):
    """Requests, answers, failures, deaths, restarts and publications in any order."""

    @initialize(
        num_red=st.integers(1, 3),
        num_blue=st.integers(1, 2),
        on_publish=st.sampled_from(["drain", "continue"]),
    )
    def open(self, num_red: int, num_blue: int, on_publish: str) -> None:
        self.lab = Lab(num_red, num_blue, max_retries=10**6, max_restarts=10**6, on_publish=on_publish)
        self.on_publish = on_publish
        self.version = 0
        self.num_asked = 1
        self.cancelled: set[str] = set()
        self.lab.publish(0)

    def _pick(self, data: st.DataObject, items: list[Any]) -> Any:
        return data.draw(st.sampled_from(items)) if items else None

    @rule(policy=st.sampled_from([RED, BLUE]), tokens=st.integers(1, 30), slack=st.integers(0, 3))
    def submit(self, policy: PolicyName, tokens: int, slack: int) -> None:
        name = f"r{len(self.lab.answers)}"
        self.lab.submit(name, policy, version=self.version, slack=slack, tokens=tokens)

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
            # A retry of the same instance comes twice.
            for name in dict.fromkeys(str(sent.request_id) for sent in instance.requests()):
                if not self.lab.answers[name] and name in instance.open:
                    found.append((instance, name))
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
        self.version += 1
        self.num_asked += 1
        self.lab.publish(self.version, may_have_requests=True)

    @invariant()
    def no_request_goes_on_with_weights_outside_its_bounds(self) -> None:
        for instance in self.lab.runtime.instances:
            for command, unfinished in instance.loads:
                assert self.on_publish == "continue" or not unfinished
                assert all(command.policy_version <= each.max_version for each in unfinished)

    @invariant()
    def only_requests_that_no_version_to_come_may_serve_fail(self) -> None:
        for answers in self.lab.answers.values():
            for answer in answers:
                if isinstance(answer, GenerationFailed):
                    assert answer.failure_kind is GenerationFailureKind.WRONG_VERSION
                    assert self.lab.requests[answer.request_id].max_version < self.version

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
