"""Scheduling rules: pure decisions, the same objects in live and simulated runs. Start with `dispatch.py`.

A rule sees only its arguments, returns a decision and acts on nothing; every order is total.
"""

from flexmarl.scheduling.admission import admit_first_come
from flexmarl.scheduling.allocation import PolicyDemand, SlotAction, SlotDecision, allocate_largest_backlog
from flexmarl.scheduling.dispatch import InstanceLoad, dispatch_least_loaded
from flexmarl.scheduling.micro_batches import ReadySample, cut_by_tokens, cut_in_order, cut_into_updates, taper_tokens
from flexmarl.scheduling.pipeline import PipelineRule

__all__ = [
    "InstanceLoad",
    "PipelineRule",
    "PolicyDemand",
    "ReadySample",
    "SlotAction",
    "SlotDecision",
    "admit_first_come",
    "allocate_largest_backlog",
    "cut_by_tokens",
    "cut_in_order",
    "cut_into_updates",
    "dispatch_least_loaded",
    "taper_tokens",
]
