"""Ids, layouts, seeds and errors: small values of core."""

import pytest

from flexmarl.core.errors import BackendError, ConfigError, FlexMARLError, StoreError
from flexmarl.core.ids import AgentName, ObjectKey, SampleKey, TrajectoryKey
from flexmarl.core.layout import PackedObject, packed_digest, plan_layout
from flexmarl.core.records import Denominators, DispatchRecord
from flexmarl.core.rng import HashRng, derive_seed

pytestmark = pytest.mark.unit


def test_sample_keys_sort_by_step_query_trajectory_agent_branch_turn() -> None:
    keys = [
        SampleKey(0, 1, 0, AgentName("b"), 0, 0),
        SampleKey(0, 0, 1, AgentName("a"), 1, 0),
        SampleKey(0, 0, 1, AgentName("a"), 0, 1),
        SampleKey(1, 0, 0, AgentName("a"), 0, 0),
        SampleKey(0, 0, 1, AgentName("a"), 0, 0),
    ]
    assert [str(key) for key in sorted(keys)] == [
        "s0/q0/t1/a/b0/n0",
        "s0/q0/t1/a/b0/n1",
        "s0/q0/t1/a/b1/n0",
        "s0/q1/t0/b/b0/n0",
        "s1/q0/t0/a/b0/n0",
    ]


def test_names_of_keys() -> None:
    key = SampleKey(2, 7, 3, AgentName("solver"), 0, 1)
    assert key.sample_id == "7_1_3"
    assert key.trajectory_key == TrajectoryKey(2, 7, 3)
    assert str(ObjectKey("weights", "solver", 4)) == "weights/solver/4"


def test_dispatch_lists_trajectories_in_query_order() -> None:
    dispatch = DispatchRecord(step=1, min_version=1, max_version=1, queries=(5, 2), num_trajectories=2)
    assert [str(key) for key in dispatch.trajectories()] == ["s1/q5/t0", "s1/q5/t1", "s1/q2/t0", "s1/q2/t1"]


def test_denominators_add() -> None:
    total = Denominators(num_samples=1, num_tokens=10).plus(Denominators(num_samples=2, num_tokens=5))
    assert total == Denominators(num_samples=3, num_tokens=15)


def test_layout_aligns_to_64_bytes() -> None:
    layout = plan_layout([("a", "float32", (3,), 12), ("b", "uint8", (64,), 64), ("c", "uint8", (65,), 65)])
    assert [entry.offset_bytes for entry in layout.entries] == [0, 64, 128]
    assert layout.num_bytes == 256
    packed = PackedObject(layout=layout, buffer=memoryview(bytes(range(256))))
    assert packed.bytes_of("b") == bytes(range(64, 128))


def test_digest_depends_on_names_shapes_and_bytes() -> None:
    def digest(name: str, shape: tuple[int, ...], content: bytes) -> str:
        layout = plan_layout([(name, "uint8", shape, 4)])
        return packed_digest(layout, memoryview(content.ljust(64, b"\0")))

    digests = [digest("a", (4,), b"abcd"), digest("b", (4,), b"abcd"), digest("a", (2, 2), b"abcd")]
    assert len({*digests, digest("a", (4,), b"abce")}) == 4
    assert digests[0] == digest("a", (4,), b"abcd")


def test_seeds_depend_on_every_part_its_type_and_place() -> None:
    seeds = [derive_seed(0, 1), derive_seed(1, 0), derive_seed("0", 1), derive_seed(0, 1, 0), derive_seed(1, 1)]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Fixed for ever: a resumed run, and a run of another machine, must draw the same.
    assert derive_seed(0, "step", 3) == 3682731969824832128


def test_hash_rng_is_a_fixed_stream() -> None:
    rng = HashRng(7)
    assert [rng.below(100) for _ in range(5)] == [HashRng(7).below(100), *[rng_value(7, n) for n in range(1, 5)]]
    items = list(range(6))
    HashRng(1).shuffle(items)
    assert sorted(items) == list(range(6))
    assert items != list(range(6))


def rng_value(seed: int, skip: int) -> int:
    rng = HashRng(seed)
    for _ in range(skip):
        rng.random()
    return rng.below(100)


def test_error_tree() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(StoreError, BackendError)
    assert issubclass(BackendError, FlexMARLError)
