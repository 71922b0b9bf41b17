"""Computes prompts: every distinct prefix once, and the layers below the adapters once for all.

The layers are cut at the first adapted one. Below the cut the adapters do not matter, so all
models share one tree, the trunk; above it each model has its own, a branch.

    tokens -> trunk nodes: layers [0, cut) -> hidden -> branch nodes: layers [cut, L) -> hidden

A pass takes the uncomputed nodes of many sequences, lays their tokens end to end, and runs them
together; a node sees its ancestors' keys and values, whether computed earlier or in this pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rookery.embedded.prefix import Node, PrefixTree
from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.slots.attention import Heads, attend_heads, causal_mask

__all__ = ["Prefill", "PrefillStats", "Prompt"]

QUERY_BLOCK = 8
"""Queries are attended in blocks aligned to absolute positions, so that a token's bits do not
depend on where its node was cut; 8 wastes little on short nodes and fills the kernel."""

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


@dataclass(slots=True)
class _Pass:
    trunk: list[Node] = field(default_factory=list)
    branch: list[tuple[Node, int | None, tuple[int, ...]]] = field(default_factory=list)
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
        self.cut = cut
        self._trunk = self._make_tree(cut)
        self._branches: dict[int | None, PrefixTree] = {}

    def forget(self, slot: int) -> None:
        """Drop a slot's branch: its weights are about to change."""
        self._branches.pop(slot, None)

    def _make_tree(self, layers: int) -> PrefixTree:
        shape = self._model.shape
        return PrefixTree(
            kv_shape=(layers, shape.num_kv_heads, shape.head_dim),
            hidden_size=shape.hidden_size,
            like=self._like,
        )

    def advance(self, prompts: Sequence[Prompt], *, budget: int) -> None:
        """Plan the prompts in order until `budget` new tokens, and compute what was planned."""
        self._evict()
        planned = _Pass()
        for prompt in prompts:
            if budget <= 0:
                break
            if not prompt.is_planned:
                budget -= self._plan(prompt, planned, budget)
        self._run_trunk(planned)
        self._run_branches(planned)

    def _plan(self, prompt: Prompt, planned: _Pass, budget: int) -> int:
        tree = self._branches.get(prompt.slot)
        if tree is None:
            tree = self._branches[prompt.slot] = self._make_tree(
                self._model.shape.num_layers - self.cut
            )
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
        planned.branch.append((node, prompt.slot, prompt.tokens[:stop]))
        return stop - matched

    def _hold(self, prompt: Prompt, leaf: Node, trunk: Node | None) -> None:
        self.release(prompt)
        prompt.leaf, prompt.trunk = leaf, trunk
        leaf.pins += 1
        if trunk is not None:
            trunk.pins += 1

    def release(self, prompt: Prompt) -> None:
        """The prompt needs its nodes no longer; they stay until memory is short."""
        for node in (prompt.leaf, prompt.trunk):
            if node is not None:
                node.pins -= 1
        prompt.leaf = prompt.trunk = None

    def hidden(self, prompt: Prompt, start: int) -> torch.Tensor:
        """What the last layer made of the tokens from `start` to the end: [tokens, hidden]."""
        assert prompt.leaf is not None
        parts = [node.hidden[max(0, start - node.start) :] for node in prompt.leaf.path()]
        return torch.cat([part for part in parts if len(part)])

    def keys_and_values(self, prompt: Prompt) -> torch.Tensor:
        """[layers, 2, KV heads, tokens, head size] of the whole prompt, all layers, copied."""
        assert prompt.leaf is not None
        upper = torch.cat([node.kv for node in prompt.leaf.path()], dim=3)
        if prompt.trunk is None:
            return upper
        return torch.cat([torch.cat([n.kv for n in prompt.trunk.path()], dim=3), upper])

    def _run_trunk(self, planned: _Pass) -> None:
        if not self.cut:
            return
        fresh: dict[int, Node] = {}
        for _, _, tokens in planned.branch:
            node, _ = self._trunk.match(tokens)
            fresh.update({id(n): n for n in node.path() if not n.is_computed})
        nodes = list(fresh.values())
        if nodes:
            tokens_T = torch.tensor([t for n in nodes for t in n.tokens], device=self._like.device)
            hidden = self._model.embed(tokens_T)
            self._run(nodes, hidden, first=0, stop=self.cut, rows=None)
            self.stats.trunk_tokens += len(tokens_T)

    def _run_branches(self, planned: _Pass) -> None:
        fresh: dict[int, tuple[Node, int | None, tuple[int, ...]]] = {}
        for leaf, slot, tokens in planned.branch:
            for node in leaf.path():
                if not node.is_computed:
                    fresh.setdefault(id(node), (node, slot, tokens))
        if not fresh:
            return
        # Nodes of one slot lie together, so that its rows fill whole blocks.
        work = sorted(fresh.values(), key=lambda item: -1 if item[1] is None else item[1])
        nodes = [node for node, _, _ in work]
        hidden = torch.cat([self._below(node, tokens) for node, _, tokens in work])
        self._run(
            nodes,
            hidden,
            first=self.cut,
            stop=self._model.shape.num_layers,
            rows=self._slot_rows([(node, slot) for node, slot, _ in work]),
        )
        self.stats.branch_tokens += hidden.shape[0]

    def _below(self, node: Node, tokens: tuple[int, ...]) -> torch.Tensor:
        """The hidden states that enter the branch: embeddings, or what the trunk computed."""
        if not self.cut:
            return self._model.embed(torch.tensor(node.tokens, device=self._like.device))
        trunk, _ = self._trunk.match(tokens[: node.stop])
        parts = [n.hidden[max(0, node.start - n.start) :] for n in trunk.path()]
        return torch.cat([part for part in parts if len(part)])

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
        *,
        first: int,
        stop: int,
        rows: SlotRows | None,
    ) -> None:
        positions = torch.cat(
            [torch.arange(n.start, n.stop, device=self._like.device) for n in nodes]
        )
        attend = _TreeAttend(nodes, first_layer=first, dtype=hidden.dtype)
        hidden = self._model.layers(
            hidden, positions, attend=attend, rows=rows, span=range(first, stop)
        )
        start = 0
        for node in nodes:
            node.hidden.copy_(hidden[start : start + len(node.tokens)])
            node.is_computed = True
            start += len(node.tokens)

    def _evict(self) -> None:
        """Drop the least recently used leaves nobody needs until the cache fits."""
        trees = [self._trunk, *self._branches.values()]
        kept = sum(len(node.tokens) for tree in trees for node in tree.nodes())
        while kept > self._cache_tokens:
            leaves = [
                (node.last_used, tree, node)
                for tree in trees
                for node in tree.nodes()
                if not node.children and not node.pins
            ]
            if not leaves:
                return
            for _, tree, node in sorted(leaves, key=lambda leaf: leaf[0]):
                if kept <= self._cache_tokens:
                    return
                tree.remove(node)
                kept -= len(node.tokens)


class _TreeAttend:
    """Attention of a pass: stores each node's keys and values, then lets it see its path."""

    def __init__(self, nodes: Sequence[Node], *, first_layer: int, dtype: torch.dtype) -> None:
        self._first_layer = first_layer
        self._dtype = dtype
        self._parts: list[_Part] = []
        row = 0
        for node in nodes:
            self._parts.append(_Part(node, row=row))
            row += len(node.tokens)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads
    ) -> torch.Tensor:
        layer = heads.layer - self._first_layer
        for part in self._parts:
            kv = part.node.kv[layer]
            kv[0] = k[:, part.rows]
            kv[1] = v[:, part.rows]
        out = torch.empty_like(q)
        for part in self._parts:
            part.attend(q, out, layer, heads, self._dtype)
        return out


class _Part:
    """One node of a pass, its queries padded to whole aligned blocks."""

    def __init__(self, node: Node, *, row: int) -> None:
        self.node = node
        self.rows = slice(row, row + len(node.tokens))
        first = node.start // QUERY_BLOCK * QUERY_BLOCK
        self._num_blocks = -(-(node.stop - first) // QUERY_BLOCK)
        self._offset = node.start - first
        self._num_keys = first + self._num_blocks * QUERY_BLOCK
        self._path = node.path()
        self._positions = torch.arange(first, self._num_keys, device=node.kv.device).view(
            self._num_blocks, 1, QUERY_BLOCK
        )
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, layer: int, heads: Heads, dtype: torch.dtype
    ) -> None:
        """Write the attention of this node's rows q [H, rows, D] into `out`."""
        mask = self._masks.get(heads.window)
        if mask is None:
            mask = self._masks[heads.window] = causal_mask(
                self._positions, self._num_keys, window=heads.window, dtype=dtype
            )
        own = q[:, self.rows]
        padded = own.new_zeros(own.shape[0], self._num_blocks * QUERY_BLOCK, own.shape[2])
        padded[:, self._offset : self._offset + own.shape[1]] = own
        blocks = padded.view(own.shape[0], self._num_blocks, QUERY_BLOCK, -1).transpose(0, 1)
        kv = self._keys_and_values(layer)
        keys = kv[0].expand(self._num_blocks, -1, -1, -1)
        values = kv[1].expand(self._num_blocks, -1, -1, -1)
        mixed = attend_heads(blocks, keys, values, mask, heads).transpose(0, 1)
        mixed = mixed.reshape(padded.shape)
        out[:, self.rows] = mixed[:, self._offset : self._offset + own.shape[1]]

    def _keys_and_values(self, layer: int) -> torch.Tensor:
        """[2, KV, keys, D] of the whole path, zeros after its end."""
        parts = [node.kv[layer] for node in self._path]
        missing = self._num_keys - self.node.stop
        if missing:
            last = parts[-1]
            parts.append(last.new_zeros(2, last.shape[1], missing, last.shape[3]))
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
