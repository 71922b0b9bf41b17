"""Orders of the other items, and what a prefix cache makes of them."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.labelling import IdOrder, PrefixCache, TreeOrder


def groups_of(num_items: int, size: int) -> list[tuple[int, ...]]:
    return [
        tuple(range(first, min(first + size, num_items))) for first in range(0, num_items, size)
    ]


@given(st.integers(1, 70), st.integers(1, 5))
def test_an_order_holds_every_other_item_once(num_items: int, size: int) -> None:
    for order in (TreeOrder(groups_of(num_items, size)), IdOrder(num_items)):
        assert sorted(order.leaves) == list(range(num_items))
        for target in range(num_items):
            assert sorted((*order.of(target), target)) == list(range(num_items))


def test_siblings_stand_next_to_the_target() -> None:
    order = TreeOrder([(0, 7), (1, 6), (2, 5), (3, 4)])
    assert order.of(0) == (2, 5, 3, 4, 1, 6, 7)
    assert order.of(7) == (2, 5, 3, 4, 1, 6, 0)


@given(st.integers(2, 40), st.integers(1, 4), st.data())
def test_pruning_shares_at_least_as_many_prefixes(
    num_items: int, size: int, data: st.DataObject
) -> None:
    """Skipping items keeps the order of the rest: two targets still share what they shared."""
    kept = data.draw(st.sets(st.integers(0, num_items - 1), min_size=2))
    order = TreeOrder(groups_of(num_items, size))
    one, other = sorted(kept)[:2]
    shared = _common(order.of(one), order.of(other))
    pruned = [tuple(i for i in order.of(t) if i in kept) for t in (one, other)]
    assert _common(*pruned) >= sum(i in kept for i in order.of(one)[:shared])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


@pytest.mark.parametrize("num_items", [16, 64, 128])
def test_the_tree_computes_n_log_n_items_and_the_list_half_of_all(num_items: int) -> None:
    counts = {}
    for name, order in (
        ("tree", TreeOrder(groups_of(num_items, 4))),
        ("id", IdOrder(num_items)),
    ):
        cache = PrefixCache(block_tokens=1)
        counts[name] = sum(
            cache.add((*(i + 1 for i in order.of(t)), num_items + t + 1)) for t in range(num_items)
        )
    assert counts["tree"] == num_items * (math.log2(num_items) + 1)
    # The last item's context is the one before it plus nothing new: both share all but a token.
    assert counts["id"] == pytest.approx(num_items * (num_items + 1) / 2 + num_items, rel=0.02)


def _brute(prompts: list[tuple[int, ...]], block: int) -> list[int]:
    """A cache that remembers the texts themselves."""
    known: set[tuple[int, ...]] = set()
    counts = []
    for prompt in prompts:
        hits = 0
        while (hits + 1) * block <= len(prompt) - 1 and prompt[: (hits + 1) * block] in known:
            hits += 1
        counts.append(len(prompt) - hits * block)
        known.update(prompt[:end] for end in range(block, len(prompt) + 1, block))
    return counts


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple), max_size=12),
    st.sampled_from([1, 2, 4]),
)
def test_the_count_is_that_of_a_cache_that_keeps_the_tokens(
    prompts: list[tuple[int, ...]], block: int
) -> None:
    cache = PrefixCache(block_tokens=block)
    assert [cache.add(prompt) for prompt in prompts] == _brute(prompts, block)


def test_a_small_cache_forgets_the_ends_before_the_beginnings() -> None:
    cache = PrefixCache(block_tokens=2, capacity_tokens=8)
    assert cache.add((1, 2, 3, 4, 5, 6, 0)) == 7
    assert cache.add((7, 8, 9, 9, 0)) == 5  # five blocks: the one of 5 6 goes
    assert cache.add((1, 2, 3, 4, 5, 6, 0)) == 3


def test_models_do_not_share_prefixes() -> None:
    cache = PrefixCache(block_tokens=1)
    assert cache.add((1, 2, 3), salt=1) == 3
    assert cache.add((1, 2, 3), salt=2) == 3
    assert cache.add((1, 2, 3), salt=1) == 1
