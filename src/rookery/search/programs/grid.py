"""The feature grid of MAP-Elites with bounds that move: the best program of every cell.

    space = FeatureSpace(["complexity", "score"], bins=[10, 10])
    has_moved = space.widen((812.0, 0.4))
    cell = space.cell((812.0, 0.4))          # "5-5"

A dimension reaches from the smallest to the largest value seen, as in OpenEvolve. When a value
lies outside, all cells move: `Grid.replace_all` then places the holders anew, so that a cell never
holds a program of another one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["FeatureSpace", "Grid"]


class FeatureSpace:
    """The dimensions of the grid, their bins and the range of values seen so far."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        bins: Sequence[int],
        bounds: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._bins = tuple(bins)
        self._bounds = [(bounds or {}).get(name) for name in names]

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """(smallest, largest) value seen, by dimension; empty before the first program."""
        pairs = zip(self.names, self._bounds, strict=True)
        return {name: bound for name, bound in pairs if bound is not None}

    def widen(self, values: Sequence[float]) -> bool:
        """Take the values into the range; whether a bound moved."""
        wider = [
            (value, value) if bound is None else (min(bound[0], value), max(bound[1], value))
            for bound, value in zip(self._bounds, values, strict=True)
        ]
        has_moved = wider != self._bounds
        self._bounds = list(wider)
        return has_moved

    def coordinates(self, values: Sequence[float]) -> tuple[int, ...]:
        """The bin of each value; the middle bin while all values of a dimension are equal."""
        found = []
        for value, bound, bins in zip(values, self._bounds, self._bins, strict=True):
            assert bound is not None, "widen comes first"
            # Halves keep the span of the largest floats finite.
            span = bound[1] / 2 - bound[0] / 2
            share = (value / 2 - bound[0] / 2) / span if span > 0 else 0.5
            found.append(min(bins - 1, max(0, int(share * bins))))
        return tuple(found)

    def clip(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """The nearest bins that exist."""
        pairs = zip(coordinates, self._bins, strict=True)
        return tuple(min(bins - 1, max(0, place)) for place, bins in pairs)

    def cell(self, values: Sequence[float]) -> str:
        return cell_key(self.coordinates(values))


def cell_key(coordinates: Iterable[int]) -> str:
    """ "3-0" is bin 3 of the first dimension and bin 0 of the second, as OpenEvolve writes it."""
    return "-".join(map(str, coordinates))


class Grid:
    """The holder of every filled cell, by id."""

    def __init__(self, cells: Mapping[str, str] | None = None) -> None:
        self._holders: dict[str, str] = dict(cells or {})
        self._cells = {id: cell for cell, id in self._holders.items()}

    def __contains__(self, id: str) -> bool:
        """Whether the program holds a cell."""
        return id in self._cells

    def __iter__(self) -> Iterator[str]:
        """The ids of the holders."""
        return iter(self._cells)

    @property
    def cells(self) -> dict[str, str]:
        return dict(self._holders)

    def holder(self, cell: str) -> str | None:
        return self._holders.get(cell)

    def put(self, cell: str, id: str) -> None:
        """Give the cell to the program, whoever held it."""
        self._cells.pop(self._holders.get(cell, ""), None)
        self._holders[cell] = id
        self._cells[id] = cell

    def discard(self, id: str) -> None:
        """Empty the program's cell if it holds one."""
        cell = self._cells.pop(id, None)
        if cell is not None:
            del self._holders[cell]

    def replace_all(self, placed: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Hold (id, cell) pairs alone, best first: the first of a cell keeps it.

        Returns the ids that lost their cell.
        """
        self._holders, self._cells = {}, {}
        losers = []
        for id, cell in placed:
            if cell in self._holders:
                losers.append(id)
            else:
                self.put(cell, id)
        return tuple(losers)
