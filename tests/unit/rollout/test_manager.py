"""The rollout manager, case by case."""

import pytest
from manager_lab import BLUE, RED, Lab, completion, request

from flexmarl.core.errors import BackendError, InvariantError
from flexmarl.core.events import RequestDispatched, WorkerRestarted
from flexmarl.core.ids import InstanceId, RequestId
from flexmarl.core.messages import (
    CancelRequests,
    GenerationFailed,
    GenerationFailureKind,
    WeightsLoaded,
    WorkerReady,
)
from flexmarl.rollout.manager import Answer


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
        request_id=RequestId("long"), instance_id=InstanceId("instance-red-0.0"), rule="least_loaded", retry=0
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
            request_id=RequestId("a"), instance_id=InstanceId("instance-red-1.0"), rule="least_loaded", retry=1
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
    reason = "request a took longer than rollout.request_timeout_s=5"
    assert lab.events.records[-1] == WorkerRestarted(worker="instance-red-0", incarnation=1, reason=reason)


@pytest.mark.unit
def test_g7_requests_that_die_of_the_time_limit_name_the_option() -> None:
    lab = Lab(1, request_timeout_s=5.0, max_retries=0)
    lab.serve()
    lab.submit("a")
    lab.submit("b")
    lab.inbox.fire("request a")
    for name in ("a", "b"):
        (answer,) = lab.answers[name]
        assert isinstance(answer, GenerationFailed)
        assert answer.message == (
            "1 instances died with it, the last: request a took longer than rollout.request_timeout_s=5"
        )
    # What ends the next incarnation is told as it is.
    lab.inbox.fire("restart")
    lab.alive()[0].die()
    assert lab.events.records[-1] == WorkerRestarted(worker="instance-red-0", incarnation=2, reason="exit code 1")


@pytest.mark.unit
def test_g7_a_load_without_an_end_ends_its_instance() -> None:
    lab = Lab(1, request_timeout_s=5.0)
    lab.alive()[0].say(WorkerReady(pid=1))
    lab.publish()
    lab.inbox.fire("load instance-red-0")
    assert lab.alive() == []
    assert lab.events.records == [
        WorkerRestarted(
            worker="instance-red-0",
            incarnation=1,
            reason="loading weights took longer than rollout.request_timeout_s=5",
        )
    ]
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
def test_draining_instances_finish_what_they_have_and_idle_ones_load_at_once() -> None:
    lab = Lab(2)
    lab.serve()
    lab.submit("a", slack=1)
    lab.submit("b", tokens=9, slack=1)
    lab.submit("c", tokens=9, slack=1)
    busy, other = lab.alive()
    assert [lab.where(name) for name in ("a", "b", "c")] == [[busy.worker_id], [other.worker_id], [other.worker_id]]
    other.say(completion("b", other))
    other.say(completion("c", other))
    lab.publish(1, may_have_requests=True)
    assert [command.policy_version for command, _ in busy.loads] == [0]
    assert [command.policy_version for command, _ in other.loads] == [0, 1]
    lab.submit("d", slack=1)
    assert lab.where("d") == []  # one drains, one loads
    other.load()
    assert lab.where("d") == [other.worker_id]
    assert lab.num_published == 1  # the one before
    busy.say(completion("a", busy))
    assert [command.policy_version for command, _ in busy.loads] == [0, 1]
    assert lab.num_published == 1
    busy.load()
    assert lab.num_published == 2
    assert len(lab.answers["a"]) == 1


@pytest.mark.unit
def test_a_cancelled_request_drains_its_instance_too() -> None:
    lab = Lab(1)
    lab.serve()
    lab.submit("a", slack=1)
    (instance,) = lab.alive()
    lab.publish(1, may_have_requests=True)
    lab.manager.cancel([RequestId("a")])
    assert instance.loads[-1] == (instance.sent[-1], [])
    instance.load()
    assert lab.num_published == 2


@pytest.mark.unit
def test_with_continue_an_instance_loads_at_once_and_keeps_its_requests() -> None:
    lab = Lab(1, on_publish="continue")
    lab.serve()
    lab.submit("a", slack=1)
    (instance,) = lab.alive()
    lab.publish(1, may_have_requests=True)
    assert [(command.policy_version, len(open_)) for command, open_ in instance.loads] == [(0, 0), (1, 1)]
    lab.submit("b", slack=1)
    assert lab.where("b") == []
    instance.load()
    assert lab.num_published == 2
    assert (lab.where("a"), lab.where("b")) == ([instance.worker_id], [instance.worker_id])
    instance.say(completion("a", instance))
    assert len(lab.answers["a"]) == 1


@pytest.mark.unit
def test_g3_with_continue_a_request_whose_bounds_end_is_finished_first() -> None:
    lab = Lab(1, on_publish="continue")
    lab.serve()
    lab.submit("bound")
    lab.submit("free", slack=1)
    (instance,) = lab.alive()
    lab.publish(1, may_have_requests=True)
    assert [command.policy_version for command, _ in instance.loads] == [0]
    instance.say(completion("bound", instance))
    assert [each.request_id for each in instance.loads[-1][1]] == ["free"]
    instance.load()
    assert lab.num_published == 2


@pytest.mark.unit
@pytest.mark.parametrize("on_publish", ["drain", "continue"])
def test_g8_a_death_before_or_in_the_load_loses_no_request(on_publish: str) -> None:
    lab = Lab(2, on_publish=on_publish)
    lab.serve()
    for name in ("a", "b"):
        lab.submit(name, slack=1)
    first, second = lab.alive()
    lab.publish(1, may_have_requests=True)
    first.die()  # it drains, or loads
    if on_publish == "drain":
        second.say(completion("b", second))
    second.load()
    assert lab.num_published == 2
    assert lab.where("a") == [first.worker_id, second.worker_id]
    second.say(completion("a", second))
    lab.inbox.fire("restart")
    (heir,) = [each for each in lab.alive() if each is not second]
    heir.say(WorkerReady(pid=1))
    assert [command.policy_version for command, _ in heir.loads] == [1]


@pytest.mark.unit
def test_g7_a_request_that_no_version_to_come_may_serve_is_answered() -> None:
    lab = Lab(1)
    lab.serve()
    lab.submit("a")
    lab.submit("b", version=1)
    lab.publish(1, may_have_requests=True)
    lab.alive()[0].die()
    lab.submit("c")
    for name in ("a", "c"):
        (answer,) = lab.answers[name]
        assert isinstance(answer, GenerationFailed)
        assert answer.failure_kind is GenerationFailureKind.WRONG_VERSION
        assert answer.message == "it wants version 0 at most, 1 is published"
    assert (lab.answers["b"], lab.manager.num_waiting) == ([], 1)


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
        "policy red: every instance died 2 times without an answer (rollout.max_restarts=1); "
        "the last time: out of memory"
    )


@pytest.mark.unit
def test_an_answer_makes_up_for_the_deaths_before_it() -> None:
    lab = Lab(1, max_restarts=1)
    lab.serve()
    for number in range(5):
        lab.alive()[0].die()
        lab.inbox.fire("restart")
        (instance,) = lab.alive()
        instance.say(WorkerReady(pid=1))
        instance.load()
        lab.submit(f"r{number}")
        instance.say(completion(f"r{number}", instance))
    assert lab.inbox.errors == []


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
