"""Groups that are kept while their sender was not told so, and sends them again.

    async with answers.in_turn(digests):
        known = answers.find(digests)
        ... keep those that are not known ...
        answers.settle(digests, seqs, is_told=True)

An environment whose connection ended before the answer sends the same group again, and nothing in
the Atropos API tells that from another group that is equal. Whether the first was answered does: a
group that is equal to a kept one, of the same environment, whose sender was never told, is that
one. So for every post that was answered there is a group, and equal groups are all trained on.

What was told also survives a kill: the numbers of the newest groups that were told are in a file
that is mapped into memory, which takes no wait for the disk. After the machine itself went down
they are not known, and then all count as told.
"""

import asyncio
import mmap
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from rookery.runs.disk import disk_boundary

__all__ = ["Answers"]

MAX_UNTOLD = 100_000
"""Contents whose sender was not told: older ones are forgotten, and count as new when they come
again."""
NUM_NUMBERS = 4096
"""In the file: more than are ever on their way at the same time."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES = 40
_FILE_BYTES = _BOOT_BYTES + 8 * NUM_NUMBERS


class Answers:
    """Who was told, of one queue."""

    def __init__(self, file: mmap.mmap, *, last: int) -> None:
        self._file = file
        self._oldest = last - NUM_NUMBERS
        """Groups up to this number count as told."""
        self._untold: OrderedDict[bytes, list[int]] = OrderedDict()
        """The numbers of groups that nobody was told of, by their content."""
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def open(cls, path: Path, *, last: int) -> "Answers":
        """`last` is the number of the newest group. Waits for the disk."""
        boot = _BOOT.read_bytes().strip() if _BOOT.exists() else b""
        boot = boot[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")
        with disk_boundary(f"Opening {path}"):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(handle).st_size != _FILE_BYTES:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, bytes(_FILE_BYTES), 0)  # a full disk is an error here
                file = mmap.mmap(handle, _FILE_BYTES)
            finally:
                os.close(handle)
        answers = cls(file, last=last)
        if file[:_BOOT_BYTES] != boot or not boot.strip(b"\0"):
            # The numbers first: a kill in between leaves some that do not count.
            for seq in range(max(1, answers._oldest), last + 1):
                answers._tell(seq)
            file[:_BOOT_BYTES] = boot
        return answers

    def is_told(self, seq: int) -> bool:
        """Whether somebody may have been told of a group."""
        return seq <= self._oldest or self._file[self._place(seq)] == struct.pack("<Q", seq)

    def miss(self, digest: bytes, seq: int) -> None:
        """A group with this content is kept, and nobody was told."""
        numbers = self._untold.setdefault(digest, [])
        if seq not in numbers:
            numbers.append(seq)
        self._untold.move_to_end(digest)
        while len(self._untold) > MAX_UNTOLD:
            self._untold.popitem(last=False)

    @asynccontextmanager
    async def in_turn(self, digests: Sequence[bytes]) -> AsyncIterator[None]:
        """Equal groups one after the other: the first may still be written when its sender, who
        waited long enough, sends it again."""
        async with AsyncExitStack() as stack:
            for digest in sorted(set(digests)):
                turn = self._turns.setdefault(digest, asyncio.Lock())
                await stack.enter_async_context(turn)
            yield

    def find(self, digests: Sequence[bytes]) -> list[int | None]:
        """The number of each that is a group that is kept already."""
        counted: Counter[bytes] = Counter()
        found: list[int | None] = []
        for digest in digests:
            numbers = self._untold.get(digest, [])
            place = counted[digest]
            found.append(numbers[place] if place < len(numbers) else None)
            counted[digest] += 1
        return found

    def settle(self, digests: Sequence[bytes], seqs: Sequence[int], *, is_told: bool) -> None:
        """They are kept under these numbers, and their sender is told now; or has gone."""
        for digest, seq in zip(digests, seqs, strict=True):
            if not is_told:
                self.miss(digest, seq)
                continue
            self._tell(seq)
            left = [own for own in self._untold.pop(digest, []) if own != seq]
            if left:
                self._untold[digest] = left

    def _tell(self, seq: int) -> None:
        self._file[self._place(seq)] = struct.pack("<Q", seq)

    def _place(self, seq: int) -> slice:
        begin = _BOOT_BYTES + 8 * (seq % NUM_NUMBERS)
        return slice(begin, begin + 8)
