"""The experience store: every turn of a run, from generation to commit, exactly once.

Read `lifecycle.py` first: the states of a row and the moves between them. `sqlite_store.py` is the public face;
`packing.py` has the forms in which rows cross a socket.
"""

from flexmarl.store.batch import PackedBatch
from flexmarl.store.operations import BlockingCall
from flexmarl.store.packing import (
    PackedSample,
    PackedTrajectory,
    PackedTurn,
    pack_finished,
    pack_turn,
    unpack_sample,
    unpack_turn,
)
from flexmarl.store.recovery import RecoveryReport
from flexmarl.store.sqlite_store import SqliteStore
from flexmarl.store.view import StoreView

__all__ = [
    "BlockingCall",
    "PackedBatch",
    "PackedSample",
    "PackedTrajectory",
    "PackedTurn",
    "RecoveryReport",
    "SqliteStore",
    "StoreView",
    "pack_finished",
    "pack_turn",
    "unpack_sample",
    "unpack_turn",
]
