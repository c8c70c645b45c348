import errno
import zlib
from pathlib import Path

import pytest
from store_builders import key, turn_row

from flexmarl.core.errors import StoreError
from flexmarl.store.payload import MAGIC, DiskBytes, MemoryBytes, PayloadLog, PayloadSlot, pack_turn, unpack_turn

pytestmark = pytest.mark.unit


class FullDisk(MemoryBytes):
    """Takes a few bytes of a write, then fails, when told to."""

    is_full = False

    def write_at(self, offset: int, data: bytes) -> None:
        if self.is_full:
            super().write_at(offset, data[:5])
            raise StoreError("disk full")
        super().write_at(offset, data)


def test_records_lie_one_behind_the_other_with_length_and_checksum(tmp_path: Path) -> None:
    log = PayloadLog(DiskBytes(tmp_path / "payload.bin"))
    first, second = log.append(b"abc"), log.append(b"")
    assert first == PayloadSlot(offset=8, num_bytes=11, checksum=zlib.crc32(b"abc"))
    assert second == PayloadSlot(offset=19, num_bytes=8, checksum=0)
    content = (tmp_path / "payload.bin").read_bytes()
    assert content == MAGIC + b"\x03\0\0\0" + zlib.crc32(b"abc").to_bytes(4, "little") + b"abc" + bytes(8)
    assert (log.read(first), log.read(second)) == (b"abc", b"")
    log.close()


def test_a_reopened_log_goes_on_at_its_end(tmp_path: Path) -> None:
    log = PayloadLog(DiskBytes(tmp_path / "payload.bin"))
    first = log.append(b"abc")
    log.close()
    log = PayloadLog(DiskBytes(tmp_path / "payload.bin"))
    second = log.append(b"de")
    assert second.offset == first.end
    assert log.read(first) == b"abc"
    log.close()


@pytest.mark.parametrize("damaged_byte", [8, 12, 16, 18])
def test_a_changed_byte_anywhere_in_a_record_is_noticed(tmp_path: Path, damaged_byte: int) -> None:
    path = tmp_path / "payload.bin"
    log = PayloadLog(DiskBytes(path))
    slot = log.append(b"abc")
    content = bytearray(path.read_bytes())
    content[damaged_byte] ^= 1
    path.write_bytes(content)
    assert not log.is_intact(slot)
    with pytest.raises(StoreError, match=r"payload\.bin is damaged: the record at byte 8"):
        log.read(slot)
    log.close()


def test_another_intact_record_in_the_same_place_is_noticed() -> None:
    log = PayloadLog(MemoryBytes())
    slot = log.append(b"abc")
    log.truncate(slot.offset)
    log.append(b"abd")
    assert not log.is_intact(slot)


def test_a_failed_append_leaves_the_log_as_it_was() -> None:
    file = FullDisk()
    log = PayloadLog(file)
    first = log.append(b"abc")
    file.is_full = True
    with pytest.raises(StoreError, match="disk full"):
        log.append(b"lost")
    file.is_full = False
    second = log.append(b"de")
    assert second.offset == first.end
    assert (log.read(first), log.read(second)) == (b"abc", b"de")


def test_truncate_says_how_much_it_dropped_and_keeps_the_head() -> None:
    log = PayloadLog(MemoryBytes())
    first = log.append(b"abc")
    log.append(b"de")
    assert log.truncate(first.end) == 10
    assert log.truncate(first.end) == 0
    assert log.truncate(0) == 11
    assert log.num_bytes == len(MAGIC)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "payload.bin").write_bytes(b"FLXPAY02 and more")
    with pytest.raises(StoreError, match=r"payload\.bin starts with b'FLXPAY02', expected b'FLXPAY01'"):
        PayloadLog(DiskBytes(tmp_path / "payload.bin"))


def test_a_creation_that_was_killed_halfway_is_finished(tmp_path: Path) -> None:
    (tmp_path / "payload.bin").write_bytes(MAGIC[:3])
    PayloadLog(DiskBytes(tmp_path / "payload.bin")).close()
    assert (tmp_path / "payload.bin").read_bytes() == MAGIC


def test_a_full_disk_is_a_store_error_that_names_file_and_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = PayloadLog(DiskBytes(tmp_path / "payload.bin"))

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StoreError, match=r"payload\.bin: No space left on device: the disk is full; free space"):
        log.append(b"abc")
    log.close()


def test_a_turn_comes_back_bit_for_bit() -> None:
    row = turn_row(key(), tokens=(0, 127, 128, 151_643))
    lists = unpack_turn(pack_turn(row))
    assert lists.prompt_tokens == (1, 2)
    assert lists.response_tokens == (0, 127, 128, 151_643)
    assert [value.hex() for value in lists.logprobs] == [value.hex() for value in row.logprobs]
    assert lists.version_spans == ((0, 4, 0),)
