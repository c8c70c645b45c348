import errno
import zlib
from pathlib import Path

import pytest

from flexmarl.core.errors import StoreError
from flexmarl.store.bytes_file import DiskSegments, MemoryBytes, MemorySegments
from flexmarl.store.payload import MAGIC, PayloadEnd, PayloadLog, PayloadSlot

pytestmark = pytest.mark.unit


class FullDisk(MemoryBytes):
    """Takes a few bytes of a write, then fails, when told to."""

    is_full = False

    def write_at(self, offset: int, data: bytes) -> None:
        if self.is_full:
            super().write_at(offset, data[:5])
            raise StoreError("disk full")
        super().write_at(offset, data)


class FullDiskSegments(MemorySegments):
    def __init__(self) -> None:
        super().__init__()
        self.file = FullDisk()
        self._files[1] = self.file


def test_records_lie_one_behind_the_other_with_length_and_checksum(tmp_path: Path) -> None:
    log = PayloadLog(DiskSegments(tmp_path))
    first, second = log.append([b"abc", b""], 0)
    assert first == PayloadSlot(segment=1, offset=8, num_bytes=11, checksum=zlib.crc32(b"abc"))
    assert second == PayloadSlot(segment=1, offset=19, num_bytes=8, checksum=0)
    content = (tmp_path / "payload-1.bin").read_bytes()
    assert content == MAGIC + b"\x03\0\0\0" + zlib.crc32(b"abc").to_bytes(4, "little") + b"abc" + bytes(8)
    assert (log.read(first), log.read(second)) == (b"abc", b"")
    log.close()


def test_a_reopened_log_goes_on_at_its_end(tmp_path: Path) -> None:
    log = PayloadLog(DiskSegments(tmp_path))
    (first,) = log.append([b"abc"], 0)
    log.close()
    log = PayloadLog(DiskSegments(tmp_path))
    (second,) = log.append([b"de"], 0)
    assert second.offset == first.end
    assert log.read(first) == b"abc"
    log.close()


def test_records_are_read_in_any_order_over_segments_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = PayloadLog(MemorySegments(), segment_bytes=30)
    slots = [slot for number in range(4) for slot in log.append([b"%d" % number, b"x" * number], 0)]
    assert {slot.segment for slot in slots} == {1, 2}
    wanted = [slots[5], slots[0], slots[1], slots[2], slots[6]]
    reads: list[int] = []
    read_at = MemoryBytes.read_at

    def count(file: MemoryBytes, offset: int, num_bytes: int) -> bytes:
        reads.append(num_bytes)
        return read_at(file, offset, num_bytes)

    monkeypatch.setattr(MemoryBytes, "read_at", count)
    assert log.read_many(wanted) == [b"xx", b"0", b"", b"1", b"3"]
    assert len([number for number in reads if number != len(MAGIC)]) == 3  # 5; 0 to 2; 6


@pytest.mark.parametrize("damaged_byte", [8, 12, 16, 18])
def test_a_changed_byte_anywhere_in_a_record_is_noticed(tmp_path: Path, damaged_byte: int) -> None:
    path = tmp_path / "payload-1.bin"
    log = PayloadLog(DiskSegments(tmp_path))
    (slot,) = log.append([b"abc"], 0)
    content = bytearray(path.read_bytes())
    content[damaged_byte] ^= 1
    path.write_bytes(content)
    assert not log.is_intact(slot)
    with pytest.raises(StoreError, match=r"payload-1\.bin is damaged: the record at byte 8"):
        log.read(slot)
    log.close()


def test_another_intact_record_in_the_same_place_is_noticed() -> None:
    log = PayloadLog(MemorySegments())
    (slot,) = log.append([b"abc"], 0)
    log.trim({})
    log.append([b"abd"], 0)
    assert not log.is_intact(slot)


def test_a_failed_append_leaves_the_log_as_it_was() -> None:
    files = FullDiskSegments()
    log = PayloadLog(files)
    (first,) = log.append([b"abc"], 0)
    files.file.is_full = True
    with pytest.raises(StoreError, match="disk full"):
        log.append([b"lost"], 0)
    files.file.is_full = False
    (second,) = log.append([b"de"], 0)
    assert second.offset == first.end
    assert (log.read(first), log.read(second)) == (b"abc", b"de")


def test_trimming_says_how_much_it_dropped_and_keeps_the_head() -> None:
    log = PayloadLog(MemorySegments())
    (first,) = log.append([b"abc"], 0)
    log.append([b"de"], 0)
    assert log.trim({1: first.end}) == 10
    assert log.trim({1: first.end}) == 0
    assert log.trim({}) == 11
    assert log.end == PayloadEnd(1, len(MAGIC))


def test_trimming_removes_segments_without_records_and_never_goes_back_in_number(tmp_path: Path) -> None:
    log = PayloadLog(DiskSegments(tmp_path), segment_bytes=16)
    slots = [slot for number in range(4) for slot in log.append([b"%09d" % number], number)]
    assert [slot.segment for slot in slots] == [1, 2, 3, 4]
    assert log.trim({2: slots[1].end}) == 2 * 25 + 17
    assert DiskSegments(tmp_path).numbers() == [2, 4]
    assert log.append([b"next"], 1)[0].segment == 4
    assert log.read(slots[1]) == b"%09d" % 1
    assert not log.is_intact(slots[0])
    log.close()


def test_segments_are_pruned_below_the_oldest_step_that_needs_them(tmp_path: Path) -> None:
    log = PayloadLog(DiskSegments(tmp_path))
    slots = []
    for steps in ((0,), (0, 1), (1, 0), (2,)):
        slots += [slot for step in steps for slot in log.append([b"step %d" % step], step)]
        log.roll()
        log.roll()  # an empty segment is not left behind
    assert [log.below(step) for step in range(4)] == [[], [1], [1, 2, 3], [1, 2, 3, 4]]
    log.prune(log.below(1), 1)
    assert DiskSegments(tmp_path).numbers() == [2, 3, 4, 5]
    message = "tokens of segment 1 have been deleted: the checkpoint of version 1 covers .* store.retention=all"
    with pytest.raises(StoreError, match=message):
        log.read(slots[0])
    assert log.read(slots[1]) == b"step 0"
    log.close()


def test_a_pruned_segment_that_was_not_deleted_before_a_kill_is_deleted_at_the_next_opening(tmp_path: Path) -> None:
    log = PayloadLog(DiskSegments(tmp_path))
    log.append([b"abc"], 0)
    log.roll()
    log.close()
    PayloadLog(DiskSegments(tmp_path), {1: 1}).close()
    assert DiskSegments(tmp_path).numbers() == [2]


def test_a_number_of_a_pruned_segment_is_not_used_again(tmp_path: Path) -> None:
    log = PayloadLog(DiskSegments(tmp_path), {3: 1, 5: 2})
    assert log.end == PayloadEnd(6, len(MAGIC))
    log.close()


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_file_of_something_else_is_refused(tmp_path: Path, is_newest: bool) -> None:
    log = PayloadLog(DiskSegments(tmp_path))
    (slot,) = log.append([b"abc"], 0)
    log.roll()
    log.close()
    (tmp_path / f"payload-{2 if is_newest else 1}.bin").write_bytes(b"FLXPAY01 and more")
    with pytest.raises(StoreError, match=r"payload-.\.bin starts with b'FLXPAY01', expected b'FLXPAY02'"):
        PayloadLog(DiskSegments(tmp_path)).read(slot)


def test_a_creation_that_was_killed_halfway_is_finished(tmp_path: Path) -> None:
    (tmp_path / "payload-1.bin").write_bytes(MAGIC[:3])
    PayloadLog(DiskSegments(tmp_path)).close()
    assert (tmp_path / "payload-1.bin").read_bytes() == MAGIC


def test_a_full_disk_is_a_store_error_that_names_file_and_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = PayloadLog(DiskSegments(tmp_path))

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StoreError, match=r"payload-1\.bin: No space left on device: the disk is full; free space"):
        log.append([b"abc"], 0)
    log.close()
