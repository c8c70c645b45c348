"""Which columns beside turn, reward and advantage an algorithm needs, and what it makes of them before training."""

import math
from collections.abc import Sequence

from flexmarl.config import AlgorithmConfig
from flexmarl.core.records import TokenColumn


def token_columns(config: AlgorithmConfig) -> tuple[TokenColumn, ...]:
    """Return the columns that must be scored before a sample of the policy may train."""
    columns = []
    if config.num_updates > 1:
        columns.append(TokenColumn.OLD_LOGPROBS)
    if config.kl_coef > 0:
        columns.append(TokenColumn.REFERENCE_LOGPROBS)
    return tuple(columns)


def required_columns(config: AlgorithmConfig) -> frozenset[str]:
    """Return the names of all columns without which a row of the policy is not ready."""
    own = frozenset() if config.weight_column is None else frozenset({config.weight_column})
    return own | frozenset(str(column) for column in token_columns(config))


def kl_penalty(logprobs: Sequence[float], reference_logprobs: Sequence[float], *, kl_coef: float) -> float:
    """Return `kl_coef` times the sum over tokens of log(mu/ref): the k1 estimate of a turn's KL divergence.

    Source: Ouyang et al. 2022 (InstructGPT), equation 2, with the generating policy mu.
    """
    gaps = [own - reference for own, reference in zip(logprobs, reference_logprobs, strict=True)]
    return kl_coef * math.fsum(gaps)
