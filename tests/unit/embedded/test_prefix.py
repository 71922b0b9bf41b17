"""The prefix tree against a plain dict of every prefix that it should know."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rookery.embedded.prefix import Node, PrefixTree, TokenPool, small_zero_pages, zero_pages

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
TestTrees.settings = settings(stateful_step_count=40)


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


# The token pool.


def make_token_pool(capacity: int) -> TokenPool:
    return TokenPool(kv_shape=(2, 1, 3), hidden_size=4, like=torch.empty(0), capacity=capacity)


STEPS = st.lists(
    st.tuples(st.just("take"), st.integers(0, 9)) | st.tuples(st.just("give"), st.integers(0, 20)),
    max_size=30,
)


@given(capacity=st.integers(1, 12), steps=STEPS)
def test_against_a_dict_of_owners(capacity: int, steps: list[tuple[str, int]]) -> None:
    pool = make_token_pool(capacity)
    owned: list[tuple[torch.Tensor, float]] = []
    for number, (action, argument) in enumerate(steps):
        if action == "take":
            places = pool.take(argument)
            assert places.shape == (argument,)
            pool.hidden[places] = number + 1.0
            pool.kv[:, :, :, places] = number + 1.0
            owned.append((places, number + 1.0))
        elif owned:
            pool.give_back(owned.pop(argument % len(owned))[0])
        flat = [int(place) for places, _ in owned for place in places]
        assert len(flat) == len(set(flat)) == pool.num_taken
        assert all(0 <= place < len(pool.hidden) for place in flat)
        for places, mark in owned:
            assert (pool.hidden[places] == mark).all() and (pool.kv[:, :, :, places] == mark).all()
    for places, _ in owned:
        pool.give_back(places)
    assert pool.num_taken == 0
    capacity = len(pool.hidden)
    assert sorted(pool.take(capacity).tolist()) == list(range(capacity)), "none was lost"
    assert len(pool.hidden) == capacity, "and none is missing"


def test_it_grows_by_half_or_by_what_is_missing() -> None:
    pool = make_token_pool(10)
    pool.take(11)
    assert pool.kv.shape == (2, 2, 1, 15, 3) and pool.hidden.shape == (15, 4)
    pool.take(40)
    assert len(pool.hidden) == 51 and pool.num_taken == 51


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_token_takes_the_memory_of_its_own_pages() -> None:
    """In huge pages the 96 parts that a token lies in would take 192 MB."""
    like = torch.empty(0)
    pool = TokenPool(kv_shape=(12, 4, 64), hidden_size=64, like=like, capacity=50_000)
    before = resident_bytes()
    places = pool.take(16)
    pool.kv[:, :, :, places] = 1.0
    pool.hidden[places] = 1.0
    assert resident_bytes() - before < 8 * 2**20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_taken_places_are_the_takers_own() -> None:
    """What a taker does with its tensor does not reach the pool's list of free places."""
    pool = make_token_pool(4)
    pool.take(2).fill_(99)
    places = pool.take(2)
    pool.give_back(places)
    assert sorted(pool.take(2).tolist()) == sorted(places.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [zero_pages, small_zero_pages])
def test_zero_pages_are_zeros_of_the_right_kind(make: Any, dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    pages = make((3, 2, 5), like=like)
    assert pages.dtype == dtype and pages.shape == (3, 2, 5) and not pages.any()
    pages[1] = 2
    assert pages.sum() == 20, "and can be written"
    assert make((0, 7), like=like).shape == (0, 7)
