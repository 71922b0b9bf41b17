"""Memory for cached tokens: keys, values and hidden states, addressed by places.

A place holds one token of one sequence; whoever needs a token takes a place and gives it back.
Places need not lie together: attention gathers them by index.
"""

import math
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["TokenPool", "is_short_memory", "memory_bytes", "small_zero_pages", "zero_pages"]


def memory_bytes(device: torch.device) -> int:
    """All memory of the device, taken or free: what needs more can never be held."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def zero_pages(shape: Sequence[int], *, like: torch.Tensor) -> torch.Tensor:
    """Zeros of the type and device of `like`; on the CPU, untouched pages cost no memory.

    torch fills its zeros, which takes a second per gigabyte; numpy asks the kernel for them, in
    huge pages of 2 MB.
    """
    if like.device.type != "cpu" or 0 in shape:
        return like.new_zeros(*shape)
    raw = np.zeros(math.prod(shape) * like.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(*shape)


def small_zero_pages(shape: Sequence[int], *, like: torch.Tensor) -> torch.Tensor:
    """The same in pages of 4 KB, for what is written here and there: the places of a token lie in
    as many parts as there are layers and heads, and each part would take a huge page."""
    if like.device.type != "cpu" or sys.platform != "linux" or 0 in shape:
        return zero_pages(shape, like=like)
    num_bytes = math.prod(shape) * like.dtype.itemsize
    try:
        raw = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes cannot be had: {error.strerror}") from error
    raw.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(raw, dtype=like.dtype).view(*shape)


class TokenPool:
    """Places 0 .. capacity-1 for one range of layers. Grows when all are taken."""

    def __init__(
        self, *, kv_shape: tuple[int, int, int], hidden_size: int, like: torch.Tensor, capacity: int
    ) -> None:
        """`kv_shape` is (layers, KV heads, head size); `like` gives the type and the device."""
        layers, heads, size = kv_shape
        self.kv = small_zero_pages((layers, 2, heads, capacity, size), like=like)
        """[layers, 2, KV heads, places, head size]"""
        self.hidden = small_zero_pages((capacity, hidden_size), like=like)
        """[places, hidden]: what comes out of the last layer of the range."""
        self._free = torch.arange(capacity)
        self._num_free = capacity

    @property
    def num_taken(self) -> int:
        return len(self._free) - self._num_free

    def take(self, count: int) -> torch.Tensor:
        """`count` free places, [count] on the CPU."""
        if count > self._num_free:
            self._grow(count - self._num_free)
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].clone()

    def give_back(self, places: torch.Tensor) -> None:
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    def _grow(self, missing: int) -> None:
        """More places. Where memory is too short for them all, nothing has changed."""
        have = len(self._free)
        extra = max(missing, have // 2)
        room = self.kv.new_zeros(*self.kv.shape[:3], extra, self.kv.shape[4])
        kv = torch.cat([self.kv, room], dim=3)
        hidden = torch.cat([self.hidden, self.hidden.new_zeros(extra, self.hidden.shape[1])])
        self.kv, self.hidden = kv, hidden
        free = torch.empty(have + extra, dtype=torch.long)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + extra] = torch.arange(have, have + extra)
        self._free = free
        self._num_free += extra


def is_short_memory(error: Exception) -> bool:
    """torch's error for the CPU is a RuntimeError like any other, told apart by its words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
