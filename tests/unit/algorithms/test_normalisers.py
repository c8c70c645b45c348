"""Denominators and token weights."""

import pytest

from flexmarl.algorithms import count_denominators, denominator, token_weight
from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.records import Denominators
from flexmarl.testing.training import make_sample

pytestmark = pytest.mark.unit

TOKEN_MEAN = AlgorithmConfig()
SAMPLE_MEAN = AlgorithmConfig(normaliser="sample_mean")
CONSTANT = AlgorithmConfig(normaliser="constant", constant_tokens=100)


def test_denominators_by_hand() -> None:
    counted = Denominators(num_samples=3, num_tokens=12)
    assert [denominator(counted, config) for config in (TOKEN_MEAN, SAMPLE_MEAN, CONSTANT)] == [12, 3, 300]


def test_token_weights_by_hand() -> None:
    assert [token_weight(4, config) for config in (TOKEN_MEAN, SAMPLE_MEAN, CONSTANT)] == [1.0, 0.25, 1.0]


def test_counts_response_tokens_only() -> None:
    samples = [make_sample(0, prompt=[1] * 9, response=[1, 2, 3]), make_sample(1, response=[1])]
    assert count_denominators(samples) == Denominators(num_samples=2, num_tokens=4)


def test_refuses_to_divide_by_nothing() -> None:
    with pytest.raises(InvariantError, match="trained samples"):
        denominator(Denominators(), TOKEN_MEAN)
    with pytest.raises(InvariantError, match="no loss"):
        token_weight(0, SAMPLE_MEAN)
