"""Which instance generates a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.core.errors import CapacityError
from flexmarl.core.ids import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """One instance as a dispatch rule sees it at one moment."""

    instance_id: InstanceId
    policy_version: int
    """The version it serves."""
    num_outstanding_tokens: int
    """Predicted tokens of accepted requests that are not finished."""


def dispatch_least_loaded(loads: Sequence[InstanceLoad], *, min_version: int, max_version: int) -> InstanceId:
    """Return the instance with the least outstanding work among those that serve a version in the bounds.

    Ties go to the smallest instance_id, so the choice depends on the arguments alone. O(n) in `loads`.

    Raises:
        CapacityError: no instance serves such a version; retry after the next publication or restart.
    """
    matching = [load for load in loads if min_version <= load.policy_version <= max_version]
    if not matching:
        raise CapacityError(f"0 of {len(loads)} instances serve a policy_version in [{min_version}, {max_version}]")
    return min(matching, key=lambda load: (load.num_outstanding_tokens, load.instance_id)).instance_id
