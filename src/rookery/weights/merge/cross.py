"""Specifies a child to make (`Cross`), and the rows that entry-wise operators work on (`Rows`)."""

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

Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 32768
"""Numbers per block: 128 KiB, so that an operator's half dozen blocks stay in one core's cache.
Twice as many do not fit; with half as many the cost of the calls shows."""


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of consecutive blocks; independent of the number of threads."""
    for begin in range(start, stop, BLOCK):
        yield begin, min(begin + BLOCK, stop)


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int | None = None
) -> list[Result]:
    """Return the results in order, computed by up to `num_threads` threads, by default torch's."""
    num_threads = min(num_threads or torch.get_num_threads(), len(items))
    if num_threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))


class Piece(NamedTuple):
    """A range of the rows that is trimmed separately: one factor, or the delta of one layer."""

    start: int
    stop: int
    sizes: tuple[int, ...]
    """Count of weights per row, without the zeros that pad the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`data` [P, M] in pieces: whole adapters, or one layer's dense deltas. `name` separates the
    random streams of a child's layers."""

    name: str
    data: torch.Tensor
    pieces: tuple[Piece, ...]


def factor_rows(population: Stack) -> Rows:
    """Return whole adapters as rows; each factor is a piece."""
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
    """Return the dense b @ a of one layer for each parent, [n, out * in], as one piece."""
    dense = (population.b(layer)[parents] @ population.a(layer)[parents]).flatten(1)
    num, length = dense.shape
    return Rows(name=layer, data=dense, pieces=(Piece(0, length, (length,) * num),))


Space = Literal["delta", "factor"]
"""Space in which parents are combined: delta W = b @ a, or a and b separately.

Averaging a and b separately does not average delta W: two unrelated parents give an update of half
the size. It exists to reproduce published results.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross:
    """Parents (rows of a stack), weights and random key of a child, which depends on nothing else.

    `Cross(parents=(0, 3), weights=(0.4, 0.6), key=(seed, generation, child))`
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
        # Multiplying a tensor by a numpy number would give doubles.
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))


def normalised(cross: Cross) -> tuple[float, ...]:
    """Return the weights divided by their sum; AdapterError if that is 0."""
    total = sum(cross.weights)
    if total == 0:
        raise AdapterError(
            f"The weights {list(cross.weights)} sum to 0 and cannot be normalised; "
            "give weights with another sum."
        )
    return tuple(weight / total for weight in cross.weights)


def shares(cross: Cross) -> tuple[float, ...]:
    """Return the weights divided by their sum; AdapterError for a negative weight."""
    if min(cross.weights) < 0:
        raise AdapterError(
            f"Got the weights {list(cross.weights)}; this operator needs weights of at least 0. "
            "Use `linear` to go beyond the parents."
        )
    return normalised(cross)
