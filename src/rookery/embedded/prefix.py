"""The prefix tree: token sequences that share a beginning share the nodes that hold its KV cache.

    tree = PrefixTree(...)
    node, matched = tree.match(tokens)        # the longest known prefix
    node = tree.extend(node, tokens[matched:])  # what is left to compute

A node's tensors belong to its own tokens; a sequence is the path from the root. Matching part of
a node splits it in two, without copying.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import torch

__all__ = ["Node", "PrefixTree"]

_clock = count()


class Node:
    """Consecutive tokens of a sequence, with what one range of layers computed of them."""

    __slots__ = ("children", "hidden", "is_computed", "kv", "last_used", "parent", "pins", "start",
                 "tokens")  # fmt: skip

    def __init__(
        self,
        tokens: tuple[int, ...],
        *,
        parent: "Node | None",
        kv: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start: int = parent.stop if parent is not None else 0
        self.children: dict[int, Node] = {}
        self.kv = kv
        """[layers, 2, KV heads, tokens, head size]: keys and values"""
        self.hidden = hidden
        """[tokens, hidden]: what comes out of the last layer of the range"""
        self.is_computed = False
        self.pins = 0
        """Work in progress that needs this node: it and its ancestors stay."""
        self.last_used = next(_clock)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list["Node"]:
        """The nodes from the root's child down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """All sequences known to one set of weights over one range of layers."""

    def __init__(self, *, kv_shape: tuple[int, int, int], hidden_size: int, like: torch.Tensor):
        """`kv_shape` is (layers, KV heads, head size); `like` gives the type and the device."""
        self._kv_shape = kv_shape
        self._hidden_size = hidden_size
        self._like = like
        self.root = self._make((), parent=None)
        self.root.is_computed = True

    def match(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """The node where the longest known prefix ends, and that prefix's length."""
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
        """A new child of `node`, not yet computed, that holds `tokens`."""
        assert tokens and tokens[0] not in node.children
        child = self._make(tuple(tokens), parent=node)
        node.children[child.tokens[0]] = child
        return child

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        queue = list(self.root.children.values())
        while queue:
            node = queue.pop()
            queue.extend(node.children.values())
            yield node

    def remove(self, node: Node) -> None:
        """Forget a leaf."""
        assert node.parent is not None and not node.children and not node.pins
        del node.parent.children[node.tokens[0]]

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper half. Pins stay with the lower one."""
        assert node.parent is not None
        upper = Node(
            node.tokens[:at],
            parent=node.parent,
            kv=node.kv[:, :, :, :at],
            hidden=node.hidden[:at],
        )
        upper.is_computed = node.is_computed
        node.parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.kv, node.hidden = node.kv[:, :, :, at:], node.hidden[at:]
        node.parent, node.start = upper, upper.stop
        upper.children = {node.tokens[0]: node}
        return upper

    def _make(self, tokens: tuple[int, ...], *, parent: Node | None) -> Node:
        layers, heads, size = self._kv_shape
        return Node(
            tokens,
            parent=parent,
            kv=self._like.new_empty(layers, 2, heads, len(tokens), size),
            hidden=self._like.new_empty(len(tokens), self._hidden_size),
        )


def _common(prefix: Sequence[int], tokens: Sequence[int], offset: int) -> int:
    """How many tokens of `prefix` equal those of `tokens` from `offset` on."""
    limit = min(len(prefix), len(tokens) - offset)
    for i in range(limit):
        if prefix[i] != tokens[offset + i]:
            return i
    return limit
