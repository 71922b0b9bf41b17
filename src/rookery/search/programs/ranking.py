"""Members sorted by score as they come and go.

    ranking.add(member)
    ranking.best(3)      # ids, best first

Adding and removing cost a bisection and the shift of a list of pointers.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rookery.search.fitness import crowding
from rookery.search.programs.program import Member

__all__ = [
    "Change",
    "Front",
    "Ranking",
]

Key = tuple[float, int, str]


class Ranking:
    """A sorted list of members: the best first, of equal scores the one told first."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._keys = sorted(_key(member) for member in members)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: int) -> str:
        """The id at a place; 0 is the best."""
        return self._keys[place][2]

    def __contains__(self, member: Member) -> bool:
        place = bisect_left(self._keys, _key(member))
        return place < len(self._keys) and self._keys[place][2] == member.id

    def __iter__(self) -> Iterator[str]:
        """Ids, best first."""
        return (key[2] for key in self._keys)

    def __reversed__(self) -> Iterator[str]:
        """Ids, worst first."""
        return (key[2] for key in reversed(self._keys))

    def best(self, count: int) -> tuple[str, ...]:
        return tuple(key[2] for key in self._keys[:count])

    def add(self, member: Member) -> None:
        insort(self._keys, _key(member))

    def discard(self, member: Member) -> None:
        """Remove the member if it is there."""
        if member in self:
            del self._keys[bisect_left(self._keys, _key(member))]


def _key(member: Member) -> Key:
    return (*member.rank, member.id)


# The Pareto front of the programs told so far, kept up to date one program at a time.
#
#     front = Front(size=100)
#     change = front.add("p7", (0.4, 0.9))    # Change(is_member=True, removed=("p2",))
#     front.draw(rng, among=island)           # the less crowded of two random members
#
# One insertion compares the newcomer with the members in one vectorised step. Bigger is better in
# every objective.


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one insertion did."""

    is_member: bool
    removed: tuple[str, ...] = ()
    """Members that the newcomer dominates, or the most crowded one of a full front."""


class Front:
    """The programs that none dominates, at most `size` of them.

    A full front drops its most crowded member. Of two with equal objectives the first one stays.
    """

    def __init__(self, *, size: int, members: Mapping[str, Sequence[float]] | None = None) -> None:
        members = members or {}
        self._size = size
        self._ids = list(members)
        self._values = np.array(list(members.values()), dtype=np.float64)
        self._distances: NDArray[np.float64] | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """In the order in which they joined."""
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
        if len(self._ids) > self._size:
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
        """The crowding distance of each member, in the order of `ids`."""
        if self._distances is None:
            self._distances = crowding(self._values)
        return self._distances

    def draw(self, rng: np.random.Generator, *, among: Container[str]) -> str:
        """The less crowded of two random members, as NSGA-II selects within a front.

        Only members of `among` take part, unless there are none.
        """
        places = [place for place, id in enumerate(self._ids) if id in among]
        places = places or list(range(len(self._ids)))
        first, second = (places[int(drawn)] for drawn in rng.integers(len(places), size=2))
        is_second = self.distances[second] > self.distances[first]
        return self._ids[second if is_second else first]

    def _keep(self, ids: list[str], values: NDArray[np.float64]) -> None:
        self._ids, self._values, self._distances = ids, values, None
