"""One child to make: which rows of a stack, how much of each, and the key of its randomness."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Literal, NamedTuple, TypeVar

import torch

from rookery.errors import AdapterError
from rookery.seeding import Key
from rookery.weights.stack import Layout, Stack, places

__all__ = [
    "BLOCK",
    "Cross",
    "Rows",
    "Space",
    "blocks",
    "delta_rows",
    "each",
    "factor_rows",
    "normalised",
    "shares",
]

# Long rows in blocks that fit the cache, and several rows at once on the cores there are.


Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 32768
"""Numbers per block: 128 KiB, so that the half dozen blocks of an operator stay in the cache of one
core. Twice as many fall out of it; with half as many the cost of the calls shows."""


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive blocks; the same whatever the number of threads."""
    for begin in range(start, stop, BLOCK):
        yield begin, min(begin + BLOCK, stop)


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int | None = None
) -> list[Result]:
    """The results in order, computed by as many threads as torch may use, or by fewer."""
    num_threads = min(num_threads or torch.get_num_threads(), len(items))
    if num_threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))


# Long vectors that entry-wise operators combine: adapters as rows, or one layer's dense deltas.


class Piece(NamedTuple):
    """A stretch of the rows that is trimmed by itself: one factor, or the delta of one layer."""

    start: int
    stop: int
    sizes: tuple[int, ...]
    """Per row, how many of its numbers are weights and not zeros that fill the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`data` [P, M], cut into pieces. `name` tells apart the draws of several rows of one child."""

    name: str
    data: torch.Tensor
    pieces: tuple[Piece, ...]


def factor_rows(population: Stack) -> Rows:
    """Whole adapters, every factor a piece."""
    pieces = _pieces(population.layout, population.ranks)
    return Rows(name="", data=population.data, pieces=pieces)


@lru_cache(maxsize=64)
def _pieces(layout: Layout, ranks_P: tuple[tuple[int, ...], ...]) -> tuple[Piece, ...]:
    stretches = []
    for index, place in enumerate(places(layout)):
        width = (place.stop - place.start) // layout.rank
        sizes = tuple(ranks[index // 2] * width for ranks in ranks_P)
        stretches.append(Piece(place.start, place.stop, sizes))
    return tuple(stretches)


def delta_rows(population: Stack, *, layer: str, parents: list[int]) -> Rows:
    """The dense b @ a of one layer for each parent, [n, out * in], one piece."""
    dense = (population.b(layer)[parents] @ population.a(layer)[parents]).flatten(1)
    num, length = dense.shape
    return Rows(name=layer, data=dense, pieces=(Piece(0, length, (length,) * num),))


Space = Literal["delta", "factor"]
"""Where parents are combined: on delta W = b @ a itself, or on a and b apart.

Averaging a and b apart is not averaging delta W: for two unrelated parents it gives an update of
half the size. It is there to reproduce published results.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross:
    """`Cross(parents=(0, 3), weights=(0.4, 0.6), key=(seed, generation, child))`.

    A child depends on its own cross alone, never on the others made in the same call.
    """

    parents: tuple[int, ...]
    weights: tuple[float, ...]
    key: Key = ()

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.weights):
            raise AdapterError(
                f"Got {len(self.parents)} parents and {len(self.weights)} weights; "
                "give at least one parent and one weight for each."
            )
        if not all(isinstance(weight, Real) and isfinite(weight) for weight in self.weights):
            raise AdapterError(
                f"Got the weights {list(self.weights)}; give finite numbers, one for each parent."
            )
        # Numbers of numpy would make double tensors of what is multiplied by them.
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))


def normalised(cross: Cross) -> tuple[float, ...]:
    """Weights divided by their sum."""
    total = sum(cross.weights)
    if total == 0:
        raise AdapterError(
            f"The weights {list(cross.weights)} sum to 0 and cannot be normalised; "
            "give weights with another sum."
        )
    return tuple(weight / total for weight in cross.weights)


def shares(cross: Cross) -> tuple[float, ...]:
    """Weights as parts of a whole: none negative, sum 1."""
    if min(cross.weights) < 0:
        raise AdapterError(
            f"Got the weights {list(cross.weights)}; this operator needs weights of at least 0. "
            "Use `linear` to go beyond the parents."
        )
    return normalised(cross)
