"""The command `flexmarl`: parses arguments, shows progress, turns errors into exit codes. Start with `commands.py`.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped by a signal.
Importing this package loads neither torch, ray, vllm nor transformers.
"""

import sys

EXIT_STOPPED = 130

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process. Ctrl-C ends it without a traceback, also while it still imports."""
    try:
        from flexmarl.cli.commands import run
    except KeyboardInterrupt:
        sys.exit(EXIT_STOPPED)
    run()
