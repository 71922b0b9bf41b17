"""Computes prompts: each distinct prefix once, and the layers below the adapters once for all.

The layers are cut at the first adapted one. Adapters have no effect below the cut, so all models
share one prefix tree there, the trunk. Above the cut each model has its own tree, a branch.

    tokens -> trunk nodes: layers [0, cut) -> hidden -> branch nodes: layers [cut, L) -> hidden

A pass takes the uncomputed nodes of many sequences, lays their tokens end to end, and runs them
together. A node sees its ancestors' keys and values, computed earlier or in the same pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from rookery.embedded.prefix import Node, PrefixTree, TokenPool
from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.slots.attention import (
    KEY_BLOCK,
    Heads,
    attend_heads,
    attend_varlen,
    causal_mask,
    has_varlen,
)

__all__ = ["CachedPrompt", "Prefill"]


# In a prefill pass each new token attends to its own path through the prefix tree.
#
# Queries are cut into blocks aligned to absolute positions, so that a token's bits do not depend on
# where its node was cut. Many short nodes share a call, each block with its path's keys gathered. A
# long node has its own call, whose blocks share one copy of the keys. If the device has a kernel
# for sequences of unequal lengths, one call takes all nodes.


QUERY_BLOCK = 8
"""Queries per block: 8 waste little on short nodes and still fill the kernel."""

LONG_BLOCKS = 4
"""A node with more blocks has its own call, since gathering its path per block would cost more."""

GROUP_KEYS = 16_384
"""Limit on gathered keys per group: 25 MB at 200 numbers each for K and V."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to 8 neighbouring queries of a node."""

    node: Node
    first: int
    """Absolute position of the block's first query, a multiple of 8."""
    rows: range
    """Packed rows of the block's queries."""
    offset: int
    """Index in the block of the first of these queries."""

    @property
    def num_keys(self) -> int:
        return -(-(self.first + QUERY_BLOCK) // KEY_BLOCK) * KEY_BLOCK


class _Group:
    """Blocks that share one attention call, padded to the longest block's keys."""

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
            keys[index] = path[-1]  # padding is masked, but must not read another sequence's NaN
            keys[index, : len(path)] = path
        self._num_blocks = len(blocks)
        self._gather = gather.to(device)
        self._places = torch.tensor(places, device=device)
        self._rows = torch.tensor(rows, device=device)
        self._keys = keys.to(device)
        self._positions = positions.to(device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, heads: Heads) -> None:
        """Attend with q [rows, H, D] to kv [2, KV, places, D]; write the group's rows of `out`."""
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
        """Return the causal mask. It ignores padded queries, whose output is not read."""
        mask = self._masks.get(window)
        if mask is None:
            mask = causal_mask(self._positions, self._keys.shape[1], window=window, dtype=dtype)
            self._masks[window] = mask
        return mask


class _Paths:
    """All nodes and their paths laid end to end, for one call of the varlen kernel."""

    def __init__(self, nodes: Sequence[Node], *, pool: TokenPool) -> None:
        device = pool.hidden.device
        paths = [node.path_places() for node in nodes]
        counts = [len(node.tokens) for node in nodes], [len(path) for path in paths]
        self._keys = torch.cat(paths).to(device)
        self._longest = (max(counts[0]), max(counts[1]))
        ends = torch.tensor([[0, *accumulate(lengths)] for lengths in counts], dtype=torch.int32)
        queries, keys = ends.to(device)
        self._ends = (queries, keys)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Attend with q [rows, H, D] to kv [2, KV, places, D]."""
        gathered = kv.index_select(2, self._keys).permute(2, 0, 1, 3)
        return attend_varlen(q, gathered, self._ends, self._longest, heads)


class TreeAttend:
    """Stores the keys and values of new tokens, then lets every node attend to its path."""

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
    blocks_by_node = []
    row = 0
    for node in nodes:
        blocks = []
        first = node.start // QUERY_BLOCK * QUERY_BLOCK
        for begin in range(first, node.stop, QUERY_BLOCK):
            low, high = max(begin, node.start), min(begin + QUERY_BLOCK, node.stop)
            rows = range(row + low - node.start, row + high - node.start)
            blocks.append(_Block(node=node, first=begin, rows=rows, offset=low - begin))
        blocks_by_node.append(blocks)
        row += len(node.tokens)
    return blocks_by_node


def _group(blocks_by_node: Sequence[Sequence[_Block]]) -> Iterator[tuple[Sequence[_Block], bool]]:
    """Yield groups of blocks, and whether a group shares one copy of its keys."""
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


SLOT_BLOCK = 16
"""Prompt rows per adapter block: enough for a matrix product, and little padding."""


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """A token sequence during its computation, for one slot (None: the base model)."""

    tokens: tuple[int, ...]
    slot: int | None
    num_planned: int = 0
    """Tokens that are in the tree: computed, or part of the pass being planned."""
    leaf: Node | None = None
    """Deepest branch node so far, pinned."""
    trunk: Node | None = None
    """Trunk node of the same tokens, pinned; None if there is no trunk."""
    pools: tuple[TokenPool, TokenPool] | None = None
    """Pools of `trunk` and `leaf`, from the cut under which they were computed."""

    @property
    def is_planned(self) -> bool:
        return self.num_planned == len(self.tokens)


@dataclass(slots=True)
class PrefillStats:
    """Token counts since the engine started."""

    requested_tokens: int = 0
    """Prompt tokens in all requests."""
    trunk_tokens: int = 0
    """Tokens computed through the layers below the cut."""
    branch_tokens: int = 0
    """Tokens computed through the layers above the cut."""


_Planned = list[tuple[Node, int | None, tuple[int, ...]]]
"""(branch node, its slot, all tokens up to the node's end) for each prompt of a pass."""


class Prefill:
    """The prefix trees of one model, and the passes that fill them."""

    def __init__(self, model: SlottedModel, *, cache_tokens: int) -> None:
        self._model = model
        self._cache_tokens = cache_tokens
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.stats = PrefillStats()
        self.set_cut(0)

    def set_cut(self, cut: int) -> None:
        """Forget everything, and place the border between trunk and branches at layer `cut`."""
        trunk, branch = self._make_pool(cut), self._make_pool(self._model.shape.num_layers - cut)
        self.cut = cut
        self._trunk_pool, self._branch_pool = trunk, branch
        self._trunk = PrefixTree(self._trunk_pool)
        self._branches: dict[int | None, PrefixTree] = {}

    @property
    def num_cached(self) -> int:
        return self._trunk_pool.num_taken + self._branch_pool.num_taken

    def clear(self) -> None:
        """Forget every prefix that no prompt uses."""
        for tree in (self._trunk, *self._branches.values()):
            tree.clear()

    def forget(self, slot: int) -> None:
        """Drop a slot's branch before its weights change. No prompt may use it."""
        branch = self._branches.pop(slot, None)
        if branch is not None:
            branch.clear()
            assert not branch.root.children, "a prompt is still in the branch"

    def _make_pool(self, layers: int) -> TokenPool:
        shape = self._model.shape
        return TokenPool(
            kv_shape=(layers, shape.num_kv_heads, shape.head_dim),
            hidden_size=shape.hidden_size,
            like=self._like,
            capacity=self._cache_tokens if layers else 1,
        )

    def advance(self, prompts: Sequence[CachedPrompt], *, budget: int) -> None:
        """Plan prompts in order, up to `budget` new tokens, and compute the planned nodes."""
        self._evict(headroom=budget)
        planned: _Planned = []
        for prompt in prompts:
            if budget <= 0:
                break
            if not prompt.is_planned:
                budget -= self._plan(prompt, planned, budget)
        self._run_trunk(planned)
        self._run_branches(planned)

    def _plan(self, prompt: CachedPrompt, planned: _Planned, budget: int) -> int:
        tree = self._branches.get(prompt.slot)
        if tree is None:
            tree = self._branches[prompt.slot] = PrefixTree(self._branch_pool)
        node, matched = tree.match(prompt.tokens)
        stop = min(len(prompt.tokens), matched + budget)
        if matched < stop:
            node = tree.extend(node, prompt.tokens[matched:stop])
        trunk = None
        if self.cut:
            trunk, known = self._trunk.match(prompt.tokens[:stop])
            if known < stop:
                trunk = self._trunk.extend(trunk, prompt.tokens[known:stop])
        self._hold(prompt, node, trunk)
        prompt.num_planned = stop
        planned.append((node, prompt.slot, prompt.tokens[:stop]))
        return stop - matched

    def _hold(self, prompt: CachedPrompt, leaf: Node, trunk: Node | None) -> None:
        self.release(prompt)
        prompt.leaf, prompt.trunk = leaf, trunk
        prompt.pools = (self._trunk_pool, self._branch_pool)
        leaf.pins += 1
        if trunk is not None:
            trunk.pins += 1

    def release(self, prompt: CachedPrompt) -> None:
        """Unpin a prompt's nodes; they stay cached until memory is short."""
        for node in (prompt.leaf, prompt.trunk):
            if node is not None:
                node.pins -= 1
        prompt.leaf = prompt.trunk = prompt.pools = None

    def hidden(self, prompt: CachedPrompt, start: int) -> torch.Tensor:
        """Return the last layer's output for the tokens from `start` on: [tokens, hidden]."""
        assert prompt.leaf is not None and prompt.pools is not None
        return prompt.pools[1].hidden[prompt.leaf.path_places()[start:]]

    def keys_and_values(self, prompt: CachedPrompt) -> torch.Tensor:
        """Copy the whole prompt's cache of all layers: [layers, 2, KV heads, tokens, head size]."""
        assert prompt.leaf is not None and prompt.pools is not None
        trunk, branch = prompt.pools
        upper = branch.kv[:, :, :, prompt.leaf.path_places()]
        if prompt.trunk is None:
            return upper
        return torch.cat([trunk.kv[:, :, :, prompt.trunk.path_places()], upper])

    def _run_trunk(self, planned: _Planned) -> None:
        if not self.cut:
            return
        fresh: dict[int, Node] = {}
        for _, _, tokens in planned:
            node, _ = self._trunk.match(tokens)
            fresh.update({id(n): n for n in node.path() if not n.is_computed})
        nodes = list(fresh.values())
        if nodes:
            tokens_T = torch.tensor([t for n in nodes for t in n.tokens], device=self._like.device)
            hidden = self._model.embed(tokens_T)
            self._run(nodes, hidden, self._trunk_pool, first=0, rows=None)
            self.stats.trunk_tokens += len(tokens_T)

    def _run_branches(self, planned: _Planned) -> None:
        fresh: dict[int, tuple[Node, int | None, tuple[int, ...]]] = {}
        for leaf, slot, tokens in planned:
            for node in leaf.path():
                if not node.is_computed:
                    fresh.setdefault(id(node), (node, slot, tokens))
        if not fresh:
            return
        # Nodes of one slot are adjacent, so that its rows fill whole blocks.
        work = sorted(fresh.values(), key=lambda item: -1 if item[1] is None else item[1])
        nodes = [node for node, _, _ in work]
        hidden = self._below([(node, tokens) for node, _, tokens in work])
        rows = self._slot_rows([(node, slot) for node, slot, _ in work])
        self._run(nodes, hidden, self._branch_pool, first=self.cut, rows=rows)
        self.stats.branch_tokens += hidden.shape[0]

    def _below(self, work: Sequence[tuple[Node, tuple[int, ...]]]) -> torch.Tensor:
        """Return the hidden states that enter the branch: embeddings, or the trunk's output."""
        device = self._like.device
        if not self.cut:
            tokens = [token for node, _ in work for token in node.tokens]
            return self._model.embed(torch.tensor(tokens, device=device))
        places = []
        for node, prefix in work:
            trunk, _ = self._trunk.match(prefix[: node.stop])
            places.append(trunk.path_places()[node.start :])
        return self._trunk_pool.hidden[torch.cat(places).to(device)]

    def _slot_rows(self, work: Sequence[tuple[Node, int | None]]) -> SlotRows | None:
        rows_by_slot: dict[int, list[int]] = {}
        row = 0
        for node, slot in work:
            if slot is not None:
                rows_by_slot.setdefault(slot, []).extend(range(row, row + len(node.tokens)))
            row += len(node.tokens)
        if not rows_by_slot:
            return None
        segments = [
            Segment(slot=slot, rows=rows, block=SLOT_BLOCK) for slot, rows in rows_by_slot.items()
        ]
        return SlotRows(segments, num_rows=row, device=self._like.device)

    def _run(
        self,
        nodes: Sequence[Node],
        hidden: torch.Tensor,
        pool: TokenPool,
        *,
        first: int,
        rows: SlotRows | None,
    ) -> None:
        positions = torch.cat([torch.arange(n.start, n.stop) for n in nodes]).to(hidden.device)
        attend = TreeAttend(nodes, pool=pool, first_layer=first)
        span = range(first, first + len(pool.kv))
        hidden = self._model.layers(hidden, positions, attend=attend, rows=rows, span=span)
        pool.hidden[torch.cat([node.places for node in nodes])] = hidden
        for node in nodes:
            node.is_computed = True

    def _evict(self, *, headroom: int) -> None:
        """Drop the least recently used unpinned leaves until `headroom` tokens fit."""
        groups = [
            (self._trunk_pool, [self._trunk]),
            (self._branch_pool, [*self._branches.values()]),
        ]
        for pool, trees in groups:
            while pool.num_taken > self._cache_tokens - headroom:
                leaves = [
                    (node.last_used, tree, node)
                    for tree in trees
                    for node in tree.nodes()
                    if not node.children and not node.pins
                ]
                if not leaves:
                    break
                for _, tree, node in sorted(leaves, key=lambda leaf: leaf[0]):
                    if pool.num_taken <= self._cache_tokens - headroom:
                        break
                    tree.remove(node)
