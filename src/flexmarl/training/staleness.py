"""The last guard before a process group sees a sample: which versions generated it (promise G3)."""

from collections.abc import Sequence

from flexmarl.core.errors import InvariantError
from flexmarl.core.records import Sample


def check_staleness(samples: Sequence[Sample], *, step: int, max_staleness: int) -> None:
    """Refuse tokens that are older than `max_staleness` versions, or newer than the weights of `step`.

    Raises:
        InvariantError: a token of a sample is; the message names the row.
    """
    for sample in samples:
        turn = sample.turn
        versions = {turn.policy_version, *(span.policy_version for span in turn.version_spans)}
        if min(versions) < step - max_staleness or max(versions) > step:
            raise InvariantError(
                f"row {turn.key} of policy {turn.policy} has tokens of policy_version {min(versions)} to "
                f"{max(versions)}; step {step} with max_staleness {max_staleness} trains "
                f"{max(0, step - max_staleness)} to {step} only"
            )
