import pytest

from flexmarl.store.lifecycle import BLOCKS_COMMIT, OPEN_STATUSES, LeaseStatus, RowMove, RowStatus

pytestmark = pytest.mark.unit

TERMINAL = {RowStatus.COMMITTED, RowStatus.MASKED, RowStatus.FAILED, RowStatus.SUPERSEDED}


def test_legal_transitions_are_exactly_these() -> None:
    legal = {(source.value, move.target.value) for move in RowMove for source in move.sources}
    assert legal == {
        ("partial", "ready"),
        ("ready", "leased"),
        ("leased", "acknowledged"),
        ("acknowledged", "leased"),
        ("acknowledged", "sealed"),
        ("acknowledged", "committed"),
        ("sealed", "committed"),
        ("leased", "ready"),
        ("acknowledged", "ready"),
        ("sealed", "ready"),
        ("partial", "masked"),
        ("ready", "masked"),
        ("partial", "failed"),
        ("partial", "superseded"),
        ("masked", "superseded"),
    }


def test_a_row_is_open_or_terminal() -> None:
    assert set(OPEN_STATUSES) | TERMINAL == set(RowStatus)
    assert not set(OPEN_STATUSES) & TERMINAL


def test_a_commit_is_blocked_by_open_rows_that_it_cannot_commit() -> None:
    assert set(BLOCKS_COMMIT) == set(OPEN_STATUSES) - set(RowMove.COMMIT.sources)


def test_states_of_a_lease_have_the_names_of_the_states_of_its_rows() -> None:
    for move in (RowMove.ACKNOWLEDGE, RowMove.SEAL, RowMove.COMMIT):
        assert LeaseStatus(move.target).value == move.target.value
