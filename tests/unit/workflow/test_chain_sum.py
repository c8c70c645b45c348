"""The task `chain_sum`: disjoint and deterministic splits, and a verifier that is right on hand-worked cases."""

import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest

from flexmarl.core.errors import ConfigError
from flexmarl.workflow.tasks import chain_sum

pytest.importorskip("reasoning_gym")

SPLITS = ("train", "held_out", "warm_start")
QUERY = {"question": "7+5-3", "answer": "9", "metadata": {}}


@pytest.fixture(scope="module")
def questions() -> dict[str, list[str]]:
    return {
        split: [query["question"] for query in chain_sum.load_queries(split=split, num_queries=None, seed=0)]
        for split in SPLITS
    }


def test_splits_share_no_question_and_hold_enough(questions: dict[str, list[str]]) -> None:
    for left, right in combinations(SPLITS, 2):
        assert not set(questions[left]) & set(questions[right])
    for split, at_least in zip(SPLITS, (1000, 400, 1000), strict=True):
        assert len(set(questions[split])) == len(questions[split]) >= at_least


def test_split_depends_on_the_text_alone(questions: dict[str, list[str]]) -> None:
    assert all(chain_sum.split_of(question) == split for split in SPLITS for question in questions[split])
    # Fixed cases: a change here would let the shipped model have seen held-out questions.
    assert [chain_sum.split_of(text) for text in ("0+0+0", "7+5-3", "9-9-9")] == ["train", "held_out", "warm_start"]


def test_answers_are_the_values_of_the_questions() -> None:
    for query in chain_sum.load_queries(split="held_out", num_queries=None, seed=0):
        terms = query["question"].replace("-", "+-").split("+")
        assert int(query["answer"]) == sum(int(term) for term in terms)


def test_same_seed_gives_same_queries_and_other_seed_another_order(questions: dict[str, list[str]]) -> None:
    def load(seed: int) -> list[dict[str, Any]]:
        return chain_sum.load_queries(split="train", num_queries=32, seed=seed)

    assert load(3) == load(3)
    assert load(3) != load(4)
    assert {query["question"] for query in load(4)} <= set(questions["train"])


def test_queries_belong_to_the_caller() -> None:
    first = chain_sum.load_queries(split="train", num_queries=1, seed=0)
    first[0]["metadata"].clear()
    first[0]["answer"] = "spoilt"
    second = chain_sum.load_queries(split="train", num_queries=1, seed=0)
    assert second[0]["answer"] != "spoilt"
    assert second[0]["metadata"]


def test_options_change_the_questions() -> None:
    (query,) = chain_sum.load_queries(split="train", num_queries=1, seed=0, num_terms=4, num_digits=2)
    terms = query["question"].replace("-", "+").split("+")
    assert [len(term) for term in terms] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("answer_text", "expected"),
    [
        ("9", True),
        (" 9 ", True),
        ("+9", True),
        ("9.0", True),
        ("10", False),
        ("-9", False),
        ("19", False),  # reasoning_gym gives half its score: the text contains the answer
        ("9 or 10", False),
        ("nine", False),
        ("", False),
    ],
)
def test_verifier_on_hand_worked_cases(answer_text: str, expected: bool) -> None:
    assert chain_sum.is_correct(QUERY, answer_text) is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test", "num_queries": 1}, "split is 'test', expected one of held_out, train, warm_start"),
        ({"split": "train", "num_queries": 0}, "num_queries is 0, expected 1 to"),
        ({"split": "train", "num_queries": 4001}, "num_queries is 4001, expected 1 to"),
        ({"split": "train", "num_queries": 1, "num_terms": 1}, "num_terms is 1 and num_digits 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chain_sum.load_queries(seed=0, **arguments)


@pytest.mark.parametrize(
    ("module", "is_loaded"), [("flexmarl.workflow.teams.relay", True), ("flexmarl.workflow", False)]
)
def test_the_verifier_is_imported_with_the_team_and_not_in_the_event_loop(module: str, is_loaded: bool) -> None:
    program = f"import sys, {module}; print('reasoning_gym' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{is_loaded}\n"


def test_a_missing_package_is_not_an_error_of_the_import() -> None:
    program = "import sys; sys.modules['reasoning_gym'] = None; import flexmarl.workflow.teams.relay"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"flexmarl\[tasks\]"):
        chain_sum.is_correct(QUERY, "9")
