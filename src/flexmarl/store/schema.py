"""The tables of `index.db`, and the version of their format.

Besides one table of rows per policy (`rows.py`) there are: dispatches and their extensions, attempts, outcomes, leases,
seals, commits, fenced holders, pruned segments of the payload log, the policies with the numbers of their tables and
their declared columns, and `meta`. Records are kept as JSON, so that any tool can read them.
"""

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, TypeVar

from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import StoreError
from flexmarl.core.ids import SampleKey
from flexmarl.core.records import OutcomeRecord

T = TypeVar("T")

FORMAT_VERSION = 3
"""Rises when a table or a record changes so that older code would misread it."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE policies (number INTEGER PRIMARY KEY, policy TEXT NOT NULL UNIQUE, columns TEXT NOT NULL);
CREATE TABLE dispatches (step INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE extensions (
    step INTEGER NOT NULL, number INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (step, number)
) WITHOUT ROWID;
CREATE TABLE attempts (
    step INTEGER NOT NULL, query INTEGER NOT NULL, trajectory INTEGER NOT NULL, attempt INTEGER NOT NULL,
    PRIMARY KEY (step, query, trajectory, attempt)
) WITHOUT ROWID;
CREATE TABLE outcomes (
    step INTEGER NOT NULL, query INTEGER NOT NULL, trajectory INTEGER NOT NULL, attempt INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('outcome', 'failure')), record TEXT NOT NULL,
    PRIMARY KEY (step, query, trajectory, attempt)
) WITHOUT ROWID;
CREATE TABLE leases (
    lease_id INTEGER PRIMARY KEY AUTOINCREMENT, policy TEXT NOT NULL, step INTEGER NOT NULL, holder TEXT NOT NULL,
    micro_batch_id TEXT NOT NULL, num_rows INTEGER NOT NULL, keys TEXT NOT NULL,
    status TEXT NOT NULL
);
CREATE UNIQUE INDEX leases_by_micro_batch ON leases (policy, step, micro_batch_id) WHERE status <> 'released';
CREATE INDEX leases_unsealed ON leases (holder) WHERE status = 'active' OR status = 'acknowledged';
CREATE TABLE seals (
    policy TEXT NOT NULL, step INTEGER NOT NULL, number INTEGER NOT NULL, holder TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (policy, step, number)
) WITHOUT ROWID;
CREATE TABLE commits (step INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL UNIQUE, record TEXT NOT NULL);
CREATE TABLE fenced (holder TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE pruned_segments (segment INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL);
"""

STEP_TABLES = ("dispatches", "extensions", "attempts", "outcomes", "leases", "seals", "commits")
"""Tables with a `step` column, which a rewind empties from a step on."""


def prepare_schema(connection: sqlite3.Connection, name: str) -> None:
    """Create the tables in an empty file, or check that they are of this format.

    Raises:
        StoreError: the file holds something else, or was written by newer code.
    """
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if not tables:
        version = (
            f"INSERT INTO meta VALUES ('format_version', {FORMAT_VERSION}), ('payload_synced_segment', 0), "
            "('payload_synced_bytes', 0), ('begins_at', 0);"
        )
        connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} {version} COMMIT;")
        return
    if "meta" not in tables:
        raise StoreError(f"{name} is a database of something else: move it away, or choose another run.dir")
    check_format(connection, name)


def check_format(connection: sqlite3.Connection, name: str) -> None:
    """Refuse a store that other code wrote.

    Raises:
        StoreError: its format is older or newer.
    """
    found = read_meta(connection, "format_version")
    if found != FORMAT_VERSION:
        raise StoreError(
            f"{name} has store format_version {found}, this version of FlexMARL reads {FORMAT_VERSION}: "
            "use the version of FlexMARL that wrote it, or choose another run.dir"
        )


def read_meta(connection: sqlite3.Connection, name: str) -> int:
    """Return a number of the `meta` table."""
    return int(connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()[0])


def write_meta(connection: sqlite3.Connection, name: str, value: int) -> None:
    """Change a number of the `meta` table."""
    connection.execute("UPDATE meta SET value=? WHERE name=?", (value, name))


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
"""Kept: `json.dumps` makes one for every call that has options."""


def encode_record(record: object) -> str:
    """Return a record as JSON in one spelling: equal records have equal texts."""
    return _JSON.encode(to_plain(record))


def encode_outcome(outcome: OutcomeRecord) -> str:
    """Return what `encode_record` does, sooner: there is one for every trajectory."""
    key = outcome.trajectory
    plain = {
        "trajectory": {"step": key.step, "query": key.query, "trajectory": key.trajectory},
        "attempt": outcome.attempt,
        "rewards": dict(outcome.rewards),
        "turn_rewards": to_plain(outcome.turn_rewards) if outcome.turn_rewards else [],
        "turns": [
            {
                "step": turn.step,
                "query": turn.query,
                "trajectory": turn.trajectory,
                "agent": turn.agent,
                "branch": turn.branch,
                "turn": turn.turn,
            }
            for turn in outcome.turns
        ],
        "success": outcome.success,
        "metrics": dict(outcome.metrics),
        "turn_columns": to_plain(outcome.turn_columns) if outcome.turn_columns else [],
    }
    return _JSON.encode(plain)


def decode_record(cls: type[T], text: str) -> T:
    """Return the record that `encode_record` wrote."""
    plain: Any = json.loads(text)
    return from_plain(cls, plain)


def encode_keys(keys: Sequence[tuple[int, int, str, int, int]]) -> str:
    """Return the rows of a lease as JSON; their keys are given without the step."""
    return _JSON.encode(keys)


def decode_keys(step: int, text: str) -> list[SampleKey]:
    """Return the rows that `encode_keys` wrote."""
    return [SampleKey(step, *columns) for columns in json.loads(text)]
