import os
import signal
import threading
from pathlib import Path

import pytest

from flexmarl.telemetry import PeakMemory, process_tree, pss_bytes, stop_signals

pytestmark = pytest.mark.unit


def fake_process(proc: Path, pid: int, parent: int, pss_kb: int, name: str = "python") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1")
    (proc / str(pid) / "smaps_rollup").write_text(
        f"55d0-7ffe ---p 0 00:00 0 [rollup]\nRss: 900 kB\nPss: {pss_kb} kB\nPss_Anon: 5 kB\n"
    )


def test_tree_and_sum(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, 1, 100)
    fake_process(tmp_path, 11, 10, 20, name="a) S 99 (b")
    fake_process(tmp_path, 12, 11, 3)
    fake_process(tmp_path, 20, 1, 1000)
    (tmp_path / "self").mkdir()
    assert process_tree(10, proc=tmp_path) == [10, 11, 12]
    assert pss_bytes([10, 11, 12], proc=tmp_path) == 123 * 1024
    assert pss_bytes([10, 404], proc=tmp_path) == 100 * 1024


def test_this_process_has_memory() -> None:
    memory = PeakMemory()
    present = memory.sample()
    assert present > 1_000_000
    assert memory.peak_pss_bytes == present


def test_first_signal_asks_and_second_aborts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked: list[str] = []
    with stop_signals(asked.append):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["SIGTERM"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert asked == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_asks_once_however_often_it_says_so() -> None:
    asked: list[str] = []
    with stop_signals(asked.append):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["SIGHUP"]


def test_an_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(lambda name: pytest.fail(name)):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_changes() -> None:
    handlers: list[object] = []

    def work() -> None:
        with stop_signals(lambda name: None):
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=5)
    assert handlers == [before]
