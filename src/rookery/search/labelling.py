"""A labelling: one label index per item, in item order, `UNLABELLED` where there is none yet.

labels = (0, UNLABELLED, 1)      # of three items, the first has label 0, the third label 1
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rookery.types import TokenIds

__all__ = [
    "UNLABELLED",
    "IdOrder",
    "Labels",
    "Order",
    "PrefixCache",
    "TreeOrder",
    "labelled_items",
    "relabel",
]

Labels = tuple[int, ...]

UNLABELLED = -1


def labelled_items(labels: Labels) -> tuple[int, ...]:
    """The items that have a label, in item order."""
    return tuple(item for item, label in enumerate(labels) if label != UNLABELLED)


def relabel(labels: Labels, item: int, label: int) -> Labels:
    """The same labelling with one label changed: relabel((0, 1), 1, 0) is (0, 0)."""
    return (*labels[:item], label, *labels[item + 1 :])


# The order of the other items before each target, so that targets share the prefixes they can.
#
#     order = TreeOrder([(0, 1), (2, 3)])
#     order.of(0)       # (2, 3, 1): the far half first, then the sibling
#     order.of(1)       # (2, 3, 0)
#
# Leaving one item out of a fixed list shares half of the work. On a balanced tree a target's prefix
# is, from the root down, the half it is not in; N contexts of N - 1 items then cost about
# N log2 N items in place of N * N. An order never changes: unlabelled items are skipped.


class IdOrder:
    """All other items as they are numbered: what a plain loop over the data does."""

    def __init__(self, num_items: int) -> None:
        self.leaves = tuple(range(num_items))

    def of(self, target: int) -> tuple[int, ...]:
        return self.leaves[:target] + self.leaves[target + 1 :]


class TreeOrder:
    """A balanced tree whose leaves are the items; a group of items is a subtree.

    So the items that are tied to a target stand last, next to it.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(tuple(group) for group in groups)
        self.leaves = tuple(item for group in self._groups for item in group)
        """The items from left to right: asked in this order, a small cache is enough."""

    def of(self, target: int) -> tuple[int, ...]:
        """Every other item, the farthest first."""
        return self._orders[target]

    @cached_property
    def _orders(self) -> dict[int, tuple[int, ...]]:
        orders: dict[int, tuple[int, ...]] = {}
        stack: list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]] = [(self._groups, ())]
        while stack:
            groups, prefix = stack.pop()
            if len(groups) == 1 and len(groups[0]) == 1:
                orders[groups[0][0]] = prefix
                continue
            left, right = _halves(groups)
            stack.append((left, prefix + _leaves(right)))
            stack.append((right, prefix + _leaves(left)))
        return orders


Order = IdOrder | TreeOrder


def _halves(
    groups: tuple[tuple[int, ...], ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Cut where both sides have as equal numbers of items as whole groups allow."""
    if len(groups) == 1:
        middle = (len(groups[0]) + 1) // 2
        return (groups[0][:middle],), (groups[0][middle:],)
    total = sum(len(group) for group in groups)
    best, gap, before = 1, total, 0
    for cut in range(1, len(groups)):
        before += len(groups[cut - 1])
        if abs(total - 2 * before) < gap:
            best, gap = cut, abs(total - 2 * before)
    return groups[:best], groups[best:]


def _leaves(groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(item for group in groups for item in group)


# Counts the prompt tokens that a prefix cache leaves to compute, to the token.
#
#     cache = PrefixCache(block_tokens=16)
#     cache.add(tokens)      # tokens to compute for this prompt: all of them the first time
#     cache.add(tokens)      # only its last block
#
# The model of a paged cache: full blocks are found again by the tokens up to their end, the last
# token of a prompt is always computed, and beyond `capacity_tokens` the blocks that were not used
# for longest go first, the last ones of a prompt before the ones they build on.


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
