"""Ctrl-C and termination, told to a run once and politely."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(on_stop: Callable[[str], object]) -> Iterator[None]:
    """Within the block, the first SIGINT or SIGTERM calls `on_stop(name)`; a further one raises KeyboardInterrupt.

    `on_stop` runs in the signal handler: let it do no more than `loop.call_soon_threadsafe`, which also wakes the loop.
    Outside the main thread, where Python delivers no signals, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        on_stop(signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
