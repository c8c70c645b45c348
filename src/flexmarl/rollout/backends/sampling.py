"""Drawing the next token of every running sequence at once.

Axes: B sequences, V vocabulary.

Invariants:
    * The random number of a token depends on (seed of its request, index of the token) alone, never on the batch.
    * A token whose probability is 0 is never drawn.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64s = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: UInt64s, counters: UInt64s) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) with 32 random bits for each (seed, counter).

    The seed is mixed before the counter is added, so that neighbouring seeds do not share a stream.
    Source: Steele, Lea, Flood (2014), SplitMix64; here entered at any place of its sequence.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(bits: UInt64s) -> UInt64s:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each of B sequences draws; arrays of length B."""

    temperatures: npt.NDArray[np.float32]
    """1 where `is_greedy`."""
    is_greedy: npt.NDArray[np.bool_]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    """V where it is off."""
    uniforms: npt.NDArray[np.float64]
    """In [0, 1); ignored where `is_greedy`."""


def draw_tokens(logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return B tokens and their log-probs under the distribution each was drawn from.

    Log-probs are float32, renormalised after top-p and top-k. Greedy rows take the most likely token, with its
    log-prob at temperature 1. A row with a non-finite logit gives a log-prob that is not finite.
    """
    device = logits_BV.device
    logits_BV = logits_BV.float()
    if (batch.temperatures != 1.0).any():
        logits_BV = logits_BV / torch.from_numpy(batch.temperatures).to(device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    # Greedy rows are not cut: their log-probs are those of temperature 1.
    is_cut = ~batch.is_greedy & ((batch.top_k < logits_BV.shape[1]) | (batch.top_p < 1.0))
    if is_cut.any():
        rows = torch.from_numpy(is_cut.nonzero()[0]).to(device)
        cut_BV = _cut_tail(logprobs_BV[rows], top_k=batch.top_k[is_cut], top_p=batch.top_p[is_cut])
        logprobs_BV = logprobs_BV.index_copy(0, rows, cut_BV)
    if batch.is_greedy.all():
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        # In float64, uniform x total is below the total: with float32 sums the last token could be overshot.
        sums_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        targets_B = torch.from_numpy(batch.uniforms).to(device) * sums_BV[:, -1]
        tokens_B = torch.searchsorted(sums_BV, targets_B[:, None], right=True)[:, 0]
        # Only a row with NaN finds no place; its log-prob then tells.
        tokens_B = tokens_B.clamp_(max=logits_BV.shape[1] - 1)
        if batch.is_greedy.any():
            is_greedy_B = torch.from_numpy(batch.is_greedy).to(device)
            tokens_B = torch.where(is_greedy_B, logprobs_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _cut_tail(logprobs_BV: Tensor, *, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> Tensor:
    """Keep the top_k likeliest tokens, of these the fewest that reach top_p of the rest, and renormalise."""
    device = logprobs_BV.device
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logprobs_BV.shape[1], device=device)
    sorted_BV = sorted_BV.masked_fill(ranks_V >= torch.from_numpy(top_k).to(device)[:, None], -torch.inf)
    probs_BV = torch.softmax(sorted_BV, dim=-1)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    top_p_B1 = torch.from_numpy(top_p).to(device)[:, None]
    # Rounding can push the sum before a rare token to 1: at top_p = 1 nothing may be cut.
    is_cut_BV = (before_BV >= top_p_B1) & (top_p_B1 < 1.0)
    sorted_BV = sorted_BV.masked_fill(is_cut_BV, -torch.inf)
    return torch.log_softmax(torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV), dim=-1)
