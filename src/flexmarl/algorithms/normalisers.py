"""What a policy's gradient sum is divided by, once per step.

A normaliser has two halves: a weight per token, which needs the sample alone and is applied at backward, and one
division by the sum over *all* samples of the step, at the update. So no split of the samples into micro-batches can
change it: the mean of micro-batch means is never formed.
"""

from collections.abc import Sequence

from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.records import Denominators, Sample


def token_weight(num_tokens: int, config: AlgorithmConfig) -> float:
    """Return the weight of each of the `num_tokens` response tokens of a sample in the unnormalised sum."""
    if num_tokens < 1:
        raise InvariantError("a sample without response tokens has no loss; it should not have become ready")
    return 1.0 / num_tokens if config.normaliser == "sample_mean" else 1.0


def denominator(denominators: Denominators, config: AlgorithmConfig) -> int:
    """Return what the gradient sum of a step is divided by.

    `token_mean`: trained tokens. `sample_mean`: trained samples. `constant`: trained samples times `constant_tokens`
    (Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2).

    Raises:
        InvariantError: nothing was trained.
    """
    if denominators.num_samples < 1 or denominators.num_tokens < 1:
        raise InvariantError(f"an update needs trained samples, got {denominators}")
    if config.normaliser == "token_mean":
        return denominators.num_tokens
    if config.normaliser == "sample_mean":
        return denominators.num_samples
    if config.constant_tokens is None:
        raise InvariantError("algorithm.normaliser=constant without algorithm.constant_tokens passed validation")
    return denominators.num_samples * config.constant_tokens


def count_denominators(samples: Sequence[Sample]) -> Denominators:
    """Return what `samples` add to the denominators of their policy's step."""
    return Denominators(
        num_samples=len(samples), num_tokens=sum(len(sample.turn.response_tokens) for sample in samples)
    )
