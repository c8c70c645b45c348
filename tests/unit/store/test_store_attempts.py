import dataclasses
from collections.abc import Iterator

import pytest
from store_builders import (
    BLUE,
    RED,
    acknowledge,
    advantage,
    counts,
    dispatch,
    key,
    make_ready,
    open_store,
    outcome,
    put_trajectory,
    ready_keys,
    run,
    turn_row,
)

from flexmarl.core.errors import ConfigError, FencedError, InvariantError
from flexmarl.core.records import TrajectoryFailure, TurnReward
from flexmarl.store import SqliteStore

pytestmark = pytest.mark.unit

SOLVER, CHECKER = key(agent="solver"), key(agent="checker")
TRAJECTORY = SOLVER.trajectory_key
FAILURE = TrajectoryFailure(trajectory=TRAJECTORY, attempt=0, kind="timeout", message="after 60 s")


@pytest.fixture
def store() -> Iterator[SqliteStore]:
    opened = open_store()
    run(opened.open_step(dispatch()))
    yield opened
    run(opened.close())


def test_attempts_are_counted_from_zero_per_trajectory(store: SqliteStore) -> None:
    assert [run(store.begin_attempt(TRAJECTORY)) for _ in range(3)] == [0, 1, 2]
    assert run(store.begin_attempt(key(query=1).trajectory_key)) == 0


def test_an_attempt_needs_a_dispatched_step(store: SqliteStore) -> None:
    with pytest.raises(InvariantError, match="s3/q0/t0: step 3 has no dispatch record"):
        run(store.begin_attempt(key(step=3).trajectory_key))


def test_g2_a_new_attempt_supersedes_every_row_of_the_older_one_in_all_policies(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER, CHECKER])
    run(store.mask(RED, [SOLVER], "truncated"))
    other = key(query=1)
    put_trajectory(store, [other])
    assert put_trajectory(store, [SOLVER]) == 1
    assert counts(store, RED) == {"superseded": 1, "partial": 2}
    assert counts(store, BLUE) == {"superseded": 1}


@pytest.mark.parametrize("ending", ["outcome", "failure"])
def test_g2_a_trajectory_that_has_ended_is_not_attempted_again(store: SqliteStore, ending: str) -> None:
    put_trajectory(store, [SOLVER])
    if ending == "outcome":
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER])))
    else:
        run(store.record_failure(FAILURE))
    with pytest.raises(InvariantError, match=f"s0/q0/t0: attempt 0 has already ended with an {ending} record"):
        run(store.begin_attempt(TRAJECTORY))


def test_an_old_attempt_is_fenced(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER])
    run(store.begin_attempt(TRAJECTORY))
    message = "attempt 0 has been superseded by attempt 1"
    with pytest.raises(FencedError, match=message):
        run(store.put_turn(turn_row(key(turn=1), attempt=0)))
    with pytest.raises(FencedError, match=message):
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER], attempt=0)))
    with pytest.raises(FencedError, match=message):
        run(store.record_failure(FAILURE))
    assert counts(store) == {"superseded": 1}


def test_an_attempt_that_was_never_begun_is_our_bug(store: SqliteStore) -> None:
    with pytest.raises(InvariantError, match=r"s0/q0/t0/solver/b0/n0: attempt 0 was never begun; begun: none"):
        run(store.put_turn(turn_row(SOLVER)))
    run(store.begin_attempt(TRAJECTORY))
    with pytest.raises(InvariantError, match="attempt 2 was never begun; begun: 0 to 0"):
        run(store.put_turn(turn_row(SOLVER, attempt=2)))


def test_putting_the_same_turn_again_changes_nothing(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER])
    run(store.put_turn(turn_row(SOLVER)))
    run(store.record_outcome(outcome(TRAJECTORY, [SOLVER])))
    run(store.put_turn(turn_row(SOLVER)))
    assert counts(store) == {"partial": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"response_tokens": (7, 8, 10)},
        {"prompt_tokens": (1, 3)},
        {"logprobs": (-0.7, -0.8, -0.91)},
        {"temperature": 0.8},
        {"policy_version": 1},
        {"policy": BLUE},
    ],
)
def test_putting_other_content_under_the_same_key_names_the_key(store: SqliteStore, change: dict[str, object]) -> None:
    put_trajectory(store, [SOLVER, CHECKER])
    changed = dataclasses.replace(turn_row(SOLVER), **change)  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match=r"s0/q0/t0/solver/b0/n0 attempt 0 .* was put before with other content"):
        run(store.put_turn(changed))
    assert counts(store, RED) == {"partial": 1}
    assert counts(store, BLUE) == {"partial": 1}


def test_a_new_attempt_may_have_other_content(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER])
    run(store.begin_attempt(TRAJECTORY))
    run(store.put_turn(turn_row(SOLVER, attempt=1, tokens=(5,))))
    run(store.record_outcome(outcome(TRAJECTORY, [SOLVER], attempt=1)))
    run(store.fill(RED, [advantage(SOLVER)]))
    _, samples = run(store.lease(RED, "red#0", "m0", [SOLVER]))  # type: ignore[arg-type]
    assert [sample.turn for sample in samples] == [turn_row(SOLVER, attempt=1, tokens=(5,))]


@pytest.mark.parametrize("is_filled_first", [False, True])
def test_rows_are_ready_with_outcome_and_all_data_in_either_order(store: SqliteStore, is_filled_first: bool) -> None:
    put_trajectory(store, [SOLVER, CHECKER])
    ending = outcome(TRAJECTORY, [SOLVER, CHECKER])
    if is_filled_first:
        run(store.fill(RED, [advantage(SOLVER)]))
    else:
        run(store.record_outcome(ending))
    assert ready_keys(store) == []
    if is_filled_first:
        run(store.record_outcome(ending))
    else:
        run(store.fill(RED, [advantage(SOLVER)]))
    assert ready_keys(store) == [SOLVER]
    assert ready_keys(store, BLUE) == []


def test_g2_an_outcome_whose_turns_are_not_all_stored_is_refused_whole(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER])
    with pytest.raises(InvariantError, match=r"1 of 2 turns .* not in the store, first s0/q0/t0/checker/b0/n0"):
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER, CHECKER])))
    run(store.fill(RED, [advantage(SOLVER)]))
    assert ready_keys(store) == []
    run(store.put_turn(turn_row(CHECKER)))
    run(store.record_outcome(outcome(TRAJECTORY, [SOLVER, CHECKER])))
    assert ready_keys(store) == [SOLVER]


def test_a_turn_of_an_older_attempt_does_not_stand_for_one_of_the_outcome(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER, CHECKER])
    put_trajectory(store, [SOLVER])
    with pytest.raises(InvariantError, match="first s0/q0/t0/checker/b0/n0"):
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER, CHECKER], attempt=1)))


def test_a_turn_that_the_workflow_did_not_wait_for_is_masked(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER, CHECKER])
    run(store.record_outcome(outcome(TRAJECTORY, [SOLVER])))
    assert counts(store, RED) == {"partial": 1}
    assert counts(store, BLUE) == {"masked": 1}


def test_recording_the_same_outcome_again_changes_nothing(store: SqliteStore) -> None:
    make_ready(store, SOLVER)
    acknowledge(store, SOLVER)
    run(store.record_outcome(outcome(TRAJECTORY, [SOLVER])))
    assert counts(store) == {"acknowledged": 1}


def test_an_attempt_ends_once(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER])
    run(store.record_outcome(outcome(TRAJECTORY, [SOLVER])))
    with pytest.raises(InvariantError, match="s0/q0/t0 attempt 0 has already ended with an outcome record"):
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER], reward=0.0)))
    with pytest.raises(InvariantError, match="has already ended with an outcome record"):
        run(store.record_failure(FAILURE))
    with pytest.raises(FencedError, match="n1: attempt 0 has already ended"):
        run(store.put_turn(turn_row(key(turn=1))))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_g10_a_reward_that_is_not_finite_names_the_agent(store: SqliteStore, reward: float) -> None:
    put_trajectory(store, [SOLVER, CHECKER])
    with pytest.raises(ConfigError, match=rf"s0/q0/t0: the reward of agent 'solver' is {reward}, .*fix the reward"):
        run(store.record_outcome(outcome(TRAJECTORY, [SOLVER, CHECKER], reward=reward)))
    with_turn = dataclasses.replace(
        outcome(TRAJECTORY, [SOLVER, CHECKER]), turn_rewards=(TurnReward(key=CHECKER, reward=reward),)
    )
    with pytest.raises(ConfigError, match=r"turn s0/q0/t0/checker/b0/n0 of agent 'checker'"):
        run(store.record_outcome(with_turn))
    run(store.fill(RED, [advantage(SOLVER)]))
    assert ready_keys(store) == []


def test_a_failure_fails_the_rows_of_its_attempt_and_masked_ones_stay_masked(store: SqliteStore) -> None:
    put_trajectory(store, [SOLVER, key(turn=1), CHECKER])
    run(store.mask(RED, [SOLVER], "truncated"))
    run(store.record_failure(FAILURE))
    run(store.record_failure(FAILURE))
    assert counts(store, RED) == {"masked": 1, "failed": 1}
    assert counts(store, BLUE) == {"failed": 1}
    with pytest.raises(InvariantError, match="has already ended with an failure record"):
        run(store.record_failure(dataclasses.replace(FAILURE, kind="worker_died")))
