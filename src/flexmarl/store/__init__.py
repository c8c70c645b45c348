"""The experience store: every turn of a run, from generation to commit, exactly once.

Read `lifecycle.py` first: the states of a row and the moves between them. `sqlite_store.py` is the public face.
"""

from flexmarl.store.recovery import RecoveryReport
from flexmarl.store.sqlite_store import BlockingCall, SqliteStore

__all__ = ["BlockingCall", "RecoveryReport", "SqliteStore"]
