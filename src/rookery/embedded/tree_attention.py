"""Attention of a prefill pass: each new token sees its own path through the prefix tree.

Queries are cut into blocks aligned to absolute positions, so that a token's bits do not depend on
where its node was cut. Short nodes are attended many at a time, each block with the keys of its
path gathered by place; a long node is attended by itself, its blocks sharing one copy of the keys.
Where a kernel takes sequences of unequal lengths, all nodes are attended in one call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from rookery.embedded.prefix import Node, TokenPool
from rookery.slots.attention import (
    KEY_BLOCK,
    Heads,
    attend_heads,
    attend_varlen,
    causal_mask,
    has_varlen,
)

__all__ = ["TreeAttend"]

QUERY_BLOCK = 8
"""Queries per block: 8 wastes little on short nodes and fills the kernel."""

LONG_BLOCKS = 4
"""A node of more blocks than this is attended by itself: gathering its path for each block would
cost more than the calls it saves."""

GROUP_KEYS = 16_384
"""Gathered keys of one group: at 200 numbers each for K and V, 25 MB."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to 8 neighbouring queries: their packed rows, and how many keys they may see."""

    node: Node
    first: int
    """Absolute position of the block's first query, a multiple of 8."""
    rows: range
    """Packed rows of the queries that are there."""
    offset: int
    """Where in the block they begin."""

    @property
    def num_keys(self) -> int:
        return -(-(self.first + QUERY_BLOCK) // KEY_BLOCK) * KEY_BLOCK


class _Group:
    """Blocks that are attended in one call, padded to the keys of the longest."""

    def __init__(self, blocks: Sequence[_Block], *, pool: TokenPool, is_shared: bool) -> None:
        device = pool.hidden.device
        num_keys = max(block.num_keys for block in blocks)
        gather = torch.zeros(len(blocks) * QUERY_BLOCK, dtype=torch.long)
        places: list[int] = []
        rows: list[int] = []
        for index, block in enumerate(blocks):
            begin = index * QUERY_BLOCK + block.offset
            span = range(begin, begin + len(block.rows))
            gather[begin : begin + len(block.rows)] = torch.arange(
                block.rows.start, block.rows.stop
            )
            places.extend(span)
            rows.extend(block.rows)
        positions = torch.tensor([[range(b.first, b.first + QUERY_BLOCK)] for b in blocks])
        sources = [blocks[0]] if is_shared else blocks
        keys = torch.zeros(len(sources), num_keys, dtype=torch.long)
        for index, block in enumerate(sources):
            path = block.node.path_places()[:num_keys]
            keys[index] = path[-1]  # padding is masked, but must not bring in foreign NaN
            keys[index, : len(path)] = path
        self._num_blocks = len(blocks)
        self._gather = gather.to(device)
        self._places = torch.tensor(places, device=device)
        self._rows = torch.tensor(rows, device=device)
        self._keys = keys.to(device)
        self._positions = positions.to(device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, heads: Heads) -> None:
        """q [rows, H, D] against kv [2, KV, places, D]; writes the group's rows of `out`."""
        _, num_heads, size = q.shape
        queries = q.index_select(0, self._gather)
        queries = queries.view(self._num_blocks, QUERY_BLOCK, num_heads, size).transpose(1, 2)
        sources, num_keys = self._keys.shape
        gathered = kv.index_select(2, self._keys.view(-1))
        gathered = gathered.view(2, kv.shape[1], sources, num_keys, size)
        keys, values = gathered.transpose(1, 2)
        if sources != self._num_blocks:
            keys = keys.expand(self._num_blocks, -1, -1, -1)
            values = values.expand(self._num_blocks, -1, -1, -1)
        mixed = attend_heads(queries, keys, values, self._mask(heads.window, q.dtype), heads)
        mixed = mixed.transpose(1, 2).reshape(-1, num_heads, size)
        out.index_copy_(0, self._rows, mixed.index_select(0, self._places))

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Causal. What padded queries attend to does not matter: their output is not read."""
        mask = self._masks.get(window)
        if mask is None:
            mask = causal_mask(self._positions, self._keys.shape[1], window=window, dtype=dtype)
            self._masks[window] = mask
        return mask


class _Paths:
    """All nodes with their paths, one after another."""

    def __init__(self, nodes: Sequence[Node], *, pool: TokenPool) -> None:
        device = pool.hidden.device
        paths = [node.path_places() for node in nodes]
        counts = [len(node.tokens) for node in nodes], [len(path) for path in paths]
        self._keys = torch.cat(paths).to(device)
        self._longest = (max(counts[0]), max(counts[1]))
        ends = torch.tensor([[0, *accumulate(own)] for own in counts], dtype=torch.int32)
        queries, keys = ends.to(device)
        self._ends = (queries, keys)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        """q [rows, H, D] against kv [2, KV, places, D]."""
        gathered = kv.index_select(2, self._keys).permute(2, 0, 1, 3)
        return attend_varlen(q, gathered, self._ends, self._longest, heads)


class TreeAttend:
    """Stores each new token's key and value, then lets every node see its path."""

    def __init__(self, nodes: Sequence[Node], *, pool: TokenPool, first_layer: int) -> None:
        self._nodes = nodes
        self._pool = pool
        self._first_layer = first_layer
        self._places = torch.cat([node.places for node in nodes]).to(pool.hidden.device)

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        cached = self._pool.kv[heads.layer - self._first_layer]
        cached.index_copy_(2, self._places, kv.permute(1, 2, 0, 3))
        if has_varlen(q, heads):
            return self._paths.attend(q, cached, heads)
        out = q.new_empty(q.shape)
        for group in self._groups:
            group.attend(q, cached, out, heads)
        return out

    @cached_property
    def _paths(self) -> _Paths:
        return _Paths(self._nodes, pool=self._pool)

    @cached_property
    def _groups(self) -> list[_Group]:
        return [
            _Group(blocks, pool=self._pool, is_shared=is_shared)
            for blocks, is_shared in _group(_blocks(self._nodes))
        ]


def _blocks(nodes: Sequence[Node]) -> list[list[_Block]]:
    """The blocks of each node."""
    found = []
    row = 0
    for node in nodes:
        own = []
        first = node.start // QUERY_BLOCK * QUERY_BLOCK
        for begin in range(first, node.stop, QUERY_BLOCK):
            low, high = max(begin, node.start), min(begin + QUERY_BLOCK, node.stop)
            rows = range(row + low - node.start, row + high - node.start)
            own.append(_Block(node=node, first=begin, rows=rows, offset=low - begin))
        found.append(own)
        row += len(node.tokens)
    return found


def _group(blocks_by_node: Sequence[Sequence[_Block]]) -> Iterator[tuple[Sequence[_Block], bool]]:
    """Groups of blocks, and whether they share one copy of their keys."""
    short: list[_Block] = []
    for blocks in blocks_by_node:
        if len(blocks) > LONG_BLOCKS:
            yield blocks, True
        else:
            short.extend(blocks)
    short.sort(key=lambda block: block.num_keys)
    group: list[_Block] = []
    for block in short:
        if group and (len(group) + 1) * block.num_keys > GROUP_KEYS:
            yield group, False
            group = []
        group.append(block)
    if group:
        yield group, False
