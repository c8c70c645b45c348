import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.core.protocols import ObjectPlane, Tier
from flexmarl.objects import HostObjectPlane, host, segments

pytestmark = pytest.mark.unit

KEY = ObjectKey("weights", "solver", 3)
TENSORS = {
    "b": torch.tensor([[1.5, -0.0], [float("nan"), 3e-45]]),
    "a": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "count": torch.tensor(7, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 5, dtype=torch.float16),
    "turned": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
}


@pytest.fixture
def plane(tmp_path: Path) -> HostObjectPlane:
    return HostObjectPlane(tmp_path)


def version(number: int) -> ObjectKey:
    return ObjectKey("weights", "solver", number)


def packed_bytes(content: bytes) -> PackedObject:
    return PackedObject(layout=plan_layout([("x", "uint8", (len(content),), len(content))]), buffer=memoryview(content))


def filled(value: int, num_bytes: int = 1 << 16) -> PackedObject:
    return packed_bytes(bytes([value]) * num_bytes)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def inode(folder: Path, key: ObjectKey) -> int:
    return (folder / "objects" / f"{key.kind},{key.owner},{key.version}").stat().st_ino


def num_free(folder: Path) -> int:
    return len(list((folder / "pool").iterdir()))


# --- content ----------------------------------------------------------------------------------------------------------


def test_is_an_object_plane(plane: HostObjectPlane) -> None:
    seam: ObjectPlane = plane

    assert seam.info(KEY) is None


def test_returns_the_same_bits_types_and_shapes(plane: HostObjectPlane) -> None:
    plane.set(KEY, TENSORS).result(1.0)

    found = plane.get(KEY)

    assert list(found) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def test_every_tensor_begins_at_a_multiple_of_64_bytes(plane: HostObjectPlane) -> None:
    plane.set(KEY, TENSORS)

    assert [tensor.data_ptr() % 64 for tensor in plane.get(KEY).values() if tensor.numel()] == [0] * 5


def test_a_packed_object_keeps_its_bytes_and_hand_worked_digest(plane: HostObjectPlane) -> None:
    layout = plan_layout([("w", "uint8", (3,), 3), ("b", "uint8", (1,), 1)])
    content = b"abc" + bytes(61) + b"d" + bytes(63)

    info = plane.set(KEY, PackedObject(layout=layout, buffer=memoryview(content))).result(1.0)

    table = b'[["w","uint8",[3],0],["b","uint8",[1],64]]'
    assert info.digest == hashlib.sha256(table + content).hexdigest()
    assert info.num_bytes == 128
    assert plane.info(KEY) == info
    assert bytes(plane.packed(KEY).buffer) == content
    assert plane.packed(KEY).layout == layout
    assert bytes(plane.packed(KEY).bytes_of("b")) == b"d"


def test_mapping_and_packed_form_of_equal_tensors_have_one_digest(plane: HostObjectPlane) -> None:
    first = plane.set(KEY, TENSORS).result(1.0)

    again = plane.set(version(4), plane.packed(KEY)).result(1.0)

    assert again.digest == first.digest == plane.packed(version(4)).digest()


def test_other_processes_see_what_this_one_stored(plane: HostObjectPlane, tmp_path: Path) -> None:
    plane.set(KEY, TENSORS)

    assert bits(HostObjectPlane(tmp_path).get(KEY)["b"]) == bits(TENSORS["b"])


def test_an_empty_object_is_an_object(plane: HostObjectPlane) -> None:
    plane.set(KEY, {})

    assert plane.get(KEY) == {}
    assert len(plane.packed(KEY).buffer) == 0


def test_device_is_where_the_tensors_lie(plane: HostObjectPlane) -> None:
    plane.set(KEY, TENSORS)

    found = plane.get(KEY, device="meta")

    assert {tensor.device.type for tensor in found.values()} == {"meta"}
    assert found["turned"].shape == (3, 2)


def test_odd_names_do_not_meet(plane: HostObjectPlane) -> None:
    keys = [ObjectKey("a", "b,c", 1), ObjectKey("a,b", "c", 1), ObjectKey("a", "b%2Cc", 1), ObjectKey("../x", "/", 1)]
    for number, key in enumerate(keys):
        plane.set(key, filled(number))

    assert [plane.packed(key).buffer[0] for key in keys] == [0, 1, 2, 3]


# --- immutability -----------------------------------------------------------------------------------------------------


def test_the_same_content_again_changes_nothing(plane: HostObjectPlane, tmp_path: Path) -> None:
    first = plane.set(KEY, filled(1)).result(1.0)
    before = inode(tmp_path, KEY)

    assert plane.set(KEY, filled(1)).result(1.0) == first
    assert inode(tmp_path, KEY) == before


def test_other_content_under_a_key_is_refused_and_the_old_stays(plane: HostObjectPlane) -> None:
    plane.set(KEY, filled(1))

    with pytest.raises(StoreError, match="weights/solver/3 exists with other content"):
        plane.set(KEY, filled(2))
    assert bytes(plane.packed(KEY).buffer[:2]) == b"\1\1"


def test_the_same_bytes_under_another_name_are_other_content(plane: HostObjectPlane) -> None:
    plane.set(KEY, {"a": torch.ones(2)})

    with pytest.raises(StoreError, match="other content"):
        plane.set(KEY, {"b": torch.ones(2)})


def test_the_source_may_change_afterwards(plane: HostObjectPlane) -> None:
    source = torch.ones(100)
    plane.set(KEY, {"x": source}).result(1.0)

    source.zero_()

    assert plane.get(KEY)["x"].sum() == 100


def test_a_packed_buffer_cannot_be_written(plane: HostObjectPlane) -> None:
    plane.set(KEY, filled(1))

    with pytest.raises(TypeError, match="read-only"):
        plane.packed(KEY).buffer[0] = 2


def test_reading_does_not_copy(plane: HostObjectPlane, tmp_path: Path) -> None:
    plane.set(KEY, {"x": torch.arange(10_000.0)})

    tensor = plane.get(KEY)["x"]

    pages = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    [(rights, number)] = [
        (fields[1], int(fields[4]))
        for fields in pages
        if int(fields[0].split("-")[0], 16) <= tensor.data_ptr() < int(fields[0].split("-")[1], 16)
    ]
    assert (rights, number) == ("r--s", inode(tmp_path, KEY))


# --- recycling --------------------------------------------------------------------------------------------------------


def test_a_deleted_object_is_gone(plane: HostObjectPlane) -> None:
    plane.set(KEY, filled(1))
    plane.delete(KEY)
    plane.delete(KEY)

    assert plane.info(KEY) is None
    with pytest.raises(StoreError, match="weights/solver/3 is not on the object plane"):
        plane.get(KEY)


def test_a_segment_is_used_again(plane: HostObjectPlane, tmp_path: Path) -> None:
    plane.set(version(1), filled(1))
    first = inode(tmp_path, version(1))
    plane.delete(version(1))

    plane.set(version(2), filled(2))

    assert inode(tmp_path, version(2)) == first
    assert num_free(tmp_path) == 0
    assert set(plane.packed(version(2)).buffer) == {2}


def test_a_longer_version_needs_no_larger_segment(plane: HostObjectPlane, tmp_path: Path) -> None:
    def named(name: str) -> PackedObject:
        return PackedObject(layout=plan_layout([(name, "uint8", (64,), 64)]), buffer=memoryview(bytes(64)))

    short = host.Manifest(key=version(9), layout=named("").layout, digest="0" * 64)
    # With this name, header, bytes and manifest of version 9 fill whole pages to the last byte.
    filling = named("x" * (-(64 + len(host._encode(short))) % 4096))
    plane.set(version(9), filling)
    first = inode(tmp_path, version(9))
    plane.delete(version(9))

    plane.set(version(10), filling)

    assert inode(tmp_path, version(10)) == first


def test_a_segment_is_not_overwritten_while_it_is_read(plane: HostObjectPlane, tmp_path: Path) -> None:
    plane.set(version(1), filled(1))
    reader = plane.packed(version(1)).buffer[10:20]
    first = inode(tmp_path, version(1))
    plane.delete(version(1))

    plane.set(version(2), filled(2))

    assert bytes(reader) == b"\1" * 10
    assert inode(tmp_path, version(2)) != first
    del reader
    plane.set(version(3), filled(3))
    assert inode(tmp_path, version(3)) == first


def test_a_tensor_keeps_its_segment(plane: HostObjectPlane) -> None:
    plane.set(version(1), {"x": torch.ones(5000), "y": torch.ones(5000)})
    tensor = plane.get(version(1))["y"][7:9]
    plane.delete(version(1))

    plane.set(version(2), {"x": torch.zeros(5000), "y": torch.zeros(5000)})

    assert tensor.tolist() == [1.0, 1.0]


def test_takes_the_smallest_free_segment_that_fits_but_none_of_twice_the_size(
    plane: HostObjectPlane, tmp_path: Path
) -> None:
    sizes = {1: 400_000, 2: 200_000, 3: 300_032}
    for number, size in sizes.items():
        plane.set(version(number), filled(number, size))
    inodes = {number: inode(tmp_path, version(number)) for number in sizes}
    for number in sizes:
        plane.delete(version(number))

    plane.set(version(4), filled(4, 250_048))
    plane.set(version(5), filled(5, 40_000))

    assert inode(tmp_path, version(4)) == inodes[3]
    assert inode(tmp_path, version(5)) not in inodes.values()


def test_bytes_between_tensors_are_zero_in_a_used_segment_too(plane: HostObjectPlane) -> None:
    fresh = plane.set(version(1), TENSORS).result(1.0)
    plane.delete(version(1))
    plane.set(version(2), filled(255, fresh.num_bytes))
    plane.delete(version(2))

    assert plane.set(version(3), TENSORS).result(1.0).digest == fresh.digest


def test_a_set_that_fails_half_way_leaves_no_object_and_a_free_segment(plane: HostObjectPlane, tmp_path: Path) -> None:
    class Broken(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            raise RuntimeError(name)

    broken: Mapping[str, Tensor] = Broken(TENSORS)
    with pytest.raises(RuntimeError):
        plane.set(KEY, broken)

    assert plane.info(KEY) is None
    plane.set(KEY, TENSORS)
    assert num_free(tmp_path) == 0


def test_warm_maps_follow_the_segment_not_its_name(plane: HostObjectPlane, tmp_path: Path) -> None:
    other = HostObjectPlane(tmp_path)
    for number in range(12):
        writer = plane if number % 3 else other
        writer.set(version(number), filled(number, 1 << 14))
        assert set(other.packed(version(number)).buffer) == {number}
        plane.delete(version(number))

    assert num_free(tmp_path) == 1


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_the_disk_tier_is_refused_by_name(plane: HostObjectPlane) -> None:
    with pytest.raises(StoreError, match="no disk tier"):
        plane.set(KEY, filled(1), tier=Tier.DISK)


def test_a_buffer_of_another_length_than_its_layout_is_refused(plane: HostObjectPlane) -> None:
    with pytest.raises(StoreError, match="3 bytes for a layout of 64"):
        plane.set(KEY, PackedObject(layout=plan_layout([("x", "uint8", (3,), 3)]), buffer=memoryview(b"abc")))


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [(0, b"x", "header"), (4096 + 64, b"!", "manifest"), (16, b"\xff" * 6, "its header says"), (8, b"\0", "manifest")],
)
def test_a_damaged_file_is_named(
    plane: HostObjectPlane, tmp_path: Path, offset: int, content: bytes, message: str
) -> None:
    plane.set(KEY, {"x": torch.ones(3)})
    path = tmp_path / "objects" / "weights,solver,3"
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)

    with pytest.raises(StoreError, match=f"weights,solver,3 is damaged.*{message}"):
        plane.get(KEY)
    with pytest.raises(StoreError, match="is damaged"):
        plane.info(KEY)
    plane.delete(KEY)
    plane.set(KEY, {"x": torch.ones(3)})
    assert plane.get(KEY)["x"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("length", [0, 10, 4096, 6000])
def test_a_short_file_is_named(plane: HostObjectPlane, tmp_path: Path, length: int) -> None:
    plane.set(KEY, filled(1, 10_048))
    os.truncate(tmp_path / "objects" / "weights,solver,3", length)

    with pytest.raises(StoreError, match="weights,solver,3 is damaged"):
        plane.packed(KEY)


def test_a_file_under_the_name_of_another_object_is_refused(plane: HostObjectPlane, tmp_path: Path) -> None:
    plane.set(KEY, filled(1))
    os.rename(tmp_path / "objects" / "weights,solver,3", tmp_path / "objects" / "weights,solver,4")

    with pytest.raises(StoreError, match="expected weights/solver/4"):
        plane.get(version(4))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="gone cannot be used"):
        HostObjectPlane(tmp_path / "gone")


def test_a_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    plane = HostObjectPlane(folder)
    folder.rename(tmp_path / "elsewhere")

    for call in (lambda: plane.set(KEY, filled(1)), lambda: plane.info(KEY), lambda: plane.delete(KEY)):
        with pytest.raises(StoreError, match="run cannot be used"):
            call()


def test_waiting_for_the_folder_has_a_deadline(
    plane: HostObjectPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "LOCK_TIMEOUT_S", 0.0)
    fd = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    with pytest.raises(StoreError, match="was locked for 0 s"):
        plane.info(KEY)
    os.close(fd)
    assert plane.info(KEY) is None


def test_memory_is_reserved_where_the_system_has_no_fallocate(
    plane: HostObjectPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")

    plane.set(KEY, filled(1, (1 << 20) + 4992))

    status = (tmp_path / "objects" / "weights,solver,3").stat()
    assert status.st_blocks * 512 >= status.st_size > (1 << 20) + 4992
