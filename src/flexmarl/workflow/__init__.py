"""The user's API: a workflow is an async function of an Episode. Start with `api.py`, then `turns.py`.

`worker.py` runs workflows; `teams/` and `tasks/` hold what is built in.
"""

import sys
from types import ModuleType

from flexmarl.workflow.api import AgentHandle, Episode, F, Outcome, workflow
from flexmarl.workflow.turns import Turn

__all__ = ["AgentHandle", "Episode", "Outcome", "Turn", "workflow"]


class _Decorator(ModuleType):
    """Once this package is imported, `flexmarl.workflow` is the package: as a decorator it does what users mean."""

    def __call__(self, function: F) -> F:
        return workflow(function)


sys.modules[__name__].__class__ = _Decorator
