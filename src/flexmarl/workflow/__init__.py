"""The user's API: a workflow is an async function of an Episode. Start with `api.py`.

`worker.py` runs workflows; `teams/` and `tasks/` hold what is built in.
"""

from flexmarl.workflow.api import AgentHandle, Episode, Outcome, Turn, workflow

__all__ = ["AgentHandle", "Episode", "Outcome", "Turn", "workflow"]
