"""Which queries a step runs."""

import pytest

from flexmarl.core.errors import ConfigError
from flexmarl.orchestrator.queries import QueryOrder

pytestmark = pytest.mark.unit


def order(num_queries: int, per_step: int, seed: int = 0) -> QueryOrder:
    return QueryOrder([{"n": number} for number in range(num_queries)], per_step=per_step, seed=seed)


def test_an_epoch_runs_every_query_once() -> None:
    queries = order(12, 3)
    for epoch in range(5):
        steps = [queries.of_step(4 * epoch + place) for place in range(4)]
        assert sorted(query for step in steps for query in step) == list(range(12))


def test_what_does_not_fill_a_step_is_left_out_of_its_epoch() -> None:
    queries = order(7, 3)
    epochs = [queries.of_step(2 * epoch) + queries.of_step(2 * epoch + 1) for epoch in range(40)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    # Another query is left out each time, so that none is never trained.
    assert {query for epoch in epochs for query in set(range(7)) - set(epoch)} == set(range(7))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = order(30, 30)
    assert first.of_step(0) != first.of_step(1)
    assert first.of_step(0) != order(30, 30, seed=1).of_step(0)
    assert first.of_step(0) != tuple(range(30))


def test_g5_a_step_depends_on_its_number_alone() -> None:
    walked = order(10, 2)
    steps = [walked.of_step(step) for step in range(50)]
    jumped = order(10, 2)
    assert [jumped.of_step(step) for step in reversed(range(50))] == steps[::-1]


def test_g10_too_few_queries_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 queries, pipeline.queries_per_step=3 needs as many"):
        order(2, 3)
    assert sorted(order(3, 3).of_step(9)) == [0, 1, 2]
