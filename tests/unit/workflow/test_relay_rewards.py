"""The rewards of the team `relay` on hand-worked cases."""

import pytest

from flexmarl.workflow.teams import relay


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("7+5-3", "12-3"),
        ("7 + 5 - 3", "12-3"),
        ("3-8+1", "-5+1"),
        ("0-0-9", "0-9"),
        ("1+2+3-4", "3+3-4"),
        ("12-3", "9"),
        ("-9-9", "-18"),
    ],
)
def test_reduce_once_carries_out_the_first_operation(chain: str, expected: str) -> None:
    assert relay.reduce_once(chain) == expected


@pytest.mark.parametrize("chain", ["", "7", "-7", "7+", "7+-5", "7*5", "x+5-3", "7+5-x"])
def test_reduce_once_refuses_what_is_no_chain(chain: str) -> None:
    with pytest.raises(ValueError, match="joined by"):
        relay.reduce_once(chain)


@pytest.mark.parametrize(
    ("chain", "expected"),
    [("12-3", 9), ("-5+4", -1), ("-9-9", -18), ("7 + 5 - 3", 9), ("18+9", 27), ("0-0", 0)],
)
def test_evaluate(chain: str, expected: int) -> None:
    assert relay.evaluate(chain) == expected


@pytest.mark.parametrize(
    "chain", ["", "9", "-9", "12--3", "+5-3", "12-3=", "12-3-", "12.5-3", "1" * 10 + "+1", "\u0663+\u0661"]
)
def test_evaluate_of_what_is_no_chain_is_none(chain: str) -> None:
    assert relay.evaluate(chain) is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("12-3", 1.0),
        (" 12 - 3", 1.0),
        ("13-3", 0.0),  # wrong value
        ("12+3", 0.0),  # the rest changed
        ("12", 0.0),  # the rest is lost
        ("9", 0.0),  # both operations: the finisher's part is done
        ("9-0", 0.0),  # right value, but the finisher's part is done
        ("7+5-3", 0.0),  # nothing carried out
        ("7+2", 0.0),  # the second operation
        ("12-3=9", 0.0),
        ("", 0.0),
    ],
)
def test_reducer_is_paid_for_the_first_operation_alone(message: str, expected: float) -> None:
    assert relay.reducer_reward("7+5-3", message) == expected


@pytest.mark.parametrize(
    ("message", "answer", "expected"),
    [
        ("12-3", "9", 1.0),
        ("12-3", " 9", 1.0),
        ("13-3", "10", 1.0),  # faithful to a wrong message
        ("13-3", "9", 0.0),  # right by luck, not by its message
        ("-5-4", "-9", 1.0),
        ("-5-4", "9", 0.0),
        ("12-3", "9-0", 0.0),
        ("12-3", "nine", 0.0),
        ("12-3", "", 0.0),
        ("12-", "9", 0.0),  # malformed: nothing to evaluate
        ("9", "9", 0.0),
        ("", "", 0.0),
    ],
)
def test_finisher_is_paid_for_the_value_of_its_message(message: str, answer: str, expected: float) -> None:
    assert relay.finisher_reward(message, answer) == expected
