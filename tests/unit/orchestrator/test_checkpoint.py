"""Checkpoints: bit-exact, complete or absent, and clear about damage."""

import json
import os
from pathlib import Path

import pytest

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.orchestrator.checkpoint import (
    MANIFEST_NAME,
    PolicyToSave,
    data_digest,
    list_checkpoints,
    load_policy_state,
    read_manifest,
    write_checkpoint,
)
from flexmarl.runtime.simulated import MemoryObjectPlane

pytestmark = pytest.mark.unit

RED, BLUE = PolicyName("red"), PolicyName("blue")


def packed(content: bytes) -> PackedObject:
    """Three tensors of odd sizes, one empty, so that padding and order matter."""
    size = len(content)
    layout = plan_layout(
        [("z.weight", "uint8", (size,), size), ("a.bias", "float32", (1, 1), 4), ("none", "int64", (0,), 0)]
    )
    buffer = bytearray(layout.num_bytes)
    buffer[:size] = content
    start = layout.by_name["a.bias"].offset_bytes
    buffer[start : start + 4] = b"\x00\x00\xc0\x7f"  # a NaN, bit by bit
    return PackedObject(layout=layout, buffer=memoryview(buffer))


def state_key(policy: PolicyName, version: int) -> ObjectKey:
    return ObjectKey("state", policy, version)


@pytest.fixture
def objects() -> MemoryObjectPlane:
    plane = MemoryObjectPlane()
    for version in range(1, 6):
        for policy in (RED, BLUE):
            plane.set(state_key(policy, version), packed(f"{policy} {version}".encode() * 9))
    return plane


def write(folder: Path, version: int, objects: MemoryObjectPlane, *, keep_last: int = 2) -> Path:
    policies = {
        policy: PolicyToSave(
            weights_version=version, weights_digest=f"{policy}@{version}", state_key=state_key(policy, version)
        )
        for policy in (RED, BLUE)
    }
    return write_checkpoint(
        folder,
        policy_version=version,
        run_seed=7,
        queries_digest=data_digest([{"q": 1}]),
        policies=policies,
        objects=objects,
        keep_last=keep_last,
    )


def test_g5_a_round_trip_is_bit_exact(tmp_path: Path, objects: MemoryObjectPlane) -> None:
    path = write(tmp_path, 3, objects)
    manifest = read_manifest(path)
    assert (manifest.policy_version, manifest.run_seed, manifest.data_digest) == (3, 7, data_digest([{"q": 1}]))
    other = MemoryObjectPlane()
    for policy in (RED, BLUE):
        assert manifest.policies[policy].weights_version == 3
        assert manifest.policies[policy].weights_digest == f"{policy}@3"
        key = load_policy_state(path, policy, manifest, other)
        assert key == state_key(policy, 3)
        assert other.packed(key).digest() == objects.packed(key).digest()
        assert bytes(other.packed(key).buffer) == bytes(objects.packed(key).buffer)


def test_only_the_newest_are_kept(tmp_path: Path, objects: MemoryObjectPlane) -> None:
    for version in (1, 2, 3):
        write(tmp_path, version, objects)
    assert [version for version, _ in list_checkpoints(tmp_path)] == [2, 3]
    write(tmp_path, 4, objects, keep_last=1)
    assert list_checkpoints(tmp_path) == [(4, tmp_path / "step_4")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4"]


def test_versions_are_ordered_as_numbers(tmp_path: Path) -> None:
    for version in (10, 9, 100):
        folder = tmp_path / f"step_{version}"
        folder.mkdir()
        (folder / MANIFEST_NAME).touch()
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_11").mkdir()  # without a manifest
    assert [version for version, _ in list_checkpoints(tmp_path)] == [9, 10, 100]
    assert list_checkpoints(tmp_path / "none") == []


def test_g4_the_draft_of_a_crash_is_not_a_checkpoint(tmp_path: Path, objects: MemoryObjectPlane) -> None:
    write(tmp_path, 1, objects)
    complete = write(tmp_path, 2, objects)
    draft = tmp_path / ".step_3.draft"
    complete.rename(draft)  # complete in all but its name
    assert [version for version, _ in list_checkpoints(tmp_path)] == [1]
    path = write(tmp_path, 3, objects)
    assert read_manifest(path).policy_version == 3
    assert not draft.exists()


def test_a_checkpoint_written_again_replaces_the_old_one(tmp_path: Path, objects: MemoryObjectPlane) -> None:
    path = write(tmp_path, 1, objects)
    (path / "stray").touch()
    write(tmp_path, 1, objects)
    assert sorted(each.name for each in path.iterdir()) == ["blue.safetensors", "manifest.json", "red.safetensors"]


def test_g4_a_failed_write_leaves_older_checkpoints_and_no_draft(
    tmp_path: Path, objects: MemoryObjectPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        write(tmp_path, version, objects)

    def fail(source: object, target: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StoreError, match=r"cannot write checkpoint .*step_3: .*No space left.*free space"):
        write(tmp_path, 3, objects)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def test_g10_damage_is_said_with_the_way_out(tmp_path: Path, objects: MemoryObjectPlane) -> None:
    path = write(tmp_path, 1, objects)
    manifest = read_manifest(path)
    content = bytearray((path / "red.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "red.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match=r"red.safetensors is damaged: .*; remove .*step_1 to use an older one"):
        load_policy_state(path, RED, manifest, objects)
    (path / "blue.safetensors").unlink()
    with pytest.raises(StoreError, match="cannot read .*blue.safetensors"):
        load_policy_state(path, BLUE, manifest, objects)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format_version": 1}', '{"format_version": 1, "x": 2}'])
def test_g10_a_damaged_manifest(tmp_path: Path, objects: MemoryObjectPlane, content: str) -> None:
    path = write(tmp_path, 1, objects)
    (path / MANIFEST_NAME).write_text(content)
    with pytest.raises(StoreError, match=r"manifest.json is damaged or unreadable .*remove .*step_1"):
        read_manifest(path)


def test_g10_a_newer_format_is_not_damage(tmp_path: Path, objects: MemoryObjectPlane) -> None:
    path = write(tmp_path, 1, objects)
    plain = json.loads((path / MANIFEST_NAME).read_text())
    (path / MANIFEST_NAME).write_text(json.dumps({**plain, "format_version": 99, "future": True}))
    with pytest.raises(StoreError) as caught:
        read_manifest(path)
    assert "checkpoint format 99, this version of flexmarl reads 1" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_the_digest_of_the_data_sees_order_and_content() -> None:
    assert data_digest([{"a": 1, "b": 2}]) == data_digest([{"b": 2, "a": 1}])
    assert data_digest([{"a": 1}, {"a": 2}]) != data_digest([{"a": 2}, {"a": 1}])
