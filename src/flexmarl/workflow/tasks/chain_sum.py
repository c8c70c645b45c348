"""Task `chain_sum`: sums and differences of a few small numbers, from reasoning_gym (extra `tasks`).

Invariants:
    * The split of a question depends on its text alone, so the splits are disjoint for every seed and size.
    * Equal arguments give equal queries in equal order, on every machine.
"""

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from flexmarl.core.errors import ConfigError, InvariantError
from flexmarl.core.rng import HashRng, derive_seed

SPLIT_PERCENT = {"held_out": 15, "train": 40, "warm_start": 45}
"""Share of all questions in each split: evaluation, reinforcement learning, and the supervised making of the model."""

_NUM_DRAWN = 40_000
"""Entries drawn before duplicates go: 10 times the 4 000 questions of the default options, so nearly all are found."""


def load_queries(
    *, split: str, num_queries: int | None, seed: int, num_terms: int = 3, num_digits: int = 1
) -> list[dict[str, Any]]:
    """Return `num_queries` different queries of `split` (all of them for None), shuffled by `seed`.

    A query holds `question` (such as "7+5-3"), `answer` (such as "9") and `metadata` (of the reasoning_gym entry).
    The defaults give about 600 held-out, 1 600 train and 1 800 warm-start queries.

    Raises:
        ConfigError: reasoning_gym is missing, or an argument is out of range.
    """
    if split not in SPLIT_PERCENT:
        raise ConfigError(f"split is {split!r}, expected one of {', '.join(SPLIT_PERCENT)}")
    if num_terms < 2 or num_digits < 1:
        raise ConfigError(f"num_terms is {num_terms} and num_digits {num_digits}, expected at least 2 and 1")
    queries = [query for query in _all_queries(num_terms, num_digits) if split_of(query["question"]) == split]
    if num_queries is not None and not 1 <= num_queries <= len(queries):
        raise ConfigError(f"num_queries is {num_queries}, expected 1 to {len(queries)}, which split {split!r} holds")
    HashRng(derive_seed("chain_sum", seed)).shuffle(queries)
    return [{**query, "metadata": dict(query["metadata"])} for query in queries[:num_queries]]


def is_correct(query: Mapping[str, Any], answer_text: str) -> bool:
    """Return whether reasoning_gym gives `answer_text` its full score for `query`; "+9" and "9.0" are as good as "9".

    Raises:
        ConfigError: reasoning_gym is missing.
    """
    score_answer = _reasoning_gym().get_score_answer_fn("chain_sum")
    # Anything below 1 is partial credit for text that contains the answer, as "19" contains "9".
    return bool(score_answer(answer_text.strip(), dict(query)) == 1.0)


def split_of(question: str) -> str:
    """Return the split that `question` belongs to, by a hash of its text."""
    digest = hashlib.blake2b(question.encode(), digest_size=8, person=b"chain_sum").digest()
    percentile = int.from_bytes(digest, "big") % 100
    for split, percent in SPLIT_PERCENT.items():
        if percentile < percent:
            return split
        percentile -= percent
    raise InvariantError(f"SPLIT_PERCENT must add up to 100, got {SPLIT_PERCENT}")


@functools.cache
def _all_queries(num_terms: int, num_digits: int) -> tuple[dict[str, Any], ...]:
    """Return every different question among the entries drawn, in the order of drawing; read-only."""
    entries = _reasoning_gym().create_dataset(
        "chain_sum",
        min_terms=num_terms,
        max_terms=num_terms,
        min_digits=num_digits,
        max_digits=num_digits,
        size=_NUM_DRAWN,
        seed=0,  # a constant: the run's seed must not move a question into another split's pool
    )
    queries: dict[str, dict[str, Any]] = {}
    for entry in entries:
        question = str(entry["metadata"]["expression"]).replace(" ", "")
        queries.setdefault(
            question, {"question": question, "answer": str(entry["answer"]), "metadata": dict(entry["metadata"])}
        )
    return tuple(queries.values())


def _reasoning_gym() -> ModuleType:
    """Return the package reasoning_gym."""
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task chain_sum needs reasoning_gym ({error}); install the extra: pip install 'flexmarl[tasks]'"
        ) from error


# Imported here, which takes more than a second, and not on first use: that is in the event loop of the workflows.
with contextlib.suppress(ConfigError):  # where the package is missing, its users are told
    _reasoning_gym()
