"""The index and the payload log of one store, and the transactions over both."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.store.database import Database
from flexmarl.store.payload import PayloadLog
from flexmarl.store.rows import PolicyTable
from flexmarl.store.schema import prepare_schema, write_meta


class Index:
    """What every operation of the store works on.

    Invariant: after a durable transaction, every payload that the index points to has been synced.
    """

    def __init__(self, database: Database, payload: PayloadLog) -> None:
        """Create the tables, or load the policies that have one.

        Raises:
            StoreError: the database holds something else, or was written by newer code.
        """
        self.database = database
        self.payload = payload
        prepare_schema(self.connection, database.name)
        self.tables: dict[PolicyName, PolicyTable] = {}
        """By policy, in the order of their first row."""
        for number, policy in self._written_policies():
            self.tables[policy] = PolicyTable(self.connection, payload, policy, number)

    def _written_policies(self) -> list[tuple[int, PolicyName]]:
        return self.connection.execute("SELECT number, policy FROM policies ORDER BY number").fetchall()

    def forget_unwritten_tables(self) -> None:
        """After transactions were undone: a policy's table that one of them made is not there any more."""
        written = {policy for _, policy in self._written_policies()}
        self.tables = {policy: table for policy, table in self.tables.items() if policy in written}

    @property
    def connection(self) -> sqlite3.Connection:
        """For reads, and for statements inside a transaction."""
        return self.database.connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; survives SIGKILL of this process on return."""
        with self.database.transaction() as connection:
            yield connection

    @contextmanager
    def durable_transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; on return it and everything before it survive power loss."""
        self.payload.sync()
        with self.database.transaction(durable=True) as connection:
            write_meta(connection, "payload_synced_bytes", self.payload.num_bytes)
            yield connection

    def table(self, policy: PolicyName, key: SampleKey) -> PolicyTable:
        """Return the table in which `key` must be.

        Raises:
            InvariantError: the policy has no row at all.
        """
        if policy not in self.tables:
            raise InvariantError(f"{key}: policy {policy!r} has no rows; known: {', '.join(self.tables) or 'none'}")
        return self.tables[policy]

    def table_for_rows(self, policy: PolicyName) -> PolicyTable:
        """Return the policy's table, created on first use. Not to be called inside a transaction."""
        table = self.tables.get(policy)
        if table is None:
            number = len(self.tables)
            table = PolicyTable(self.connection, self.payload, policy, number)
            with self.transaction() as connection:
                connection.execute("INSERT INTO policies VALUES (?, ?)", (number, policy))
                table.create()
            self.tables[policy] = table
        return table

    def close(self) -> None:
        """Release the files."""
        self.database.close()
        self.payload.close()
