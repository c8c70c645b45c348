"""From rewards to gradients: groups, advantages, normalisers and the policy-gradient loss. Start with `groups.py`.

What this face exports is plain Python. `losses.py` needs torch and is imported by name, by training backends only.
"""

from flexmarl.algorithms.columns import kl_penalty, required_columns, token_columns
from flexmarl.algorithms.corrections import (
    check_columns,
    importance_weight,
    is_clipped,
    is_weighted,
    k3,
    token_slope,
)
from flexmarl.algorithms.groups import (
    GROUP_OF_ONE,
    TRUNCATED,
    MaskedSample,
    QueryClosing,
    TurnFacts,
    close_query,
    group_advantages,
    has_signal,
    scale_by_batch,
)
from flexmarl.algorithms.normalisers import count_denominators, denominator, token_weight
from flexmarl.algorithms.scopes import Statistic, StatisticScope, statistics, unclosable

__all__ = [
    "GROUP_OF_ONE",
    "TRUNCATED",
    "MaskedSample",
    "QueryClosing",
    "Statistic",
    "StatisticScope",
    "TurnFacts",
    "check_columns",
    "close_query",
    "count_denominators",
    "denominator",
    "group_advantages",
    "has_signal",
    "kl_penalty",
    "required_columns",
    "scale_by_batch",
    "importance_weight",
    "is_clipped",
    "is_weighted",
    "k3",
    "statistics",
    "token_slope",
    "token_columns",
    "token_weight",
    "unclosable",
]
