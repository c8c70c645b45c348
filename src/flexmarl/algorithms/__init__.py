"""From rewards to gradients: groups, advantages, normalisers and the policy-gradient loss. Start with `groups.py`.

What this face exports is plain Python. `losses.py` needs torch and is imported by name, by training backends only.
"""

from flexmarl.algorithms.groups import (
    GROUP_OF_ONE,
    TRUNCATED,
    MaskedSample,
    QueryClosing,
    TurnFacts,
    close_query,
    group_advantages,
)
from flexmarl.algorithms.normalisers import count_denominators, denominator, token_weight

__all__ = [
    "GROUP_OF_ONE",
    "TRUNCATED",
    "MaskedSample",
    "QueryClosing",
    "TurnFacts",
    "close_query",
    "count_denominators",
    "denominator",
    "group_advantages",
    "token_weight",
]
