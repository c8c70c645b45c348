"""Frames: whatever way the bytes are cut, the same frames come out."""

import pytest

from flexmarl.core.codec import from_tagged
from flexmarl.core.errors import BackendError
from flexmarl.runtime.local.wire import FrameDecoder, FrameKind, encode_frame, encode_record
from flexmarl.testing.workers import Note

pytestmark = pytest.mark.unit


def test_a_frame_is_length_and_msgpack() -> None:
    # 0x92: array of two; 0xa4: string of four; 0x07: the integer 7.
    assert encode_frame(FrameKind.STOP, 7) == b"\x00\x00\x00\x07\x92\xa4stop\x07"


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 10_000])
def test_frames_survive_any_cut(chunk: int) -> None:
    notes = [Note(text="t" * number, number=number, content=bytes(range(number))) for number in range(40)]
    stream = b"".join(encode_record(FrameKind.FACT, note) for note in notes)
    decoder = FrameDecoder()
    frames = [frame for start in range(0, len(stream), chunk) for frame in decoder.feed(stream[start : start + chunk])]
    assert [kind for kind, _ in frames] == [FrameKind.FACT] * 40
    assert [from_tagged(payload) for _, payload in frames] == notes


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff\xff\xff\xff", "claims 4294967295 bytes, over the limit of 1000"),
        (b"\x00\x00\x00\x01\xc1", "cannot be read"),
        (b"\x00\x00\x00\x02\x91\x01", "cannot be read"),
        (b"\x00\x00\x00\x08\x92\xa5other\x01", "cannot be read: 'other' is not a valid FrameKind"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(BackendError, match=problem):
        FrameDecoder(max_bytes=1000).feed(data)


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(BackendError, match="message test_note: cannot write a command frame: .*out of range"):
        encode_record(FrameKind.COMMAND, Note(text="", number=2**64))
    with pytest.raises(BackendError, match="message test_note: a command frame of .* bytes is over the limit of 100"):
        encode_record(FrameKind.COMMAND, Note(text="", content=bytes(100)), max_bytes=100)
