"""A stream of random integers that is the same on every machine and every Python."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Stream:
    """Random choices from SHA-256 in counter mode, named by anything that has a plain text.

    Two streams with different names are independent; a stream never looks at the clock, the
    hash seed or the versions of Python and numpy.
    """

    def __init__(self, *name: int | str) -> None:
        """Start the stream called ``name``."""
        self._key = "\x1f".join(str(part) for part in name).encode()
        self._counter = 0

    def _word(self) -> int:
        block = hashlib.sha256(self._key + b"\x1e%d" % self._counter).digest()
        self._counter += 1
        return int.from_bytes(block[:8])

    def below(self, n: int) -> int:
        """A uniform integer in ``[0, n)``; ``n`` at most 2**64."""
        limit = 2**64 - 2**64 % n
        while True:
            word = self._word()
            if word < limit:  # the rest would favour small numbers
                return word % n

    def happens(self, probability: float) -> bool:
        """True with the given probability, exactly to 53 bits."""
        return self.below(2**53) < int(probability * 2**53)

    def choice(self, values: Sequence[T]) -> T:
        """One of ``values``, uniformly."""
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """``values`` in a uniformly random order (Fisher and Yates)."""
        result = list(values)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result

    def sample(self, values: Sequence[T], size: int) -> list[T]:
        """``size`` different ones of ``values``, in random order."""
        return self.shuffled(values)[:size]
