"""Counts the prompt tokens that a prefix cache leaves to compute, to the token.

    cache = PrefixCache(block_tokens=16)
    cache.add(tokens)      # tokens to compute for this prompt: all of them the first time
    cache.add(tokens)      # only its last block

The model of a paged cache: full blocks are found again by the tokens up to their end, the last
token of a prompt is always computed, and beyond `capacity_tokens` the blocks that were not used
for longest go first, the last ones of a prompt before the ones they build on.
"""

from bisect import bisect_left
from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from rookery.types import TokenIds

__all__ = ["PrefixCache"]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that its powers never become 0: the hash of a prefix is a sum over its tokens."""


class PrefixCache:
    """What is cached, by hash of the prefix that a block ends."""

    def __init__(self, *, block_tokens: int = 16, capacity_tokens: int | None = None) -> None:
        self._block = block_tokens
        self._capacity = None if capacity_tokens is None else capacity_tokens // block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()
        self._powers = np.ones(1, dtype=np.uint64)

    def add(self, tokens: TokenIds | NDArray[np.uint64], *, salt: int = 0) -> int:
        """Take a prompt in; the number of its tokens that had to be computed.

        `salt` tells models apart: their prefixes are not shared.
        """
        ends = self._ends(np.asarray(tokens, dtype=np.uint64), salt)
        known = self._known
        # A block is never kept without those it builds on, so the known ones come first.
        num_known = bisect_left(ends, True, key=lambda end: end not in known)
        hits = min(num_known, (len(tokens) - 1) // self._block)
        known.update(dict.fromkeys(reversed(ends[num_known:])))
        if self._capacity is not None:
            deque(map(known.move_to_end, reversed(ends[:num_known])), maxlen=0)
            while len(known) > self._capacity:
                known.popitem(last=False)
        return len(tokens) - hits * self._block

    def _ends(self, tokens: NDArray[np.uint64], salt: int) -> list[int]:
        """A hash per full block, of every token up to its end."""
        if len(tokens) > len(self._powers):
            powers = np.full(2 * len(tokens), _FACTOR, dtype=np.uint64)
            powers[0] = 1
            self._powers = np.cumprod(powers)
        mixed = (tokens + np.uint64(salt + 1)) * _FACTOR
        mixed ^= mixed >> np.uint64(29)
        sums = np.cumsum(mixed * self._powers[: len(tokens)])
        found: list[int] = sums[self._block - 1 :: self._block].tolist()
        return found
