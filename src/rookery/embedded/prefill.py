"""Computes prompts: every distinct prefix once, and the layers below the adapters once for all.

The layers are cut at the first adapted one. Below the cut the adapters do not matter, so all
models share one tree, the trunk; above it each model has its own, a branch.

    tokens -> trunk nodes: layers [0, cut) -> hidden -> branch nodes: layers [cut, L) -> hidden

A pass takes the uncomputed nodes of many sequences, lays their tokens end to end, and runs them
together; a node sees its ancestors' keys and values, whether computed earlier or in this pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rookery.embedded.prefix import Node, PrefixTree, TokenPool
from rookery.embedded.tree_attention import TreeAttend
from rookery.slots import Segment, SlotRows, SlottedModel

__all__ = ["Prefill", "PrefillStats", "Prompt"]

SLOT_BLOCK = 16
"""Prompt rows per adapter block: long enough to be a matrix product, short enough to pad."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A token sequence on its way through the cache, for one slot (None: the base model)."""

    tokens: tuple[int, ...]
    slot: int | None
    num_planned: int = 0
    """Tokens that are in the tree, computed or in the pass being planned."""
    leaf: Node | None = None
    """The deepest branch node so far, pinned."""
    trunk: Node | None = None
    """The trunk node of the same tokens, pinned; None when there is no trunk."""
    pools: tuple[TokenPool, TokenPool] | None = None
    """Where trunk and leaf are kept: those of the cut under which they were computed."""

    @property
    def is_planned(self) -> bool:
        return self.num_planned == len(self.tokens)


@dataclass(slots=True)
class PrefillStats:
    """Counts since the engine started."""

    requested_tokens: int = 0
    """Prompt tokens as the requests gave them."""
    trunk_tokens: int = 0
    """Tokens run through the layers below the cut."""
    branch_tokens: int = 0
    """Tokens run through the layers above the cut: the prompt tokens really computed."""


_Planned = list[tuple[Node, int | None, tuple[int, ...]]]
"""Branch node, its slot, and the whole prefix up to its end."""


class Prefill:
    """The trees of one model and the passes that fill them."""

    def __init__(self, model: SlottedModel, *, cache_tokens: int) -> None:
        self._model = model
        self._cache_tokens = cache_tokens
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.stats = PrefillStats()
        self.set_cut(0)

    def set_cut(self, cut: int) -> None:
        """Forget everything and put the border between trunk and branches at layer `cut`."""
        trunk, branch = self._make_pool(cut), self._make_pool(self._model.shape.num_layers - cut)
        self.cut = cut
        self._trunk_pool, self._branch_pool = trunk, branch
        self._trunk = PrefixTree(self._trunk_pool)
        self._branches: dict[int | None, PrefixTree] = {}

    @property
    def num_cached(self) -> int:
        """Tokens held now, those of the trunk and of each branch."""
        return self._trunk_pool.num_taken + self._branch_pool.num_taken

    def clear(self) -> None:
        """Forget every prefix that no work in progress needs."""
        for tree in (self._trunk, *self._branches.values()):
            tree.clear()

    def forget(self, slot: int) -> None:
        """Drop a slot's branch: its weights are about to change. No prompt may be in it."""
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

    def advance(self, prompts: Sequence[Prompt], *, budget: int) -> None:
        """Plan the prompts in order until `budget` new tokens, and compute what was planned."""
        self._evict(headroom=budget)
        planned: _Planned = []
        for prompt in prompts:
            if budget <= 0:
                break
            if not prompt.is_planned:
                budget -= self._plan(prompt, planned, budget)
        self._run_trunk(planned)
        self._run_branches(planned)

    def _plan(self, prompt: Prompt, planned: _Planned, budget: int) -> int:
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

    def _hold(self, prompt: Prompt, leaf: Node, trunk: Node | None) -> None:
        self.release(prompt)
        prompt.leaf, prompt.trunk = leaf, trunk
        prompt.pools = (self._trunk_pool, self._branch_pool)
        leaf.pins += 1
        if trunk is not None:
            trunk.pins += 1

    def release(self, prompt: Prompt) -> None:
        """The prompt needs its nodes no longer; they stay until memory is short."""
        for node in (prompt.leaf, prompt.trunk):
            if node is not None:
                node.pins -= 1
        prompt.leaf = prompt.trunk = prompt.pools = None

    def hidden(self, prompt: Prompt, start: int) -> torch.Tensor:
        """What the last layer made of the tokens from `start` to the end: [tokens, hidden]."""
        assert prompt.leaf is not None and prompt.pools is not None
        return prompt.pools[1].hidden[prompt.leaf.path_places()[start:]]

    def keys_and_values(self, prompt: Prompt) -> torch.Tensor:
        """[layers, 2, KV heads, tokens, head size] of the whole prompt, all layers, copied."""
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
        # Nodes of one slot lie together, so that its rows fill whole blocks.
        work = sorted(fresh.values(), key=lambda item: -1 if item[1] is None else item[1])
        nodes = [node for node, _, _ in work]
        hidden = self._below([(node, tokens) for node, _, tokens in work])
        rows = self._slot_rows([(node, slot) for node, slot, _ in work])
        self._run(nodes, hidden, self._branch_pool, first=self.cut, rows=rows)
        self.stats.branch_tokens += hidden.shape[0]

    def _below(self, work: Sequence[tuple[Node, tuple[int, ...]]]) -> torch.Tensor:
        """The hidden states that enter the branch: embeddings, or what the trunk computed."""
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
