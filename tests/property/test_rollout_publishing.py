"""The manager and real instances under virtual time: publications and deaths while requests run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flexmarl.config import RolloutConfig
from flexmarl.core.events import WorkerRestarted
from flexmarl.core.ids import AgentName, ObjectKey, PolicyName, Purpose, RequestId, SampleKey, WorkerId
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.messages import GenerationFailed, GenerationFailureKind
from flexmarl.core.protocols import ServiceKind, WorkerSpec
from flexmarl.core.records import GenerationRequest, SamplingParams
from flexmarl.orchestrator.inbox import OrderedInbox
from flexmarl.rollout.manager import Answer, PublishedWeights, RolloutManager
from flexmarl.runtime.simulated import SimulatedRuntime, run_virtual
from flexmarl.testing.events import RecordingSink

pytestmark = pytest.mark.property

RED = PolicyName("red")
BACKEND = {"kind": "scripted", "num_slots": 2, "token_s": 0.01}
NUM_INSTANCES = 2
END_S = 200.0


def packed_weights(version: int) -> PackedObject:
    layout = plan_layout([("weight", "uint8", (64,), 64)])
    return PackedObject(layout=layout, buffer=memoryview(bytes([version]) * 64))


def instance_spec(worker_id: WorkerId) -> WorkerSpec:
    factory = "flexmarl.rollout.instance:build_instance"
    return WorkerSpec(
        worker_id=worker_id, kind=ServiceKind.INSTANCE, factory=factory, options={"policy": RED, "backend": BACKEND}
    )


class Lab:
    """A manager of two real instances with scripted engines; requests may run `slack` versions on."""

    def __init__(self, runtime: SimulatedRuntime, on_publish: str) -> None:
        self.runtime = runtime
        self.events = RecordingSink()
        self.inbox = OrderedInbox(self.events)
        self.handles: dict[str, Any] = {}
        start = runtime.start

        def start_and_keep(spec: WorkerSpec, on_fact: Callable[[WorkerId, object], None]) -> Any:
            self.handles[spec.worker_id.rpartition(".")[0]] = handle = start(spec, on_fact)
            return handle

        runtime.start = start_and_keep  # type: ignore[method-assign]
        config = RolloutConfig.model_validate(
            {"backend": BACKEND, "on_publish": on_publish, "max_retries": 100, "max_restarts": 100}
        )
        self.manager = RolloutManager(
            config, {RED: (NUM_INSTANCES, instance_spec)}, runtime=runtime, inbox=self.inbox, events=self.events
        )
        self.version = -1
        self.is_publishing = False
        self.requests: dict[str, GenerationRequest] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.manager.start()

    def publish(self) -> None:
        if self.is_publishing:
            return
        self.version += 1
        self.is_publishing = True
        packed = packed_weights(self.version)
        key = ObjectKey("weights", RED, self.version)
        self.runtime.objects.set(key, packed).result(1.0)
        published = PublishedWeights(
            policy=RED,
            policy_version=self.version,
            weights_version=self.version,
            object_key=key,
            digest=packed.digest(),
        )
        self.manager.publish({RED: published}, self._published, may_have_requests=True)

    def _published(self) -> None:
        self.is_publishing = False

    def submit(self, num_tokens: int, slack: int) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = GenerationRequest(
            request_id=RequestId(name),
            purpose=Purpose.TRAIN,
            key=SampleKey(0, len(self.requests), 0, AgentName("a"), 0, 0),
            attempt=0,
            policy=RED,
            min_version=max(self.version, 0),
            max_version=max(self.version, 0) + slack,
            prompt_tokens=(1,),
            sampling=SamplingParams(max_new_tokens=num_tokens, ignore_stop=True),
            seed=len(self.requests),
        )
        self.answers[name] = []
        self.manager.submit(self.requests[name], self.answers[name].append)

    def kill(self, number: int) -> None:
        handle = self.handles.get(f"instance-{RED}-{number}")
        if handle is not None:
            handle.kill()

    def is_done(self) -> bool:
        return not self.is_publishing and all(self.answers.values())


actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(0, 3)),
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(0, 3)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("kill"), st.integers(0, NUM_INSTANCES - 1)),
)


@pytest.mark.parametrize("on_publish", ["drain", "continue"])
@settings(max_examples=150, deadline=None)
@given(plan=st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.05, 0.3]), actions), max_size=30))
def test_g3_g8_publications_and_deaths_lose_nothing_and_keep_every_token_in_its_bounds(
    on_publish: str, plan: Sequence[tuple[float, tuple[Any, ...]]]
) -> None:
    async def main(runtime: SimulatedRuntime) -> Lab:
        lab = Lab(runtime, on_publish)
        lab.publish()
        now_s = 0.0
        num_acted = 0

        def act(name: str, *arguments: int) -> None:
            nonlocal num_acted
            num_acted += 1
            getattr(lab, name)(*arguments)

        for pause_s, (name, *arguments) in plan:
            now_s += pause_s
            lab.inbox.set_timer(name, now_s, partial(act, name, *arguments))
        lab.inbox.set_timer("end", END_S, lambda: pytest.fail("a request or a publication waits for ever"))
        await lab.inbox.run_until(lambda: num_acted == len(plan) and lab.is_done())
        lab.manager.close()
        return lab

    lab = run_virtual(main)
    restarts = [record for record in lab.events.records if isinstance(record, WorkerRestarted)]
    assert {record.reason for record in restarts} <= {"signal SIGKILL"}  # none but those that the plan killed
    for name, request in lab.requests.items():
        (answer,) = lab.answers[name]
        if isinstance(answer, GenerationFailed):
            assert answer.failure_kind is GenerationFailureKind.WRONG_VERSION
            assert request.max_version < lab.version
            continue
        spans = answer.version_spans
        event(f"{len(spans)} spans")
        assert on_publish == "continue" or len(spans) == 1
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(answer.tokens) == request.sampling.max_new_tokens
        versions = [span.policy_version for span in spans]
        assert versions == sorted(set(versions))
        assert request.min_version <= versions[0] <= versions[-1] <= request.max_version
