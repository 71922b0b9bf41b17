"""Members sorted by score as they come and go.

    ranking.add(member)
    ranking.best(3)      # ids, best first

Adding and removing cost a bisection and the shift of a list of pointers.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from rookery.search.programs.program import Member

__all__ = ["Ranking"]

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
