"""Constraints between labels: what breaks them, and every consistent way out."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.labelling import (
    UNLABELLED,
    AsymmetricPair,
    Constraint,
    Constraints,
    EqualAnswer,
    Exclusive,
    Implies,
    num_violations,
    relabel,
)

TRUE, FALSE, NONE = 0, 1, UNLABELLED


@pytest.mark.parametrize(
    ("constraint", "labels", "expected"),
    [
        (Exclusive(members=(0, 1, 2), label=TRUE), (TRUE, TRUE, TRUE), 3),
        (Exclusive(members=(0, 1, 2), label=TRUE), (FALSE, FALSE, FALSE), 0),
        (Exclusive(members=(0, 1), label=TRUE, is_exact=True), (FALSE, FALSE), 1),
        (Exclusive(members=(0, 1), label=TRUE, is_exact=True), (FALSE, NONE), 0),
        (Exclusive(members=(0, 1), label=TRUE, is_exact=True), (FALSE, TRUE), 0),
        (Implies(premise=0, conclusion=1, label=TRUE), (TRUE, FALSE), 1),
        (Implies(premise=0, conclusion=1, label=TRUE), (TRUE, NONE), 0),
        (Implies(premise=0, conclusion=1, label=TRUE), (FALSE, TRUE), 0),
        (EqualAnswer(members=(0, 1), answers=("18", "18"), label=TRUE), (TRUE, FALSE), 1),
        (EqualAnswer(members=(0, 1), answers=("18", "18"), label=TRUE), (FALSE, FALSE), 0),
        (EqualAnswer(members=(0, 1), answers=("18", "26"), label=TRUE), (TRUE, TRUE), 1),
        (EqualAnswer(members=(0, 1), answers=("18", "26"), label=TRUE), (FALSE, FALSE), 0),
        (AsymmetricPair(first=0, second=1, mirror=(1, 0)), (TRUE, TRUE), 1),
        (AsymmetricPair(first=0, second=1, mirror=(1, 0)), (TRUE, FALSE), 0),
        (AsymmetricPair(first=0, second=1, mirror=(1, 0)), (NONE, FALSE), 0),
        (AsymmetricPair(first=0, second=1, mirror=(1, 0, 2)), (2, 2), 0),
    ],
)
def test_broken_pairs_are_counted(
    constraint: Constraint, labels: tuple[int, ...], expected: int
) -> None:
    assert num_violations(constraint, labels) == expected


constraint = st.one_of(
    st.builds(
        Exclusive,
        members=st.lists(st.integers(0, 4), min_size=2, max_size=3, unique=True).map(tuple),
        label=st.integers(0, 1),
        is_exact=st.booleans(),
    ),
    st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True).map(
        lambda pair: Implies(premise=pair[0], conclusion=pair[1], label=0)
    ),
    st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True).map(
        lambda pair: AsymmetricPair(first=pair[0], second=pair[1], mirror=(1, 0))
    ),
    st.tuples(
        st.lists(st.integers(0, 4), min_size=3, max_size=3, unique=True), st.sampled_from("abc")
    ).map(
        lambda drawn: EqualAnswer(members=tuple(drawn[0]), answers=("a", "b", drawn[1]), label=0)
    ),
)


def members_of(constraint: Constraint) -> set[int]:
    names = ("members", "premise", "conclusion", "first", "second")
    found = [getattr(constraint, name) for name in names if hasattr(constraint, name)]
    return set().union(*[value if isinstance(value, tuple) else (value,) for value in found])


def reachable(drawn: list[Constraint], labels: tuple[int, ...], item: int) -> list[int]:
    """Labelled items that are tied to an item by constraints between labelled items."""
    held = {i for i, label in enumerate(labels) if label != UNLABELLED}
    found = {item}
    for _ in labels:
        ties = [members_of(c) & held for c in drawn]
        found = found.union(*[tie for tie in ties if tie & found])
    return sorted(found)


@given(
    st.lists(constraint, max_size=3),
    st.tuples(*[st.integers(-1, 1)] * 5),
    st.integers(0, 4),
    st.integers(0, 1),
)
def test_repairs_are_every_consistent_labelling_of_what_is_tied(
    drawn: list[Constraint], labels: tuple[int, ...], item: int, label: int
) -> None:
    constraints = Constraints(drawn, num_items=5, num_labels=2)
    if constraints.num_violated(labels):
        return
    proposed = relabel(labels, item, label)
    options = constraints.repairs(labels, item=item, label=label)
    assert len(set(options)) == len(options)
    if not constraints.num_violated(proposed):
        assert options == (proposed,)
        return
    own = reachable(drawn, proposed, item)
    expected = set()
    for values in product((0, 1), repeat=len(own)):
        option = list(proposed)
        for member, value in zip(own, values, strict=True):
            option[member] = value
        if not constraints.num_violated(tuple(option)):
            expected.add(tuple(option))
    assert set(options) == expected - {labels}


@pytest.mark.parametrize(
    ("tied", "num_options"),
    [
        ([EqualAnswer(members=tuple(range(1101)), answers=("a",) * 1101, label=0)], 1),
        ([AsymmetricPair(first=i, second=i + 1, mirror=(1, 0)) for i in range(1100)], 1),
        ([AsymmetricPair(first=0, second=i, mirror=(1, 0)) for i in range(1, 1101)], 1),
    ],
)
def test_over_a_thousand_tied_items_are_repaired(tied: list[Constraint], num_options: int) -> None:
    constraints = Constraints(tied, num_items=1101, num_labels=2)
    assert constraints.contradictions == ()
    [labels] = (o for o in constraints.consistent((0,) * 1101, item=0) if o[0] == TRUE)
    options = constraints.repairs(labels, item=700, label=1 - labels[700])
    assert len(options) == num_options
    assert options[0] == tuple(1 - label for label in labels)


def test_a_hub_without_a_label_ties_nothing() -> None:
    """Were the spokes repaired together, each of 2 ** 30 ways would cost an evaluation."""
    spokes = [AsymmetricPair(first=0, second=i, mirror=(1, 0)) for i in range(1, 31)]
    tied: list[Constraint] = [*spokes, Exclusive(members=(1, 31), label=TRUE)]
    constraints = Constraints(tied, num_items=32, num_labels=2)
    middle = tuple(i % 2 for i in range(1, 30))
    assert constraints.repairs((NONE, TRUE, *middle, NONE), item=31, label=TRUE) == (
        (NONE, TRUE, *middle, FALSE),
        (NONE, FALSE, *middle, TRUE),
        (NONE, FALSE, *middle, FALSE),
    )


def test_contradictions_are_found_at_once_wherever_they_are() -> None:
    """An odd circle of opposites behind forty items that have many ways to be right."""
    free = [Implies(premise=i, conclusion=i + 1, label=0) for i in range(40)]
    circle = [
        AsymmetricPair(first=a, second=b, mirror=(1, 0)) for a, b in ((40, 41), (41, 42), (40, 42))
    ]
    constraints = Constraints([*free, *circle], num_items=44, num_labels=2)
    assert constraints.contradictions == (tuple(range(43)),)
    assert list(constraints.consistent((0,) * 44, item=3)) == []
    assert list(constraints.consistent((0,) * 44, item=43)) == [(0,) * 43 + (x,) for x in (0, 1)]


def test_what_is_too_entangled_is_refused() -> None:
    """Eight items, no two alike, and seven labels."""
    pairs = [(a, b) for a in range(8) for b in range(a)]
    rules = [Exclusive(members=pair, label=label) for pair in pairs for label in range(7)]
    with pytest.raises(ValueError, match="contradict one another, or are too entangled"):
        Constraints(rules, num_items=8, num_labels=7)


def test_components_join_through_others() -> None:
    tied: list[Constraint] = [
        Exclusive(members=(0, 3), label=0),
        Implies(premise=3, conclusion=4, label=0),
    ]
    constraints = Constraints(tied, num_items=5, num_labels=2)
    assert constraints.components == ((0, 3, 4), (1,), (2,))


def test_a_component_with_too_many_options_is_refused() -> None:
    members = tuple(range(10))
    answers = tuple(str(m) for m in members)
    loose = [Implies(premise=m, conclusion=m + 1, label=0) for m in range(20)]
    Constraints(
        [EqualAnswer(members=members, answers=answers, label=0)], num_items=10, num_labels=2
    )
    Constraints(loose, num_items=21, num_labels=2)
    with pytest.raises(ValueError, match="over 256 consistent labellings"):
        Constraints(
            [AsymmetricPair(first=0, second=1, mirror=(1, 0))]
            + [Implies(premise=0, conclusion=m, label=0) for m in range(2, 20)],
            num_items=20,
            num_labels=2,
        )
