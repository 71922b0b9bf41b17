"""Groups that are kept while their sender was not told so, and sends them again.

    async with answers.in_turn(digests):
        again = answers.are_again(digests)
        ... keep those that are not ...
        answers.settle(digests, again, is_told=True, through=seq)

An environment whose connection ended before the answer sends the same group again, and nothing in
the Atropos API tells that from another group that is equal. Whether the first was answered does: a
group that is equal to a kept one, of the same environment, whose sender was never told, is that
one. So for every post that was answered there is a group, and equal groups are all trained on.

What was told also survives a kill: the number of the newest group that was told is in a file that
is mapped into memory, which takes no wait for the disk. After the machine itself went down it is
not known, and then all count as told.
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
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES, _FILE_BYTES = 40, 48


class Answers:
    """Who was told, of one queue."""

    def __init__(self, file: mmap.mmap, *, told_through: int, newest: int) -> None:
        self._file = file
        self.told_through = told_through
        """Nobody was told of a group with a higher number."""
        self._newest = newest
        self._untold: OrderedDict[bytes, int] = OrderedDict()
        """How many groups of a content nobody was told of."""
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
                    os.pwrite(handle, bytes(_FILE_BYTES), 0)  # a full disk is an error here
                file = mmap.mmap(handle, _FILE_BYTES)
            finally:
                os.close(handle)
        if file[:_BOOT_BYTES] != boot or not boot.strip(b"\0"):
            # The number first: a kill in between leaves a number that does not count.
            struct.pack_into("<Q", file, _BOOT_BYTES, last)
            file[:_BOOT_BYTES] = boot
        [told_through] = struct.unpack_from("<Q", file, _BOOT_BYTES)
        return cls(file, told_through=told_through, newest=last)

    def miss(self, digest: bytes) -> None:
        """A group with this content is kept, and nobody was told."""
        self._untold[digest] = self._untold.pop(digest, 0) + 1
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

    def are_again(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each is a group that is kept already."""
        found: Counter[bytes] = Counter()
        again = []
        for digest in digests:
            found[digest] += 1
            again.append(found[digest] <= self._untold.get(digest, 0))
        return again

    def settle(
        self, digests: Sequence[bytes], again: Sequence[bool], *, is_told: bool, through: int
    ) -> None:
        """They are all kept, those that are new up to the number `through`, and their sender is
        told now; or has gone."""
        self._newest = max(self._newest, through)
        for digest, is_again in zip(digests, again, strict=True):
            if is_again and is_told:
                self._untold[digest] -= 1
                if not self._untold[digest]:
                    del self._untold[digest]
            elif not is_again and not is_told:
                self.miss(digest)
        if is_told:
            self.told_through = self._newest
            struct.pack_into("<Q", self._file, _BOOT_BYTES, self._newest)
