"""Memory of a tree of processes, as Linux counts it.

The proportional set size (PSS) splits shared pages among the processes that map them, so that a sum over processes
counts each page once. Elsewhere than on Linux the sums are 0.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROC = Path("/proc")


def process_tree(pid: int, *, proc: Path = _PROC) -> list[int]:
    """Return `pid` and all its descendants that live now, in rising order."""
    children = defaultdict(list)
    for entry in proc.glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:  # ended since it was listed
            continue
        # The name in parentheses may hold spaces and parentheses itself; the fields after the last one are numbers.
        parent = int(text.rpartition(")")[2].split()[1])
        children[parent].append(int(entry.parent.name))
    tree = []
    waiting = [pid]
    while waiting:
        tree.append(waiting.pop())
        waiting.extend(children[tree[-1]])
    return sorted(tree)


def pss_bytes(pids: Iterable[int], *, proc: Path = _PROC) -> int:
    """Return the sum of the PSS of the processes; one that has ended counts nothing."""
    total = 0
    for pid in pids:
        try:
            text = (proc / str(pid) / "smaps_rollup").read_text()
        except OSError:  # ended, or not ours to read
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


class PeakMemory:
    """The highest PSS seen of a process and its descendants; as good as the times at which it is sampled."""

    def __init__(self, pid: int | None = None) -> None:
        """Watch `pid`, by default this process."""
        self._pid = os.getpid() if pid is None else pid
        self.peak_pss_bytes = 0

    @contextmanager
    def watching(self, *, period_s: float) -> Iterator[None]:
        """Within the block, sample now, every `period_s` from a thread of its own, and at the end."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(period_s):
                self.sample()

        self.sample()
        watcher = threading.Thread(target=watch, name="memory", daemon=True)
        watcher.start()
        try:
            yield
            self.sample()
        finally:
            is_over.set()
            watcher.join()

    def sample(self) -> int:
        """Measure now, keep the peak, return the present sum. Takes some milliseconds per process of a GB."""
        present = pss_bytes(process_tree(self._pid))
        self.peak_pss_bytes = max(self.peak_pss_bytes, present)
        return present
