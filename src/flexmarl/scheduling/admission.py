"""Which waiting trajectories may start."""

from collections.abc import Mapping, Sequence

from flexmarl.core.ids import TrajectoryKey


def admit_first_come(
    waiting: Sequence[TrajectoryKey],
    *,
    num_running: Mapping[tuple[int, int], int],
    inter_query: int | None,
    intra_query: int | None,
) -> list[TrajectoryKey]:
    """Return the trajectories of `waiting` that start now, in the order given.

    Args:
        waiting: Not yet started, first come first.
        num_running: (step, query) to its trajectories in flight; those without any may be missing.
        inter_query: Bound on queries with a trajectory in flight, over all steps; None does not bound them.
        intra_query: Bound on trajectories in flight of one query; None does not bound them.
    """
    running = {place: count for place, count in num_running.items() if count > 0}
    admitted = []
    for key in waiting:
        place = (key.step, key.query)
        count = running.get(place, 0)
        if count == 0 and inter_query is not None and len(running) >= inter_query:
            continue
        if intra_query is not None and count >= intra_query:
            continue
        running[place] = count + 1
        admitted.append(key)
    return admitted
