"""The command `flexmarl`: parses arguments, shows progress, turns errors into exit codes. Start with `commands.py`.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped by a signal.
Importing this package loads neither torch, ray, vllm nor transformers.
"""

from flexmarl.cli.commands import main

__all__ = ["main"]
