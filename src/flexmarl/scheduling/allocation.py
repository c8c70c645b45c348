"""Which policies hold the training slots.

A slot serves one policy at a time. A policy leaves its slot only when it is idle and another one waits for work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flexmarl.core.ids import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDemand:
    """One policy as an allocation rule sees it at one moment."""

    policy: PolicyName
    num_backlog_tokens: int
    """Tokens of its ready samples and of turns to score; 0 with `is_needed` False means it wants no slot."""
    is_needed: bool
    """It must run although it may have no sample: to publish, seal or update."""
    waiting_s: float
    """How long it has wanted a slot without having one."""
    slot: int | None
    is_idle: bool
    """It holds a slot and does nothing there."""
    is_leaving: bool = False
    """Its suspension has begun."""

    @property
    def wants_slot(self) -> bool:
        """It has work."""
        return self.num_backlog_tokens > 0 or self.is_needed


class SlotAction(StrEnum):
    """What happens to a slot."""

    ACTIVATE = "activate"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDecision:
    """A policy takes or leaves a slot."""

    policy: PolicyName
    slot: int
    action: SlotAction
    reason: str


def allocate_largest_backlog(
    demands: Sequence[PolicyDemand], *, num_slots: int, ageing_tokens_per_s: float = 1000.0
) -> list[SlotDecision]:
    """Return who takes a free slot and who must leave one for somebody that waits.

    The largest backlog comes first; waiting adds `ageing_tokens_per_s` per second to it, so that no policy starves.
    Ties go to the smallest name. A slot freed by SUSPEND is given away at a later call, when it is really free.
    """
    taken = {demand.slot for demand in demands if demand.slot is not None}
    free = [slot for slot in range(num_slots) if slot not in taken]
    waiting = [d for d in demands if d.slot is None and d.wants_slot]
    waiting.sort(key=lambda d: (-(d.num_backlog_tokens + ageing_tokens_per_s * d.waiting_s), d.policy))
    decisions = [
        SlotDecision(policy=d.policy, slot=slot, action=SlotAction.ACTIVATE, reason=f"backlog {d.num_backlog_tokens}")
        for slot, d in zip(free, waiting, strict=False)
    ]
    num_unserved = len(waiting) - len(decisions) - sum(d.is_leaving for d in demands)
    idle = [d for d in demands if d.slot is not None and d.is_idle and not d.wants_slot]
    for demand in sorted(idle, key=lambda d: d.policy)[: max(0, num_unserved)]:
        assert demand.slot is not None
        decisions.append(
            SlotDecision(
                policy=demand.policy, slot=demand.slot, action=SlotAction.SUSPEND, reason="idle while others wait"
            )
        )
    return decisions
