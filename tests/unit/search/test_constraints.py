"""Constraints between labels: what breaks them, and every consistent way out."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.constraints import (
    AsymmetricPair,
    Constraint,
    Constraints,
    EqualAnswer,
    Exclusive,
    Implies,
    num_violations,
)
from rookery.search.labelling import UNLABELLED, relabel

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
def test_broken_pairs_are_counted(constraint: Constraint, labels, expected: int) -> None:
    assert num_violations(constraint, labels) == expected


def test_a_proposal_that_breaks_nothing_is_the_only_option() -> None:
    constraints = Constraints([Exclusive(members=(0, 1), label=TRUE)], num_items=3, num_labels=2)
    assert constraints.repairs((NONE, FALSE, NONE), item=0, label=TRUE) == ((TRUE, FALSE, NONE),)
    assert constraints.repairs((NONE, TRUE, NONE), item=2, label=TRUE) == ((NONE, TRUE, TRUE),)


def test_the_option_that_neither_carries_the_label_is_tried_too() -> None:
    constraints = Constraints([Exclusive(members=(0, 1), label=TRUE)], num_items=2, num_labels=2)
    options = constraints.repairs((TRUE, NONE), item=1, label=TRUE)
    assert set(options) == {(TRUE, FALSE), (FALSE, TRUE), (FALSE, FALSE)}
    assert (TRUE, FALSE) not in constraints.repairs((TRUE, FALSE), item=1, label=TRUE)


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


@given(
    st.lists(constraint, max_size=3),
    st.tuples(*[st.integers(-1, 1)] * 5),
    st.integers(0, 4),
    st.integers(0, 1),
)
def test_repairs_are_every_consistent_labelling_of_the_component(
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
    own = [m for m in constraints.component(item) if proposed[m] != UNLABELLED]
    expected = set()
    for values in product((0, 1), repeat=len(own)):
        option = list(proposed)
        for member, value in zip(own, values, strict=True):
            option[member] = value
        if not constraints.num_violated(tuple(option)):
            expected.add(tuple(option))
    assert set(options) == expected - {labels}


def test_components_join_through_others() -> None:
    tied = [
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
