"""Long vectors that entry-wise operators combine: adapters as rows, or one layer's dense deltas."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from rookery.weights.stack import Layout, Stack, places

__all__ = ["Piece", "Rows", "delta_rows", "factor_rows"]


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
    found = []
    for index, place in enumerate(places(layout)):
        width = (place.stop - place.start) // layout.rank
        sizes = tuple(ranks[index // 2] * width for ranks in ranks_P)
        found.append(Piece(place.start, place.stop, sizes))
    return tuple(found)


def delta_rows(population: Stack, *, layer: str, parents: list[int]) -> Rows:
    """The dense b @ a of one layer for each parent, [n, out * in], one piece."""
    dense = (population.b(layer)[parents] @ population.a(layer)[parents]).flatten(1)
    num, length = dense.shape
    return Rows(name=layer, data=dense, pieces=(Piece(0, length, (length,) * num),))
