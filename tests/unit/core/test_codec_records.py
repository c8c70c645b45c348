import json

import pytest

from flexmarl.core.codec import from_plain, from_tagged, kind_of, tagged, to_plain, to_tagged
from flexmarl.core.errors import ConfigError, InvariantError
from flexmarl.core.ids import AgentName, PolicyName, Purpose, RequestId, SampleKey, TrajectoryKey
from flexmarl.core.messages import Generate, StartTrajectory, WorkerReady
from flexmarl.core.records import Denominators, DispatchRecord, GenerationRequest, OutcomeRecord, SamplingParams

pytestmark = pytest.mark.unit

KEY = SampleKey(1, 7, 0, AgentName("solver"), 0, 2)
REQUEST = GenerationRequest(
    request_id=RequestId("r1"),
    purpose=Purpose.TRAIN,
    key=KEY,
    attempt=0,
    policy=PolicyName("p"),
    min_version=1,
    max_version=1,
    prompt_tokens=(3, 1, 4),
    sampling=SamplingParams(max_new_tokens=8),
    seed=5,
)


def test_plain_form_is_what_it_says() -> None:
    assert to_plain(Denominators(num_samples=2, num_tokens=9)) == {"num_samples": 2, "num_tokens": 9}
    assert to_plain(DispatchRecord(step=0, min_version=0, max_version=0, queries=(4, 2), num_trajectories=2)) == {
        "step": 0,
        "min_version": 0,
        "max_version": 0,
        "queries": [4, 2],
        "num_trajectories": 2,
    }


def test_tagged_record_survives_json() -> None:
    plain = json.loads(json.dumps(to_tagged(Generate(request=REQUEST))))
    assert (plain["kind"], plain["version"]) == ("generate", 1)
    assert from_tagged(plain) == Generate(request=REQUEST)


def test_bulk_becomes_its_length() -> None:
    assert to_plain(REQUEST, bulk=False)["prompt_tokens"] == 3
    start = StartTrajectory(
        purpose=Purpose.EVAL, key=TrajectoryKey(0, 1, 2), attempt=0, query={"question": "1+1", "answer": "2"}, seed=3
    )
    assert to_plain(start, bulk=False)["query"] == 2


def test_mapping_with_newtype_keys() -> None:
    outcome = OutcomeRecord(
        trajectory=TrajectoryKey(0, 0, 0), attempt=1, rewards={AgentName("a"): 1}, turns=(KEY,), success=None
    )
    restored = from_plain(OutcomeRecord, to_plain(outcome))
    assert restored == outcome
    assert type(restored.rewards[AgentName("a")]) is float


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"num_samples": True}, "Denominators.num_samples: expected int, got True"),
        ({"num_samples": "2"}, "expected int, got '2'"),
        ({"samples": 2}, "Denominators: unknown samples"),
        ([1, 2], "expected a mapping, got"),
    ],
)
def test_wrong_plain_data_names_the_field(plain: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_plain(Denominators, plain)


def test_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="DispatchRecord: missing max_version, min_version, num_trajectories, step"):
        from_plain(DispatchRecord, {"policy_version": 0, "queries": []})


def test_unknown_kind_and_version_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown record kind 'nonsense'"):
        from_tagged({"kind": "nonsense", "version": 1, "data": {}})
    with pytest.raises(ConfigError, match="worker_ready: written in version 2, this code reads 1"):
        from_tagged(to_tagged(WorkerReady(pid=1)) | {"version": 2})


def test_one_kind_has_one_class() -> None:
    assert kind_of(WorkerReady(pid=1)) == "worker_ready"
    with pytest.raises(InvariantError, match="two record types are tagged 'worker_ready'"):
        tagged("worker_ready")(Denominators)


def test_what_has_no_plain_form_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="cannot encode a complex"):
        to_plain(1j)
