"""The index and the payload log of one store, and the transactions over both."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flexmarl.core.errors import InvariantError
from flexmarl.core.ids import PolicyName, SampleKey, TrajectoryKey
from flexmarl.core.protocols import PolicyColumns
from flexmarl.core.records import DispatchRecord, StepExtension
from flexmarl.store.bytes_file import SegmentFiles
from flexmarl.store.columns import check_declaration, encode_columns, require_same_declaration
from flexmarl.store.database import Database
from flexmarl.store.payload import PayloadLog
from flexmarl.store.plan import StepPlan
from flexmarl.store.rows import PolicyTable
from flexmarl.store.schema import decode_record, prepare_schema, write_meta


class Index:
    """What every operation of the store works on.

    Invariant: after a durable transaction, every payload that the index points to has been synced.
    """

    def __init__(
        self, database: Database, files: SegmentFiles, columns: Mapping[PolicyName, PolicyColumns] | None = None
    ) -> None:
        """Create the tables, or load the policies that have one; `columns` of None takes those that are there.

        Raises:
            ConfigError: a declaration of columns is wrong.
            StoreError: the database holds something else, was written by other code, or has other columns.
        """
        self.database = database
        prepare_schema(self.connection, database.name)
        pruned = self.connection.execute("SELECT segment, policy_version FROM pruned_segments").fetchall()
        self.payload = PayloadLog(files, dict(pruned))
        self.tables: dict[PolicyName, PolicyTable] = {}
        """By policy, in the order in which they were made."""
        self.woken: set[PolicyName] = set()
        """Policies that got ready rows since they were last taken from here; perhaps a few more."""
        self._plans: dict[int, StepPlan] = {}
        for number, policy, text in self._written_policies():
            self.tables[policy] = self._table(policy, number, decode_record(PolicyColumns, text))
        self.declare(columns or {})

    def declare(self, columns: Mapping[PolicyName, PolicyColumns]) -> None:
        """Take the columns of each policy's table; what rows in flight need cannot change.

        Raises:
            ConfigError: a declaration is wrong.
            StoreError: a table has other user columns, or rows in flight that were made with other requirements.
        """
        for number, policy, text in self._written_policies():
            written = decode_record(PolicyColumns, text)
            if policy in columns and columns[policy] != written:
                has_open_rows = self.tables[policy].has_open_rows()
                require_same_declaration(
                    self.database.name, policy, written, columns[policy], may_require_other=not has_open_rows
                )
                with self.transaction() as connection:
                    text = encode_columns(columns[policy])
                    connection.execute("UPDATE policies SET columns=? WHERE number=?", (text, number))
                self.tables[policy] = self._table(policy, number, columns[policy])
        for policy, declared in columns.items():
            check_declaration(policy, declared)
            self.table_for_rows(policy, declared)

    def _written_policies(self) -> list[tuple[int, PolicyName, str]]:
        return self.connection.execute("SELECT number, policy, columns FROM policies ORDER BY number").fetchall()

    def _table(self, policy: PolicyName, number: int, declared: PolicyColumns) -> PolicyTable:
        return PolicyTable(self.connection, self.payload, policy, number, declared, self.woken)

    def forget_unwritten_tables(self) -> None:
        """After transactions were undone: a policy's table that one of them made is not there any more."""
        written = {policy for _, policy, _ in self._written_policies()}
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
            segment, num_bytes = self.payload.end
            write_meta(connection, "payload_synced_segment", segment)
            write_meta(connection, "payload_synced_bytes", num_bytes)
            yield connection

    def table(self, policy: PolicyName, key: SampleKey) -> PolicyTable:
        """Return the table in which `key` must be.

        Raises:
            InvariantError: the policy has no table.
        """
        if policy not in self.tables:
            raise InvariantError(f"{key}: policy {policy!r} has no rows; known: {', '.join(self.tables) or 'none'}")
        return self.tables[policy]

    def table_for_rows(self, policy: PolicyName, declared: PolicyColumns | None = None) -> PolicyTable:
        """Return the policy's table, created on first use. Not to be called inside a transaction."""
        table = self.tables.get(policy)
        if table is None:
            declared = declared or PolicyColumns()
            number = len(self.tables)
            table = self._table(policy, number, declared)
            with self.transaction() as connection:
                connection.execute("INSERT INTO policies VALUES (?,?,?)", (number, policy, encode_columns(declared)))
                table.create()
            self.tables[policy] = table
        return table

    def plan(self, step: int) -> StepPlan | None:
        """Return what was dispatched in a step, or None when it has no dispatch record."""
        plan = self._plans.get(step)
        if plan is None:
            found = self.connection.execute("SELECT record FROM dispatches WHERE step=?", (step,)).fetchone()
            if found is None:
                return None
            extensions = self.connection.execute("SELECT record FROM extensions WHERE step=? ORDER BY number", (step,))
            plan = StepPlan(
                dispatch=decode_record(DispatchRecord, found[0]),
                extensions=[decode_record(StepExtension, text) for (text,) in extensions],
            )
            self._plans[step] = plan
        return plan

    def plan_of(self, key: TrajectoryKey) -> StepPlan:
        """Return what was dispatched in a trajectory's step.

        Raises:
            InvariantError: the step was not dispatched, or not with this trajectory.
        """
        plan = self.plan(key.step)
        if plan is None:
            raise InvariantError(f"{key}: step {key.step} has no dispatch record; open_step comes first")
        if key.trajectory >= plan.num_trajectories.get(key.query, 0):
            raise InvariantError(
                f"{key}: was not dispatched: step {key.step} has {plan.num_trajectories.get(key.query, 0)} "
                f"trajectories of query {key.query}; extend_step comes first"
            )
        return plan

    def forget_plans(self) -> None:
        """Dispatch records have changed."""
        self._plans.clear()

    def is_fenced(self, holder: str) -> bool:
        """Return whether nothing is accepted from a holder any more."""
        return self.connection.execute("SELECT 1 FROM fenced WHERE holder=?", (holder,)).fetchone() is not None

    def close(self) -> None:
        """Release the files."""
        self.database.close()
        self.payload.close()
