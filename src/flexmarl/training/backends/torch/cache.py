"""The gradient cache: unnormalised gradient sums of a step, with what they count, in one buffer.

In float accumulation it adds in the precision of the parameters: any split or order of the samples gives the same sum
up to rounding. In canonical accumulation each sample's gradient is rounded once to a grid of 2**-40 and added as
integers: any split or order gives the same bits. The grid: a sum of up to 2**22 per parameter fits into 62 bits, while
its mean over 10 000 tokens is still resolved to 1e-16; overflow is an error, never a wrap.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flexmarl.core.errors import BackendError
from flexmarl.core.layout import Layout, PackedObject
from flexmarl.core.records import Denominators
from flexmarl.objects import unpack
from flexmarl.training.backends.torch.arena import NUM_SAMPLES, NUM_TOKENS, Arena, cache_layout

GRID_PER_UNIT = 2.0**40
MAX_GRID = 2.0**62
"""No sample and no sum may exceed it, so adding two that passed cannot wrap."""


class GradientCache:
    """Collects what backward leaves in the `.grad` of a model's parameters, which are views of one flat tensor."""

    def __init__(self, weights: Layout, parameters: Mapping[str, Tensor], *, is_canonical: bool) -> None:
        """Make an empty cache and point the `.grad` of `parameters` at its memory.

        In float accumulation that memory is the cache itself; in canonical accumulation it is one sample's scratch.
        """
        self._is_canonical = is_canonical
        self._parameters = parameters
        dtype = next(iter(parameters.values())).dtype
        sum_dtype = torch.int64 if is_canonical else dtype
        num_elements = weights.num_bytes // dtype.itemsize
        self._arena = Arena(cache_layout(weights, sum_dtype))
        self._sum_E = self._arena.section(0, num_elements * sum_dtype.itemsize, sum_dtype)
        self._gradient_E = torch.zeros(num_elements, dtype=dtype) if is_canonical else self._sum_E
        self._views = unpack(weights, self._gradient_E.view(torch.uint8))
        self._counts = (self._arena.tensor(NUM_SAMPLES), self._arena.tensor(NUM_TOKENS))
        for name, parameter in parameters.items():
            parameter.grad = self._views[name]

    @property
    def denominators(self) -> Denominators:
        """What the cache counts."""
        num_samples, num_tokens = self._counts
        return Denominators(num_samples=int(num_samples.item()), num_tokens=int(num_tokens.item()))

    def collect(self, denominators: Denominators) -> None:
        """Take over what backward has added to `.grad` since the last call, and count it.

        Raises:
            BackendError: a canonical sum left its range.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is None or parameter.grad.data_ptr() != self._views[name].data_ptr():
                raise BackendError(f"the gradient of {name} was moved out of the cache; nothing may replace .grad")
        if self._is_canonical:
            self._add_rounded()
        num_samples, num_tokens = self._counts
        num_samples += denominators.num_samples
        num_tokens += denominators.num_tokens

    def _add_rounded(self) -> None:
        grid_E = self._gradient_E.double().mul_(GRID_PER_UNIT).round_()
        _check_range(grid_E.abs().max().item(), "a sample's gradient")
        total_E = self._sum_E + grid_E.long()
        _check_range(float(total_E.abs().max().item()), "the gradient sum")
        self._sum_E.copy_(total_E)
        self._gradient_E.zero_()

    def mean(self, denominator: int) -> Tensor:
        """Return the gradient divided once by `denominator`, flat. The cache must be cleared before its next use."""
        if not self._is_canonical:
            return self._sum_E.div_(denominator)
        mean_E = self._sum_E.double().div_(GRID_PER_UNIT * denominator)
        return self._gradient_E.copy_(mean_E)

    def clear(self) -> None:
        """Empty it."""
        self._arena.buffer.zero_()
        self._gradient_E.zero_()

    def packed(self) -> PackedObject:
        """Return the cache itself, not a copy, as an object that can be published."""
        return self._arena.packed()

    def copy_from(self, packed: PackedObject) -> None:
        """Continue from a sealed cache. Raises BackendError when it is of another model or kind of accumulation."""
        self._gradient_E.zero_()
        self._arena.copy_from(packed)


def _check_range(largest: float, what: str) -> None:
    if not largest <= MAX_GRID:
        raise BackendError(
            f"{what} reaches {largest / GRID_PER_UNIT:g}, beyond the canonical grid's {MAX_GRID / GRID_PER_UNIT:g}: "
            "scale the rewards down, or set training.backend.accumulation=float"
        )
