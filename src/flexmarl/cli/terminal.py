"""A terminal that may be closed while the run goes on, or saves a checkpoint because of it."""

import errno
import os
import sys
from collections.abc import Callable

_GONE = (errno.EIO, errno.EPIPE)


class LastingTerminal:
    """A text file that writes to standard output until its terminal is gone, and then nowhere."""

    def __init__(self) -> None:
        """Take standard output as it is."""
        self._file = sys.stdout
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def write(self, text: str) -> int:
        """Write text; returns its length."""
        self._do(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._do(self._file.flush)

    def _do(self, output: Callable[[], object]) -> None:
        try:
            output()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._leave()

    def _leave(self) -> None:
        """Send all that is said from now on, errors too, nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)

    def __getattr__(self, name: str) -> object:
        """Be standard output in all else."""
        return getattr(self._file, name)
