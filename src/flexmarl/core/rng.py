"""Seeds and random numbers that do not depend on scheduling.

Every random number derives from (run seed, what it is for, ...) by hashing, never from the order of events.
"""

import hashlib
from collections.abc import MutableSequence
from typing import Any, Protocol


class Rng(Protocol):
    """The randomness a scheduling rule may use; it arrives as an argument."""

    def random(self) -> float:
        """Return a float in [0, 1)."""
        ...

    def below(self, limit: int) -> int:
        """Return an int in [0, limit)."""
        ...

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Shuffle `items` in place."""
        ...


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part, its type and its place."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class HashRng:
    """A counter-based generator over BLAKE2b: slow, portable and the same on every machine."""

    def __init__(self, seed: int) -> None:
        """Start the stream of `seed`."""
        self._seed = seed
        self._count = 0

    def _next_bits(self) -> int:
        self._count += 1
        block = f"{self._seed}:{self._count}".encode()
        return int.from_bytes(hashlib.blake2b(block, digest_size=8).digest(), "big")

    def random(self) -> float:
        """Return a float in [0, 1) with 53 random bits."""
        return (self._next_bits() >> 11) / (1 << 53)

    def below(self, limit: int) -> int:
        """Return an int in [0, limit); the bias is below limit / 2**64."""
        return (self._next_bits() * limit) >> 64

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Shuffle `items` in place (Fisher-Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
