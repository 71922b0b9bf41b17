"""The prefix tree: token sequences that share a beginning share the nodes that hold its KV cache.

    tree = PrefixTree(pool)
    node, matched = tree.match(tokens)          # the longest known prefix
    node = tree.extend(node, tokens[matched:])  # what is left to compute

A node holds the places of its own tokens in a pool; a sequence is the path from the root.
Matching part of a node splits it in two, without copying.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import torch

from rookery.embedded.pool import TokenPool

__all__ = ["Node", "PrefixTree"]

_clock = count()


class Node:
    """Consecutive tokens of a sequence and where they are kept."""

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

    def path_places(self) -> torch.Tensor:
        """The places of the whole sequence that ends here."""
        nodes = self.path()
        return nodes[0].places if len(nodes) == 1 else torch.cat([n.places for n in nodes])


class PrefixTree:
    """All sequences known to one set of weights over one range of layers."""

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool
        self.root = Node((), parent=None, places=pool.take(0))
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
        child = Node(tuple(tokens), parent=node, places=self._pool.take(len(tokens)))
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
        """Forget a leaf and give its places back."""
        assert node.parent is not None and not node.children and not node.pins
        del node.parent.children[node.tokens[0]]
        self._pool.give_back(node.places)

    def clear(self) -> None:
        """Forget everything that no work in progress needs; pinned paths stay usable."""
        leaves = [node for node in self.nodes() if _is_free(node)]
        while leaves:
            node = leaves.pop()
            parent = node.parent
            self.remove(node)
            if parent is not None and parent is not self.root and _is_free(parent):
                leaves.append(parent)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper half. Pins stay with the lower one."""
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
    """How many tokens of `prefix` equal those of `tokens` from `offset` on."""
    limit = min(len(prefix), len(tokens) - offset)
    for i in range(limit):
        if prefix[i] != tokens[offset + i]:
            return i
    return limit
