"""Which queries a step runs: a function of the step's number alone, so the data cursor cannot be lost or doubled."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from flexmarl.core.errors import ConfigError
from flexmarl.core.rng import HashRng, derive_seed


class QueryOrder:
    """Goes through the data set in epochs, each in its own seeded order; what does not fill a step is left out.

    Invariant: within an epoch no query comes twice, so no step has a query twice.
    """

    def __init__(self, queries: Sequence[Mapping[str, object]], *, per_step: int, seed: int) -> None:
        """Take the training queries.

        Raises:
            ConfigError: there are fewer queries than a step needs.
        """
        if len(queries) < per_step:
            raise ConfigError(
                f"the training data has {len(queries)} queries, pipeline.queries_per_step={per_step} needs as many: "
                "give more data, or lower it"
            )
        self.queries = queries
        self._per_step = per_step
        self._steps_per_epoch = len(queries) // per_step
        self._epoch_order = lru_cache(maxsize=2)(self._shuffled)
        self._seed = seed

    def of_step(self, step: int) -> tuple[int, ...]:
        """Return the row numbers of a step's queries."""
        epoch, place = divmod(step, self._steps_per_epoch)
        order = self._epoch_order(epoch)
        return tuple(order[place * self._per_step : (place + 1) * self._per_step])

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.queries)))
        HashRng(derive_seed(self._seed, "query_order", epoch)).shuffle(order)
        return order
