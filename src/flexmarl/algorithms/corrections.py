"""What one token's loss is made of, in plain numbers: importance weight, PPO's clipped ratio, KL to a reference.

`losses.py` computes the same on tensors; this module is its reference in tests, and what the scripted backend uses.
Every term is of one token alone, so no split of the samples can change it.

Log-probs of a token: pi under the weights being trained; old under those before the first of several updates of the
step; mu recorded at rollout; ref under the frozen reference model.
"""

import math

from flexmarl.algorithms.columns import token_columns
from flexmarl.config import AlgorithmConfig
from flexmarl.core.errors import InvariantError
from flexmarl.core.records import Sample


def check_columns(sample: Sample, config: AlgorithmConfig) -> None:
    """Check that a sample has every column it needs, with a finite number for each response token.

    Raises:
        InvariantError: it has not; it should not have become ready.
    """
    key = sample.turn.key
    if missing := [column for column in token_columns(config) if column not in sample.token_columns]:
        raise InvariantError(f"{key}: {missing[0]} was not scored before its sample was trained")
    for column, values in sample.token_columns.items():
        if len(values) != len(sample.turn.response_tokens):
            raise InvariantError(f"{key}: {len(values)} {column} for {len(sample.turn.response_tokens)} tokens")
        if not all(math.isfinite(value) for value in values):
            raise InvariantError(f"{key}: {column} holds a value that is not finite")


def is_weighted(config: AlgorithmConfig) -> bool:
    """Return whether tokens get an importance weight; `correction: null` was resolved before, or means none."""
    return config.correction in ("truncated_is", "decoupled_ppo")


def importance_weight(old: float, mu: float, config: AlgorithmConfig) -> float:
    """Return min(old/mu, correction_cap) as probabilities, or 1 without a correction.

    Source: Yao et al. (2025), "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", truncated
    importance sampling; as the weight of decoupled PPO: Hilton et al. (2022), "Batch size-invariance for policy
    optimization", section 3, with the weight truncated.
    """
    if not is_weighted(config):
        return 1.0
    log_weight = old - mu
    return config.correction_cap if log_weight >= math.log(config.correction_cap) else math.exp(log_weight)


def is_clipped(advantage: float, ratio: float, config: AlgorithmConfig) -> bool:
    """Return whether PPO takes the gradient away: min(ratio x A, clip(ratio) x A) is its constant branch.

    Source: Schulman et al. (2017), "Proximal Policy Optimization Algorithms", equation 7; bounds that differ by side:
    Yu et al. (2025), "DAPO", section 3.1.
    """
    if advantage > 0:
        return ratio > 1 + config.clip_high
    return advantage < 0 and ratio < 1 - config.clip_low


def k3(log_ratio: float) -> float:
    """Return exp(x) - x - 1, for x = log(q/p) an estimate of KL(p || q) from one token of p: at least 0, unbiased.

    Source: Schulman (2020), "Approximating KL Divergence"; the KL term of DeepSeekMath (Shao et al. 2024), equation 4.
    """
    return math.expm1(log_ratio) - log_ratio


def token_slope(
    *, advantage: float, pi: float, mu: float, old: float | None, reference: float | None, config: AlgorithmConfig
) -> float:
    """Return minus the derivative of a token's loss by its log-prob pi: in which direction, and how far, it is pushed.

    Without `old`, pi itself, held constant, is the old log-prob: the ratio is 1. Without a KL term in the loss,
    `reference` has no effect.
    """
    ratio = 1.0 if old is None else math.exp(pi - old)
    is_constant = old is not None and is_clipped(advantage, ratio, config)
    slope = 0.0 if is_constant else importance_weight(pi if old is None else old, mu, config) * advantage * ratio
    if config.kl_coef > 0 and config.kl_in == "loss" and reference is not None:
        slope += config.kl_coef * math.expm1(reference - pi)
    return slope
