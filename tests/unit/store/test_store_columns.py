"""User columns and token columns: declared, checked, kept, and needed before a row is ready."""

import dataclasses
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from store_builders import (
    BLUE,
    HOLDER,
    RED,
    acknowledge,
    advantage,
    counts,
    dispatch,
    inline_call,
    key,
    open_store,
    outcome,
    put_trajectory,
    ready_keys,
    run,
)

from flexmarl.core.errors import ConfigError, InvariantError, StoreError
from flexmarl.core.ids import PolicyName, SampleKey
from flexmarl.core.protocols import PolicyColumns
from flexmarl.core.records import ColumnScalar, OutcomeRecord, TokenColumn, TokenValues, TurnColumns
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.unit

SOLVER, CHECKER = key(agent="solver"), key(agent="checker")
TRAJECTORY = SOLVER.trajectory_key
OLD, REFERENCE = TokenColumn.OLD_LOGPROBS, TokenColumn.REFERENCE_LOGPROBS
COLUMNS = {
    RED: PolicyColumns(
        scalars={"level": "int", "Level": "float", "is_hard": "bool", 'a "name"': "str"}, required=frozenset({"level"})
    ),
    BLUE: PolicyColumns(required=frozenset({OLD})),
}


def opened(folder: Path | None = None, columns: Mapping[PolicyName, PolicyColumns] | None = COLUMNS) -> SqliteStore:
    return run(SqliteStore.open(folder, inline_call, columns))


@pytest.fixture
def store() -> Iterator[SqliteStore]:
    """A trajectory with a turn in each policy, before its outcome."""
    made = opened()
    run(made.open_step(dispatch()))
    put_trajectory(made, [SOLVER, CHECKER])
    yield made
    run(made.close())


def with_columns(values: Mapping[str, ColumnScalar], turn: SampleKey = SOLVER) -> OutcomeRecord:
    record = outcome(TRAJECTORY, [SOLVER, CHECKER])
    return dataclasses.replace(record, turn_columns=(TurnColumns(key=turn, values=values),))


# --- user columns -----------------------------------------------------------------------------------------------------


def test_user_columns_are_typed_columns_with_a_ready_bit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [SOLVER, CHECKER])
    run(store.record_outcome(with_columns({"level": 3, "Level": 2, "is_hard": True})))
    tool = sqlite3.connect(tmp_path / "index.db")
    query = (
        'SELECT user_3_level, has_user_3_level, user_0_Level, user_2_is_hard, "user_1_a ""name""", '
        '"has_user_1_a ""name""" FROM rows_0_red'
    )
    assert tool.execute(query).fetchall() == [(3, 1, 2.0, 1, None, 0)]
    tool.close()
    run(store.close())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "column 'level' was not given, but is required: set turn.columns['level'] in the workflow"),
        ({"level": 1.5}, "column 'level' = 1.5, expected int: fix turn.columns"),
        ({"level": True}, "column 'level' = True, expected int"),
        ({"level": 2**63}, f"column 'level' = {2**63}, expected int"),
        ({"level": 1, "Level": "x"}, "column 'Level' = 'x', expected float"),
        ({"level": 1, "Level": float("nan")}, "column 'Level' = nan, expected a finite number"),
        ({"level": 1, "is_hard": 1}, "column 'is_hard' = 1, expected bool"),
        ({"level": 1, 'a "name"': 1}, "= 1, expected str"),
        ({"level": 1, "other": 1}, "column 'other' = 1 is not declared for policy 'red' (declared: "),
    ],
)
def test_g10_a_wrong_user_column_names_turn_column_and_fix_and_nothing_is_written(
    store: SqliteStore, values: dict[str, ColumnScalar], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(store.record_outcome(with_columns(values)))
    assert str(caught.value).startswith("turn s0/q0/t0/solver/b0/n0: ")
    assert message in str(caught.value)
    run(store.record_outcome(with_columns({"level": 1})))
    run(store.fill(RED, [advantage(SOLVER)]))
    assert ready_keys(store) == [SOLVER]


def test_columns_of_a_turn_that_the_outcome_does_not_list_are_our_bug(store: SqliteStore) -> None:
    with pytest.raises(InvariantError, match="s0/q0/t0: columns for s0/q0/t0/solver/b0/n9, a turn"):
        run(store.record_outcome(with_columns({"level": 1}, key(turn=9))))


# --- declarations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (PolicyColumns(scalars={"x": "complex"}), "store.columns.x of policy 'red' is 'complex', expected int, float"),
        (
            PolicyColumns(scalars={"old_logprobs": "float"}),
            "store.columns.old_logprobs: the name is that of a built-in",
        ),
        (PolicyColumns(required=frozenset({"x"})), "policy 'red' requires column 'x', which store.columns does not"),
    ],
)
def test_g10_a_declaration_that_no_table_can_have_is_refused(declared: PolicyColumns, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(None, {RED: declared})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (PolicyColumns(), "column 'Level' of policy 'red' is float in this store, and not declared in the conf"),
        (
            dataclasses.replace(COLUMNS[RED], scalars={**COLUMNS[RED].scalars, "level": "float"}),
            r"column 'level' of policy 'red' is int \(required\) in this store, and float \(required\)",
        ),
    ],
)
def test_g10_a_store_is_not_opened_with_other_columns(tmp_path: Path, declared: PolicyColumns, message: str) -> None:
    run(opened(tmp_path).close())
    with pytest.raises(StoreError, match=rf"{message}.*: use another run\.dir, or the columns of before"):
        opened(tmp_path, {RED: declared})
    run(opened(tmp_path).close())


def test_g10_what_rows_in_flight_need_cannot_change_but_later_rows_can_need_more(tmp_path: Path) -> None:
    store = opened(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [SOLVER, CHECKER])
    more = {RED: dataclasses.replace(COLUMNS[RED], required=frozenset({"level", OLD}))}
    with pytest.raises(StoreError) as caught:
        run(store.declare(more))
    for part in ("'old_logprobs' of policy 'red', which algorithm.num_epochs", "rows in flight", "replay=false"):
        assert part in str(caught.value)
    run(store.rewind(0))
    run(store.declare(more))
    run(store.close())
    with pytest.raises(StoreError, match="another"):
        opened(tmp_path, {RED: PolicyColumns()})
    run(opened(tmp_path, more).close())


def test_a_store_that_is_opened_without_a_declaration_keeps_its_columns(tmp_path: Path) -> None:
    store = opened(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [SOLVER, CHECKER])
    run(store.close())
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match="column 'level' was not given, but is required"):
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER, CHECKER])))
    run(store.close())


# --- token columns ----------------------------------------------------------------------------------------------------


def scores(sample: SampleKey, *values: float) -> TokenValues:
    return TokenValues(key=sample, values=values or (-1.0, -2.0, -3.5))


def end(store: SqliteStore) -> None:
    run(store.record_outcome(with_columns({"level": 1})))
    run(store.fill(BLUE, [advantage(CHECKER)]))
    run(store.fill(RED, [advantage(SOLVER)]))


def test_a_row_waits_for_its_required_token_column_and_is_read_with_all_that_are_filled(store: SqliteStore) -> None:
    end(store)
    assert (ready_keys(store), ready_keys(store, BLUE)) == ([SOLVER], [])
    run(store.fill_tokens(BLUE, REFERENCE, [scores(CHECKER, -0.5, -0.25, 0.0)]))
    assert ready_keys(store, BLUE) == []
    run(store.fill_tokens(BLUE, OLD, [scores(CHECKER)]))
    assert ready_keys(store, BLUE) == [CHECKER]
    _, (sample,) = run(store.lease(BLUE, HOLDER, "m0", [CHECKER]))
    assert sample.token_columns == {OLD: (-1.0, -2.0, -3.5), REFERENCE: (-0.5, -0.25, 0.0)}
    _, (sample,) = run(store.lease(RED, HOLDER, "m0", [SOLVER]))
    assert sample.token_columns == {}


def test_filling_the_same_numbers_again_changes_nothing_and_others_are_refused(store: SqliteStore) -> None:
    run(store.fill_tokens(BLUE, OLD, [scores(CHECKER)]))
    run(store.fill_tokens(BLUE, OLD, [scores(CHECKER)]))
    run(store.fill_tokens(BLUE, OLD, []))
    with pytest.raises(InvariantError, match="s0/q0/t0/checker/b0/n0: cannot fill 3 numbers of old_logprobs"):
        run(store.fill_tokens(BLUE, OLD, [scores(CHECKER, -1.0, -2.0, -9.0)]))
    end(store)
    acknowledge(store, CHECKER)
    run(store.fill_tokens(BLUE, OLD, [scores(CHECKER)]))
    with pytest.raises(InvariantError, match="cannot fill 3 numbers of reference_logprobs; the row is .*ACKNOWLEDGED"):
        run(store.fill_tokens(BLUE, REFERENCE, [scores(CHECKER)]))


@pytest.mark.parametrize("values", [(-1.0, -2.0), (-1.0, -2.0, float("nan")), (-1.0, -2.0, -3.0, -4.0)])
def test_a_token_column_has_a_finite_number_per_response_token(store: SqliteStore, values: tuple[float, ...]) -> None:
    with pytest.raises(
        InvariantError, match=r"s0/q0/t0/checker/b0/n0: (cannot fill \d numbers|a number of old_logpro)"
    ):
        run(store.fill_tokens(BLUE, OLD, [scores(CHECKER, *values)]))
    end(store)
    assert ready_keys(store, BLUE) == []


def test_a_masked_row_takes_a_token_column_and_stays_masked(store: SqliteStore) -> None:
    run(store.mask(BLUE, [CHECKER], "truncated"))
    end(store)
    run(store.fill_tokens(BLUE, OLD, [scores(CHECKER)]))
    assert counts(store, BLUE) == {"masked": 1}


def test_token_columns_are_there_after_reopening(tmp_path: Path) -> None:
    store = opened(tmp_path)
    run(store.open_step(dispatch()))
    put_trajectory(store, [SOLVER, CHECKER])
    run(store.fill_tokens(BLUE, OLD, [scores(CHECKER)]))
    run(store.close())
    store = open_store(tmp_path)
    (stored,) = run(store.open_steps())
    assert stored.scored == {BLUE: {OLD: (scores(CHECKER),)}}
    end(store)
    assert ready_keys(store, BLUE) == [CHECKER]
    run(store.close())
