"""The object plane between real processes: readers and writers that are killed, full file systems, imports."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.objects import HostObjectPlane

pytestmark = pytest.mark.crash

SIZE = 1 << 20
PRELUDE = """
import sys, hashlib
from pathlib import Path
from flexmarl.core.errors import StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.objects import HostObjectPlane
plane = HostObjectPlane(Path(sys.argv[1]))
def version(n): return ObjectKey("weights", "solver", n)
def filled(value, size):
    layout = plan_layout([("x", "uint8", (size,), size)])
    return PackedObject(layout=layout, buffer=memoryview(bytes([value]) * size))
def say(word): print(word, flush=True)
"""

Start = Callable[..., "subprocess.Popen[str]"]


def version(number: int) -> ObjectKey:
    return ObjectKey("weights", "solver", number)


def filled(value: int, num_bytes: int = SIZE) -> PackedObject:
    layout = plan_layout([("x", "uint8", (num_bytes,), num_bytes)])
    return PackedObject(layout=layout, buffer=memoryview(bytes([value]) * num_bytes))


def inode(folder: Path, number: int) -> int:
    return (folder / "objects" / f"weights,solver,{number}").stat().st_ino


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python programs on the same object folder; what is left of them at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, **options: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(tmp_path)]
        process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        assert process.stderr is not None
        pytest.fail(f"the process ended: {process.stderr.read()}")
    return line


def ask(process: "subprocess.Popen[str]", line: str = "go") -> str:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return answer(process)


READER = """
buffer = plane.packed(version(1)).buffer
say("mapped")
for line in sys.stdin:
    say(hashlib.sha256(buffer).hexdigest())
"""


def test_a_segment_is_not_overwritten_while_another_process_reads_it(tmp_path: Path, start: Start) -> None:
    plane = HostObjectPlane(tmp_path)
    plane.set(version(1), filled(1))
    first = inode(tmp_path, 1)
    reader = start(READER)
    assert answer(reader) == "mapped"
    before = ask(reader)

    plane.delete(version(1))
    plane.set(version(2), filled(2))

    assert inode(tmp_path, 2) != first
    assert ask(reader) == before


def test_a_killed_reader_lets_go_of_its_segment(tmp_path: Path, start: Start) -> None:
    plane = HostObjectPlane(tmp_path)
    plane.set(version(1), filled(1))
    first = inode(tmp_path, 1)
    reader = start(READER)
    assert answer(reader) == "mapped"
    plane.delete(version(1))

    os.kill(reader.pid, signal.SIGKILL)
    reader.wait(timeout=10)
    plane.set(version(2), filled(2))

    assert inode(tmp_path, 2) == first


def test_the_writer_may_die_while_others_read(tmp_path: Path, start: Start) -> None:
    writer = start('plane.set(version(1), filled(7, 100032)); say("stored"); sys.stdin.read()')
    assert answer(writer) == "stored"
    buffer = HostObjectPlane(tmp_path).packed(version(1)).buffer

    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(timeout=10)

    assert bytes(buffer) == b"\7" * 100032
    assert bytes(HostObjectPlane(tmp_path).packed(version(1)).buffer) == b"\7" * 100032


def test_a_writer_killed_half_way_leaves_a_free_segment_and_no_object(tmp_path: Path, start: Start) -> None:
    program = f"""
    def stuck(target, source):
        target[:100] = source[:100]
        say("writing")
        sys.stdin.read()
    from flexmarl.objects import host
    host._copy_bytes = stuck
    plane.set(version(1), filled(1, {SIZE}))
    """
    writer = start(program)
    assert answer(writer) == "writing"
    plane = HostObjectPlane(tmp_path)
    [half] = (tmp_path / "pool").iterdir()
    held = half.stat().st_ino

    plane.set(version(2), filled(2))
    assert inode(tmp_path, 2) != held
    assert plane.info(version(1)) is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(timeout=10)
    plane.set(version(1), filled(3))

    assert inode(tmp_path, 1) == held
    assert set(plane.packed(version(1)).buffer) == {3}


def test_readers_never_see_a_mixture_while_versions_come_and_go(tmp_path: Path, start: Start) -> None:
    program = """
    say("ready")
    newest, num_read, kept = 0, 0, []
    while newest < 299:
        for number in range(newest, 300):
            try:
                buffer = plane.packed(version(number)).buffer
            except StoreError as error:
                if "is not on the object plane" in str(error):
                    continue
                raise
            kept = [*kept[-2:], (buffer, number)]
            newest, num_read = number, num_read + 1
        for buffer, number in kept:
            assert bytes(buffer) == bytes([number % 256]) * len(buffer), number
    say(str(num_read))
    """
    readers = [start(program) for _ in range(2)]
    plane = HostObjectPlane(tmp_path)
    plane.set(version(0), filled(0, 1 << 16))
    for reader in readers:
        assert answer(reader) == "ready"

    for number in range(1, 300):
        plane.set(version(number), filled(number % 256, 1 << 16))
        plane.delete(version(number - 1))

    assert [int(answer(reader)) > 0 for reader in readers] == [True, True]
    assert len(list((tmp_path / "pool").iterdir())) < 20


def test_two_writers_of_one_key_agree_on_one_content(tmp_path: Path, start: Start) -> None:
    program = """
    say("ready")
    won = 0
    for line in sys.stdin:
        number = int(line)
        try:
            plane.set(version(number), filled(OWN, 4096))
            won += 1
        except StoreError as error:
            assert "other content" in str(error)
        say(str(won))
    """
    writers = [start(program.replace("OWN", str(own))) for own in (1, 2)]
    for writer in writers:
        assert answer(writer) == "ready"
    for number in range(50):
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(f"{number}\n")
            writer.stdin.flush()
        wins = [int(answer(writer)) for writer in writers]

        assert sum(wins) == number + 1
        assert len(set(HostObjectPlane(tmp_path).packed(version(number)).buffer)) == 1


def test_digests_are_equal_in_every_process(tmp_path: Path, start: Start) -> None:
    info = HostObjectPlane(tmp_path).set(version(1), filled(9)).result(1.0)

    reader = start("say(plane.packed(version(1)).digest()); say(plane.info(version(1)).digest)")

    assert [answer(reader), answer(reader)] == [info.digest, info.digest]


def test_objects_without_tensors_need_no_torch(start: Start) -> None:
    program = """
    plane.set(version(1), filled(1, 128))
    plane.packed(version(1)).digest(), plane.info(version(1))
    plane.delete(version(1))
    from flexmarl.objects import create_run_folder, list_run_folders, remove_run_folder
    list_run_folders()
    say(" ".join(sorted({"torch", "numpy", "transformers", "pydantic", "asyncio"} & sys.modules.keys())) or "none")
    """

    assert answer(start(program)) == "none"


def test_no_room_by_a_limit_on_files_is_an_error_that_says_so(tmp_path: Path, start: Start) -> None:
    program = """
    try:
        plane.set(version(1), filled(1, 200000))
    except StoreError as error:
        say(str(error))
    say(str(plane.info(version(1))))
    plane.set(version(2), filled(2, 49984))
    say(str(set(plane.packed(version(2)).buffer)))
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(program, preexec_fn=limit)

    message = answer(process)
    assert "no room for weights/solver/1: " in message
    assert " bytes needed, " in message
    assert str(tmp_path) in message
    assert [answer(process), answer(process)] == ["None", "{2}"]
    assert list((tmp_path / "pool").iterdir()) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A shared-memory file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_file_system_is_an_error_and_never_a_signal(small_tmpfs: Path) -> None:
    plane = HostObjectPlane(small_tmpfs)
    plane.set(version(1), filled(1, 600_000))

    with pytest.raises(StoreError, match=r"no room for weights/solver/2: \d+ bytes needed, \d+ free in .*small"):
        plane.set(version(2), filled(2, 600_000))

    assert plane.info(version(2)) is None
    assert set(plane.packed(version(1)).buffer) == {1}
    plane.delete(version(1))
    plane.set(version(2), filled(2, 600_000))
    assert set(plane.packed(version(2)).buffer) == {2}


def test_free_segments_make_room_before_a_set_fails(small_tmpfs: Path) -> None:
    plane, other = HostObjectPlane(small_tmpfs), HostObjectPlane(small_tmpfs)
    for number, writer in ((1, plane), (2, other)):
        writer.set(version(number), filled(number, 200_000))
    kept = plane.packed(version(2)).buffer
    for number in (1, 2):
        plane.delete(version(number))

    plane.set(version(3), filled(3, 700_032))

    assert set(plane.packed(version(3)).buffer) == {3}
    assert set(kept) == {2}
    with pytest.raises(StoreError, match="no room"):
        plane.set(version(4), filled(4, 300_032))
