"""The prefix tree against a plain dict of every prefix that it should know."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rookery.embedded.prefix import Node, PrefixTree, TokenPool

Prefix = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
TREES = st.integers(0, 1)


def make_pool(capacity: int = 5) -> TokenPool:
    return TokenPool(kv_shape=(1, 1, 1), hidden_size=1, like=torch.empty(0), capacity=capacity)


def walk(node: Node) -> Prefix:
    return tuple(token for part in node.path() for token in part.tokens)


class Trees(RuleBasedStateMachine):
    """Two trees over one pool, as two models' branches are; every prefix has a mark in it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.trees = [PrefixTree(self.pool), PrefixTree(self.pool)]
        self.known: list[dict[Prefix, int]] = [{}, {}]
        self.pinned: list[tuple[int, Node, Prefix]] = []
        self.marks = 0.0
        self.mark_at: dict[int, float] = {}

    def longest(self, which: int, tokens: Prefix) -> int:
        lengths = [n for n in range(len(tokens) + 1) if tokens[:n] in self.known[which]]
        return max(lengths, default=0)

    def check_path(self, which: int, node: Node, tokens: Prefix) -> None:
        assert walk(node) == tokens and node.stop == len(tokens)
        expected = [self.known[which][tokens[: n + 1]] for n in range(len(tokens))]
        if tokens:
            assert node.path_places().tolist() == expected

    @rule(which=TREES, tokens=TOKENS)
    def match(self, which: int, tokens: Prefix) -> None:
        node, matched = self.trees[which].match(tokens)
        assert matched == self.longest(which, tokens)
        self.check_path(which, node, tokens[:matched])

    @rule(which=TREES, tokens=TOKENS, is_pinned=st.booleans())
    def insert(self, which: int, tokens: Prefix, is_pinned: bool) -> None:
        node, matched = self.trees[which].match(tokens)
        assert matched == self.longest(which, tokens)
        if matched < len(tokens):
            upper, node = node, self.trees[which].extend(node, tokens[matched:])
            assert node.start == upper.stop == matched and not node.is_computed
            for length, place in zip(
                range(matched + 1, len(tokens) + 1), node.places.tolist(), strict=True
            ):
                self.marks += 1
                self.known[which][tokens[:length]] = place
                self.mark_at[place] = self.marks
                self.pool.hidden[place] = self.marks
                self.pool.kv[..., place, :] = self.marks
            node.is_computed = is_pinned
        self.check_path(which, node, tokens)
        if is_pinned:
            node.pins += 1
            self.pinned.append((which, node, tokens))

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        _, node, _ = self.pinned.pop(index % len(self.pinned))
        node.pins -= 1

    @rule(which=TREES, index=st.integers(0, 99))
    def remove(self, which: int, index: int) -> None:
        leaves = [n for n in self.trees[which].nodes() if not n.children and not n.pins]
        if leaves:
            node = leaves[index % len(leaves)]
            self.forget(which, node)
            self.trees[which].remove(node)

    @rule(which=TREES)
    def clear(self, which: int) -> None:
        self.trees[which].clear()
        needed = {t[: n + 1] for w, _, t in self.pinned if w == which for n in range(len(t))}
        for node in self.trees[which].nodes():
            assert node.pins or node.children, "nothing free is left"
        for prefix in list(self.known[which]):
            if prefix not in self.remembered(which):
                assert prefix not in needed, "a pinned path was forgotten"
                del self.mark_at[self.known[which].pop(prefix)]

    def forget(self, which: int, node: Node) -> None:
        tokens = walk(node)
        for length in range(node.start + 1, node.stop + 1):
            del self.mark_at[self.known[which].pop(tokens[:length])]

    def remembered(self, which: int) -> dict[Prefix, int]:
        found = {}
        for node in self.trees[which].nodes():
            tokens = walk(node)
            for offset, place in enumerate(node.places.tolist()):
                found[tokens[: node.start + offset + 1]] = place
        return found

    @invariant()
    def the_trees_hold_the_prefixes_at_their_places(self) -> None:
        for which in (0, 1):
            assert self.remembered(which) == self.known[which]

    @invariant()
    def places_are_distinct_and_all_others_are_free(self) -> None:
        places = [place for known in self.known for place in known.values()]
        assert len(places) == len(set(places)) == self.pool.num_taken

    @invariant()
    def contents_stay_whatever_is_split_removed_or_grown(self) -> None:
        for place, mark in self.mark_at.items():
            assert self.pool.hidden[place] == mark and self.pool.kv[0, 0, 0, place, 0] == mark

    @invariant()
    def pinned_sequences_stay_whole(self) -> None:
        for which, node, tokens in self.pinned:
            self.check_path(which, node, tokens)

    @invariant()
    def nodes_are_linked_both_ways(self) -> None:
        for tree in self.trees:
            for node in tree.nodes():
                assert node.parent is not None and node.parent.children[node.tokens[0]] is node
                assert node.start == node.parent.stop and len(node.places) == len(node.tokens) > 0


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_matching_part_of_a_node_splits_it_without_copying() -> None:
    tree = PrefixTree(make_pool(16))
    lower = tree.extend(tree.root, (1, 2, 3, 4))
    lower.is_computed, lower.pins = True, 1
    places = lower.places.tolist()
    upper, matched = tree.match((1, 2, 9))
    assert matched == 2 and upper.tokens == (1, 2) and upper.is_computed and upper.pins == 0
    assert lower.parent is upper and lower.tokens == (3, 4) and lower.pins == 1
    assert upper.places.tolist() + lower.places.tolist() == places
    assert [node.tokens for node in lower.path()] == [(1, 2), (3, 4)]
    assert tree.match((1, 2, 3, 4)) == (lower, 4), "who held the node holds its end still"


def test_use_is_remembered_for_eviction() -> None:
    tree = PrefixTree(make_pool(16))
    first, second = tree.extend(tree.root, (1, 2)), tree.extend(tree.root, (5, 6))
    assert first.last_used < second.last_used
    tree.match((1, 2))
    assert first.last_used > second.last_used


def test_the_root_is_known_and_nothing_matches_nothing() -> None:
    tree = PrefixTree(make_pool())
    assert tree.match((1, 2)) == (tree.root, 0) and tree.match(()) == (tree.root, 0)
    assert list(tree.nodes()) == [] and tree.root.is_computed and tree.root.path() == []
