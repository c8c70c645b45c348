"""Names of the metrics that training backends report, and how those of several micro-batches become one.

A name that ends in `_sum` adds up; one that ends in `_max` keeps the largest. Means are formed by who reports a step,
from sums over the whole step.
"""

from collections.abc import Mapping
from typing import Final

from flexmarl.core.errors import InvariantError
from flexmarl.core.records import Denominators

LOGPROB_SUM: Final = "logprob_sum"
"""Over tokens: log-probs under the trained weights; its mean, negated, estimates the entropy per token."""
LOGPROB_GAP_SUM: Final = "logprob_gap_sum"
"""Over tokens: |log-prob recorded at rollout - log-prob under the trained weights|."""
LOGPROB_GAP_MAX: Final = "logprob_gap_max"
"""The largest such gap of a token."""
REWARD_SUM: Final = "reward_sum"
"""Over samples: the reward compared within the group."""
COMPUTED_TOKENS_SUM: Final = "computed_tokens_sum"
"""Tokens that went through the model: prompts, responses and padding."""
GRAD_NORM: Final = "grad_norm"
"""Of an update: global gradient norm after normalisation, before clipping."""
LEARNING_RATE: Final = "learning_rate"
"""Of an update."""


def step_metrics(sums: Mapping[str, float], denominators: Denominators) -> dict[str, float]:
    """Return what is reported of a policy's step: means over its trained tokens or samples, extremes as they are."""
    over_tokens = {LOGPROB_GAP_SUM: ("logprob_gap_mean", 1.0), LOGPROB_SUM: ("entropy", -1.0)}
    metrics = {}
    for name, value in sums.items():
        if name in over_tokens:
            mean_name, sign = over_tokens[name]
            metrics[mean_name] = sign * value / max(denominators.num_tokens, 1)
        elif name == REWARD_SUM:
            metrics["reward_mean"] = value / max(denominators.num_samples, 1)
        else:
            metrics[name.removesuffix("_sum")] = value
    return metrics


def combine_metrics(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of two sets of samples as those of their union."""
    combined = dict(first)
    for name, value in second.items():
        if name not in combined:
            combined[name] = value
        elif name.endswith("_sum"):
            combined[name] += value
        elif name.endswith("_max"):
            combined[name] = max(combined[name], value)
        else:
            raise InvariantError(f"metric {name!r} cannot be combined: its name ends in neither _sum nor _max")
    return combined
