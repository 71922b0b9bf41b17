"""One island: its members, their ranking, its grid, and its migrants.

    island.add(member, is_migrant=False)
    island.draw(rng), island.draw_by_score(rng)     # ids

Draws cost the same for 100 members and for 10,000, up to a cumulative sum of their weights.

A ranking keeps members sorted by score. Adding and removing cost a bisection and the shift of a
list of pointers.

    ranking.add(member)
    ranking.best(3)      # ids, best first
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rookery.search.candidate import crowding
from rookery.search.programs.program import Member

__all__ = ["Change", "FeatureSpace", "Front", "Grid", "Island", "IslandState", "Ranking"]


Key = tuple[float, int, str]


class Ranking:
    """A sorted list of members: best first, of equal scores the earlier one."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._keys = sorted(_key(member) for member in members)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: int) -> str:
        """Return the id at a place; 0 is the best."""
        return self._keys[place][2]

    def __contains__(self, member: Member) -> bool:
        place = bisect_left(self._keys, _key(member))
        return place < len(self._keys) and self._keys[place][2] == member.id

    def __iter__(self) -> Iterator[str]:
        """Yield ids, best first."""
        return (key[2] for key in self._keys)

    def __reversed__(self) -> Iterator[str]:
        """Yield ids, worst first."""
        return (key[2] for key in reversed(self._keys))

    def best(self, count: int) -> tuple[str, ...]:
        return tuple(key[2] for key in self._keys[:count])

    def add(self, member: Member) -> None:
        insort(self._keys, _key(member))

    def discard(self, member: Member) -> None:
        if member in self:
            del self._keys[bisect_left(self._keys, _key(member))]


def _key(member: Member) -> Key:
    return (*member.rank, member.id)


# The Pareto front of all programs so far, updated one program at a time.
#
#     front = Front(size=100)
#     change = front.add("p7", (0.4, 0.9))    # Change(is_member=True, removed=("p2",))
#     front.draw(rng, among=island)           # the less crowded of two random members
#
# An insertion compares the newcomer with all members in one vectorised step. Bigger is better in
# every objective.


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The effect of one insertion."""

    is_member: bool
    removed: tuple[str, ...] = ()
    """Members that the newcomer dominates, or the most crowded one of a full front."""


class Front:
    """The programs that no other dominates, at most `size` of them; None: no limit. A full front
    drops its most crowded member. The first of two with equal objectives stays."""

    def __init__(
        self, *, size: int | None, members: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        members = members or {}
        self._size = size
        self._ids = list(members)
        self._values = np.array(list(members.values()), dtype=np.float64)
        self._distances: NDArray[np.float64] | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in the order they joined."""
        return tuple(self._ids)

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, id: str, objectives: Sequence[float]) -> Change:
        values = np.array(objectives, dtype=np.float64)
        if not self._ids:
            self._keep([id], values[None])
            return Change(is_member=True)
        if (self._values >= values).all(axis=1).any():
            return Change(is_member=False)
        is_worse = np.all(self._values <= values, axis=1)
        removed = [self._ids[place] for place in np.flatnonzero(is_worse)]
        ids = [self._ids[place] for place in np.flatnonzero(~is_worse)]
        self._keep([*ids, id], np.vstack([self._values[~is_worse], values]))
        if self._size is not None and len(self._ids) > self._size:
            removed.append(self._ids[int(np.argmin(self.distances))])
            self.discard(removed[-1])
        return Change(is_member=id in self, removed=tuple(one for one in removed if one != id))

    def discard(self, id: str) -> None:
        if id in self._ids:
            place = self._ids.index(id)
            ids = [other for other in self._ids if other != id]
            self._keep(ids, np.delete(self._values, place, axis=0))

    @property
    def distances(self) -> NDArray[np.float64]:
        """Crowding distance of each member, in the order of `ids`."""
        if self._distances is None:
            self._distances = crowding(self._values)
        return self._distances

    def draw(self, rng: np.random.Generator, *, among: Container[str]) -> str:
        """Draw the less crowded of two random members, as NSGA-II selects within a front. Only
        members of `among` take part, unless there are none."""
        places = [place for place, id in enumerate(self._ids) if id in among]
        places = places or list(range(len(self._ids)))
        first, second = (places[int(drawn)] for drawn in rng.integers(len(places), size=2))
        is_second = self.distances[second] > self.distances[first]
        return self._ids[second if is_second else first]

    def draw_by_wins(self, rng: np.random.Generator) -> str:
        """Draw a member in proportion to the number of objectives in which it is best."""
        wins = (self._values == self._values.max(axis=0)).sum(axis=1)
        return self._ids[int(rng.choice(len(self._ids), p=wins / wins.sum()))]

    def _keep(self, ids: list[str], values: NDArray[np.float64]) -> None:
        self._ids, self._values, self._distances = ids, values, None


# The feature grid of MAP-Elites with moving bounds: the best program of every cell.
#
#     space = FeatureSpace(["complexity", "score"], bins=[10, 10])
#     has_moved = space.widen((812.0, 0.4))
#     cell = space.cell((812.0, 0.4))          # "5-5"
#
# A dimension reaches from the smallest to the largest value so far, as in OpenEvolve. If a value
# lies outside, all cells move, and `Grid.replace_all` places the holders anew, so that no cell
# holds a program of another.


class FeatureSpace:
    """The dimensions of the grid, their bins and the range of values so far."""

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
        """(smallest, largest) value by dimension; empty before the first program."""
        pairs = zip(self.names, self._bounds, strict=True)
        return {name: bound for name, bound in pairs if bound is not None}

    def widen(self, values: Sequence[float]) -> bool:
        """Extend the range to the values; return whether a bound moved."""
        wider = [
            (value, value) if bound is None else (min(bound[0], value), max(bound[1], value))
            for bound, value in zip(self._bounds, values, strict=True)
        ]
        has_moved = wider != self._bounds
        self._bounds = list(wider)
        return has_moved

    def coordinates(self, values: Sequence[float]) -> tuple[int, ...]:
        """Return the bin of each value; the middle one while a dimension's values are equal."""
        bins_hit = []
        for value, bound, bins in zip(values, self._bounds, self._bins, strict=True):
            assert bound is not None, "widen comes first"
            # Halving avoids overflow of the largest floats.
            span = bound[1] / 2 - bound[0] / 2
            share = (value / 2 - bound[0] / 2) / span if span > 0 else 0.5
            bins_hit.append(min(bins - 1, max(0, int(share * bins))))
        return tuple(bins_hit)

    def clip(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Return the nearest existing bins."""
        pairs = zip(coordinates, self._bins, strict=True)
        return tuple(min(bins - 1, max(0, place)) for place, bins in pairs)

    def cell(self, values: Sequence[float]) -> str:
        return cell_key(self.coordinates(values))


def cell_key(coordinates: Iterable[int]) -> str:
    """Return a cell's name as in OpenEvolve: "3-0" is bin 3, then bin 0."""
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
        """Yield the ids of the holders."""
        return iter(self._cells)

    @property
    def cells(self) -> dict[str, str]:
        return dict(self._holders)

    def holder(self, cell: str) -> str | None:
        return self._holders.get(cell)

    def put(self, cell: str, id: str) -> None:
        """Give the cell to the program, replacing any holder."""
        self._cells.pop(self._holders.get(cell, ""), None)
        self._holders[cell] = id
        self._cells[id] = cell

    def discard(self, id: str) -> None:
        """Empty the program's cell if it holds one."""
        cell = self._cells.pop(id, None)
        if cell is not None:
            del self._holders[cell]

    def replace_all(self, placed: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Replace all holders by (id, cell) pairs, best first: the first of a cell keeps it.
        Returns the ids that lost their cell."""
        self._holders, self._cells = {}, {}
        losers = []
        for id, cell in placed:
            if cell in self._holders:
                losers.append(id)
            else:
                self.put(cell, id)
        return tuple(losers)


LOWEST_WEIGHT = 0.001
"""Least weight of a program in draws by score: OpenEvolve's number."""
HIGHEST_WEIGHT = 1e300
"""Largest weight, which keeps the sum of the weights finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandState:
    """An island as a value."""

    members: tuple[str, ...] = ()
    """In the order that draws index."""
    migrants: tuple[str, ...] = ()
    """Members that came from another island, sorted."""
    cells: dict[str, str]
    """{cell: id of its holder}."""
    num_children: int = 0
    """Children added to this island."""


class Island:
    """A group of programs that are parents and inspirations for one another."""

    def __init__(self, state: IslandState, *, members: Mapping[str, Member]) -> None:
        self.num_children = state.num_children
        self.grid = Grid(state.cells)
        self.migrants = set(state.migrants)
        self.ranking = Ranking(members[id] for id in state.members)
        self._digests = Counter(members[id].record.code.digest for id in state.members)
        self._ids = list(state.members)
        self._places = {id: place for place, id in enumerate(self._ids)}
        self._weights = np.zeros(max(16, 2 * len(self._ids)))
        self._weights[: len(self._ids)] = [_weight(members[id]) for id in self._ids]

    @property
    def state(self) -> IslandState:
        return IslandState(
            members=tuple(self._ids),
            migrants=tuple(sorted(self.migrants)),
            cells=self.grid.cells,
            num_children=self.num_children,
        )

    @property
    def best(self) -> str | None:
        return self.ranking[0] if len(self.ranking) else None

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: object) -> bool:
        return id in self._places

    def has_code(self, digest: str) -> bool:
        """Whether a member has exactly this text."""
        return self._digests[digest] > 0

    def add(self, member: Member, *, is_migrant: bool) -> None:
        place = len(self._ids)
        if place == len(self._weights):
            self._weights = np.concatenate([self._weights, np.zeros(place)])
        self._ids.append(member.id)
        self._places[member.id] = place
        self._weights[place] = _weight(member)
        self._digests[member.record.code.digest] += 1
        self.ranking.add(member)
        if is_migrant:
            self.migrants.add(member.id)

    def remove(self, member: Member) -> None:
        """Remove a member; the last one takes its place."""
        place, last = self._places.pop(member.id), len(self._ids) - 1
        moved = self._ids.pop()
        if moved != member.id:
            self._ids[place] = moved
            self._places[moved] = place
            self._weights[place] = self._weights[last]
        self._digests[member.record.code.digest] -= 1
        if not self._digests[member.record.code.digest]:
            del self._digests[member.record.code.digest]
        self.ranking.discard(member)
        self.grid.discard(member.id)
        self.migrants.discard(member.id)

    def draw(self, rng: np.random.Generator) -> str:
        """Draw a member uniformly."""
        return self._ids[int(rng.integers(len(self._ids)))]

    def draw_by_score(self, rng: np.random.Generator) -> str:
        """Draw a member in proportion to its score, at least `LOWEST_WEIGHT`."""
        sums = np.cumsum(self._weights[: len(self._ids)])
        place = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
        return self._ids[min(place, len(self._ids) - 1)]

    def draw_others(
        self, count: int, *, without: Iterable[str], rng: np.random.Generator
    ) -> tuple[str, ...]:
        """Draw up to `count` distinct members, none of `without`."""
        excluded = set(without)
        size = min(len(self._ids), count + len(excluded))
        drawn = (self._ids[int(i)] for i in rng.choice(len(self._ids), size=size, replace=False))
        return tuple(id for id in drawn if id not in excluded)[:count]


def _weight(member: Member) -> float:
    return min(max(member.score, LOWEST_WEIGHT), HIGHEST_WEIGHT)
