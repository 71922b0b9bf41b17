"""A prefix tree over the KV cache: sequences with a common prefix share the nodes that hold it.

    tree = PrefixTree(pool)
    node, matched = tree.match(tokens)          # the longest known prefix
    node = tree.extend(node, tokens[matched:])  # the remaining tokens, to be computed

A node holds the places of its own tokens in a pool; a sequence is a path from the root. Matching
part of a node splits the node in two, without copying.
"""

import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import torch

__all__ = [
    "NO_MEMORY",
    "Node",
    "PrefixTree",
    "TokenPool",
    "is_short_memory",
    "memory_bytes",
    "small_zero_pages",
    "zero_pages",
]


def memory_bytes(device: torch.device) -> int:
    """Return the device's total memory, in use or free."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def zero_pages(shape: Sequence[int], *, like: torch.Tensor) -> torch.Tensor:
    """Make zeros with the type and device of `like`; on the CPU, untouched pages take no memory.

    torch writes its zeros, which takes 1 s per GB; numpy gets zeroed 2 MB pages from the kernel.
    """
    if like.device.type != "cpu" or 0 in shape:
        return like.new_zeros(*shape)
    raw = np.zeros(math.prod(shape) * like.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(*shape)


def small_zero_pages(shape: Sequence[int], *, like: torch.Tensor) -> torch.Tensor:
    """Like `zero_pages` in pages of 4 KB, for scattered writes: a token has a part per layer and
    head, and each part would take a huge page."""
    if like.device.type != "cpu" or sys.platform != "linux" or 0 in shape:
        return zero_pages(shape, like=like)
    num_bytes = math.prod(shape) * like.dtype.itemsize
    try:
        raw = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"Could not allocate {num_bytes:,} bytes: {error.strerror}") from error
    raw.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(raw, dtype=like.dtype).view(*shape)


class TokenPool:
    """Memory for the keys, values and hidden states of tokens, for one range of layers.

    A place 0 .. capacity-1 holds one token of one sequence. Places of a sequence need not be
    adjacent: attention gathers them by index. The pool grows when all places are taken.
    """

    def __init__(
        self, *, kv_shape: tuple[int, int, int], hidden_size: int, like: torch.Tensor, capacity: int
    ) -> None:
        """`kv_shape` is (layers, KV heads, head size); `like` gives the type and the device."""
        layers, heads, size = kv_shape
        self.kv = small_zero_pages((layers, 2, heads, capacity, size), like=like)
        """[layers, 2, KV heads, places, head size]"""
        self.hidden = small_zero_pages((capacity, hidden_size), like=like)
        """[places, hidden]: output of the range's last layer."""
        self._free = torch.arange(capacity)
        self._num_free = capacity

    @property
    def num_taken(self) -> int:
        return len(self._free) - self._num_free

    def take(self, count: int) -> torch.Tensor:
        """Take `count` free places: indices [count] on the CPU."""
        if count > self._num_free:
            self._grow(count - self._num_free)
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].clone()

    def give_back(self, places: torch.Tensor) -> None:
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    def _grow(self, missing: int) -> None:
        """Add places. If memory is short, the pool is unchanged."""
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


NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


def is_short_memory(error: Exception) -> bool:
    """Return whether memory was short. torch's CPU error is known only by its text."""
    return isinstance(error, NO_MEMORY) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


_clock = count()


class Node:
    """Consecutive tokens of a sequence, and their places in the pool."""

    __slots__ = ("children", "is_computed", "last_used", "parent", "pins", "places", "start",
                 "tokens")  # fmt: skip

    def __init__(
        self, tokens: tuple[int, ...], *, parent: "Node | None", places: torch.Tensor
    ) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start: int = parent.stop if parent is not None else 0
        self.children: dict[int, Node] = {}
        self.places = places
        self.is_computed = False
        self.pins = 0
        """Number of prompts in progress that use this node, which keep it and its ancestors."""
        self.last_used = next(_clock)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list["Node"]:
        """Return the nodes from the root's child down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_places(self) -> torch.Tensor:
        """Return the places of the whole sequence that ends at this node."""
        nodes = self.path()
        return nodes[0].places if len(nodes) == 1 else torch.cat([n.places for n in nodes])


class PrefixTree:
    """All sequences computed with one set of weights over one range of layers."""

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool
        self.root = Node((), parent=None, places=pool.take(0))
        self.root.is_computed = True

    def match(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """Return the node at which the longest known prefix ends, and that prefix's length."""
        node, matched = self.root, 0
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None:
                break
            common = _common(child.tokens, tokens, matched)
            if common < len(child.tokens):
                child = self._split(child, common)
            node, matched = child, matched + common
        node.last_used = next(_clock)
        return node, matched

    def extend(self, node: Node, tokens: Sequence[int]) -> Node:
        """Add a child of `node` that holds `tokens`, not yet computed."""
        assert tokens and tokens[0] not in node.children
        child = Node(tuple(tokens), parent=node, places=self._pool.take(len(tokens)))
        node.children[child.tokens[0]] = child
        return child

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents first."""
        queue = list(self.root.children.values())
        while queue:
            node = queue.pop()
            queue.extend(node.children.values())
            yield node

    def remove(self, node: Node) -> None:
        """Remove an unpinned leaf and return its places to the pool."""
        assert node.parent is not None and not node.children and not node.pins
        del node.parent.children[node.tokens[0]]
        self._pool.give_back(node.places)

    def clear(self) -> None:
        """Remove every node that no prompt in progress uses."""
        leaves = [node for node in self.nodes() if _is_free(node)]
        while leaves:
            node = leaves.pop()
            parent = node.parent
            self.remove(node)
            if parent is not None and parent is not self.root and _is_free(parent):
                leaves.append(parent)

    def _split(self, node: Node, at: int) -> Node:
        """Split a node and return the upper part. Pins stay with the lower part."""
        assert node.parent is not None
        upper = Node(node.tokens[:at], parent=node.parent, places=node.places[:at])
        upper.is_computed = node.is_computed
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.places = node.tokens[at:], node.places[at:]
        node.parent, node.start = upper, upper.stop
        upper.children = {node.tokens[0]: node}
        return upper


def _is_free(node: Node) -> bool:
    return not node.children and not node.pins


def _common(prefix: Sequence[int], tokens: Sequence[int], offset: int) -> int:
    """Return the length of the common prefix of `prefix` and `tokens[offset:]`."""
    limit = min(len(prefix), len(tokens) - offset)
    for i in range(limit):
        if prefix[i] != tokens[offset + i]:
            return i
    return limit
