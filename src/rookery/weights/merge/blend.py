"""One pass that makes a child entry by entry, and what can run it.

A row is cut into stretches. In each, the entries of every parent are trimmed by a limit or
multiplied by random factors; then the parents are added, or the sign is elected.

    Blend(rows=[x, y], bounds=bounds, entries=Trim(limits), weights=weights, out=child)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["NEXT_TO_NOTHING", "Blend", "Drop", "Engine", "Floats", "Integers", "Row", "Trim"]

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
NEXT_TO_NOTHING = np.float32(1e-30)
"""Added to the weights of the elected so that none elected gives 0 / 1e-30 = 0. It changes no
weight above 1e-22."""

Row = TypeVar("Row", Floats, torch.Tensor)
"""A row in this machine's memory, or on a GPU."""


@dataclass(frozen=True, slots=True)
class Trim(Generic[Row]):
    """Entries below the limit of their parent and stretch become 0."""

    limits: Sequence[Row]
    """Of each parent, [stretches]."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The entries of parent p in stretch s times `tables[p][starts[p, s]:]`."""

    tables: list[Floats]
    starts: Integers
    """[parents, stretches]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend(Generic[Row]):
    rows: list[Row]
    """The parents, contiguous."""
    bounds: Integers
    """[stretches, 2]: begin and end. What lies between stretches is left alone."""
    entries: Trim[Row] | Drop
    weights: Floats | None
    """Of sum 1, to elect by; None adds the parents as they are."""
    out: Row


class Engine(Protocol[Row]):
    """Runs passes; all give the same bits."""

    def limits(self, row: Row, *, bounds: Integers, counts: Integers) -> Row:
        """Per stretch the least of the `counts` largest magnitudes; infinity where it is 0."""
        ...

    def blend(self, blend: Blend[Row]) -> None:
        """Fill `out`."""
        ...
