"""Ctrl-C, termination and a closed terminal, told to a run once and politely."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(on_stop: Callable[[str], object]) -> Iterator[None]:
    """Within the block, the first SIGINT, SIGTERM or SIGHUP calls `on_stop(name)`.

    A further SIGINT or SIGTERM raises KeyboardInterrupt. A further SIGHUP does nothing: a terminal that closes sends
    it, and its shell once more. Where SIGHUP is ignored (nohup) it stays so.

    `on_stop` runs in the signal handler: let it do no more than `loop.call_soon_threadsafe`, which also wakes the loop.
    Outside the main thread, where Python delivers no signals, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            on_stop(signal.Signals(number).name)
        elif number != signal.SIGHUP:
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
