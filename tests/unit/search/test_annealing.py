"""Annealing over labellings: schedules, draws, acceptance, and the optimum of small problems."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.annealing import (
    Annealing,
    AnnealingConfig,
    CodeSchedule,
    ExponentialSchedule,
    PaperSchedule,
    argmax_label,
    ask,
    begin,
    skip,
    start_labels,
    tell,
    temperature,
)
from rookery.search.labelling import (
    UNLABELLED,
    Constraints,
    Exclusive,
    IdOrder,
    PrefixCache,
    TreeOrder,
    labelled_items,
)

CONFIG = AnnealingConfig(iterations=400, num_start=4)


def test_schedules_are_those_of_the_paper_and_of_the_code() -> None:
    paper, code = PaperSchedule(), CodeSchedule()
    assert temperature(paper, iteration=0, num_accepted=0) == 10.0
    assert temperature(paper, iteration=99, num_accepted=5) == pytest.approx(
        10 / (1 + 0.99 * math.log(100))
    )
    assert temperature(PaperSchedule(beta=1e6), iteration=9, num_accepted=0) == 0.01
    assert temperature(code, iteration=50, num_accepted=256) == pytest.approx(0.83, abs=0.005)
    assert temperature(code, iteration=50, num_accepted=3000) == pytest.approx(0.59, abs=0.005)
    assert temperature(ExponentialSchedule(), iteration=2, num_accepted=0) == pytest.approx(9.801)


def test_an_unlabelled_item_of_a_begun_group_is_drawn_a_hundred_times_as_often() -> None:
    state = begin((0, UNLABELLED, UNLABELLED, UNLABELLED), utility=0.0)
    drawn: Counter[int] = Counter()
    for _ in range(3000):
        drawn[ask(state, groups=(0, 0, 1, 1), config=CONFIG, seed=7)] += 1
        state = skip(state)
    assert drawn[1] > 2800
    assert all(drawn[i] for i in (0, 2, 3))


def test_gains_are_taken_always_and_losses_by_temperature() -> None:
    taken = 0
    for iteration in range(2000):
        state = Annealing(
            labels=(0,), utility=5.0, best_labels=(0,), best_utility=5.0, iteration=iteration
        )
        better, _ = tell(state, [((1,), 5.0)], config=CONFIG, seed=1)
        assert better.labels == (1,)
        worse, decision = tell(state, [((1,), -5.0)], config=CONFIG, seed=1)
        taken += decision.is_accepted
        assert worse.best_labels == (0,)
    assert taken / 2000 == pytest.approx(math.exp(-1), abs=0.03)


def test_huge_gains_and_losses_are_no_overflow() -> None:
    state = begin((0,), utility=0.0)
    assert tell(state, [((1,), 1e9)], config=CONFIG, seed=0)[1].is_accepted
    assert not tell(state, [((1,), -1e9)], config=CONFIG, seed=0)[1].is_accepted


def test_the_best_option_is_decided_on_and_the_most_complete_labelling_kept() -> None:
    state = begin((0, UNLABELLED), utility=9.0)
    tried = [((0, 0), 1.0), ((0, 1), 8.9), ((1, 1), 8.9)]
    after, decision = tell(state, tried, config=CONFIG, seed=0)
    assert decision.labels == (0, 1) and decision.is_accepted
    assert after.best_labels == (0, 1) and after.best_utility == 8.9
    assert after.num_accepted == 1 and after.iteration == 1


def test_the_first_of_equal_labels_is_proposed() -> None:
    assert argmax_label((-1.0, -1.0, -2.0)) == 0
    assert argmax_label((-3.0, -1.0)) == 1


def test_start_labels_are_balanced_and_consistent() -> None:
    free = Constraints([], num_items=40, num_labels=2)
    labels = start_labels(free, num_items=40, num_labels=2, config=CONFIG, seed=5)
    assert Counter(labels[i] for i in labelled_items(labels)) == {0: 2, 1: 2}
    pairs = [Exclusive(members=(i, i + 1), label=0, is_exact=True) for i in range(0, 8, 2)]
    tied = Constraints(pairs, num_items=8, num_labels=2)
    seen = set()
    for seed in range(20):
        config = AnnealingConfig(num_start=8)
        labels = start_labels(tied, num_items=8, num_labels=2, config=config, seed=seed)
        assert tied.num_violated(labels) == 0 and UNLABELLED not in labels
        seen.add(labels)
    assert len(seen) > 5


# Orders of the other items, and what a prefix cache makes of them.


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


@pytest.mark.parametrize("num_items", [16, 64])
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
