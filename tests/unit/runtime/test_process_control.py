"""Marks and start times of processes."""

import os
import sys
from pathlib import Path

import pytest

from flexmarl.runtime.local.loop_watchdog import user_location
from flexmarl.runtime.local.process_control import MARK_VARIABLE, kill_marked, start_time_ticks

pytestmark = pytest.mark.unit


def _start(mark: str | None) -> int:
    environment = {} if mark is None else {MARK_VARIABLE: mark}
    return os.posix_spawn("/bin/sleep", ["sleep", "60"], environment)


def test_only_processes_with_the_mark_or_below_it_are_killed() -> None:
    marked = [_start("aa/1"), _start("aa/2"), _start("aa")]
    others = [_start("aab/1"), _start("ab"), _start(None)]
    try:
        assert kill_marked("aa/1") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(marked[0], 0)[1]) == -9
        assert kill_marked("aa", wait_s=2.0) == 2
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1]) for pid in marked[1:]] == [-9, -9]
        assert [os.waitpid(pid, os.WNOHANG) for pid in others] == [(0, 0)] * 3
    finally:
        for pid in others:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_process_has_a_start_time_until_it_has_ended() -> None:
    pid = _start(None)
    mine, started = start_time_ticks(os.getpid()), start_time_ticks(pid)
    assert mine is not None
    assert started is not None
    assert started >= mine
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert start_time_ticks(pid) is None  # a zombie
    os.waitpid(pid, 0)
    assert start_time_ticks(pid) is None


def test_user_location_is_the_innermost_line_outside_libraries() -> None:
    seen: list[str] = []

    def key(_: int) -> int:
        seen.append(user_location(sys._getframe()))
        return 0

    sorted([1], key=key)
    # A frame of the standard library above ours is skipped, ours is found.
    import functools

    lines: list[int] = []

    class Recorder:
        @functools.cached_property
        def value(self) -> int:
            frame = sys._getframe(1)
            assert Path(frame.f_code.co_filename).name == "functools.py"
            seen.append(user_location(frame))
            return 0

    lines.append(sys._getframe().f_lineno + 1)
    assert Recorder().value == 0
    assert seen[0].startswith(f"{__file__}:")
    assert seen[1] == f"{__file__}:{lines[0]}"
