"""Requests of one model in the order of their numbers, however they arrive.

    lane = Lane(next_seq=1)
    lane.add(2, "b")        # -> []          2 waits for 1
    lane.add(1, "a")        # -> ["a", "b"]

The SDK sends the chunks of one call side by side, the first of them last.
"""

from typing import Generic, TypeVar

__all__ = ["Lane"]

Item = TypeVar("Item")


class Lane(Generic[Item]):
    """The numbers of one model that have not been released yet."""

    def __init__(self, *, next_seq: int) -> None:
        self.next_seq = next_seq
        """The number that is released next."""
        self._waiting: dict[int, Item] = {}

    def add(self, seq: int, item: Item) -> list[Item]:
        """Take an item in; the items that can go now, in order."""
        self._waiting[seq] = item
        return self._release()

    def skip(self, through: int) -> tuple[list[Item], list[Item]]:
        """Wait for no number up to this one any more: the items that waited up to it, and those
        that can go now, in order."""
        lost = [self._waiting.pop(seq) for seq in sorted(self._waiting) if seq <= through]
        self.next_seq = max(self.next_seq, through + 1)
        return lost, self._release()

    def _release(self) -> list[Item]:
        released = []
        while self.next_seq in self._waiting:
            released.append(self._waiting.pop(self.next_seq))
            self.next_seq += 1
        return released

    @property
    def free_seq(self) -> int:
        """The number for an item that came without one: behind all others."""
        return max(self._waiting, default=self.next_seq - 1) + 1

    @property
    def waiting(self) -> list[Item]:
        """The items that wait for an earlier number."""
        return list(self._waiting.values())

    def clear(self) -> list[Item]:
        """Give up what still waits, and return it."""
        waiting, self._waiting = self.waiting, {}
        return waiting
