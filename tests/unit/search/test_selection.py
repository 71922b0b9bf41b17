"""Selection rules: nothing crashes them, they press in the right direction, failures never win."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rookery.search.candidate import tied_ranks
from rookery.search.children import (
    RULES,
    RouletteConfig,
    SelectionConfig,
    TournamentConfig,
    elites,
    select,
    shares,
)
from rookery.seeding import stream

ALL = [
    TournamentConfig(),
    TournamentConfig(size=3, replacement=False),
    TournamentConfig(size=100, replacement=False),
    RouletteConfig(),
]
rules = st.sampled_from(ALL)
numbers = st.floats(allow_nan=False, allow_infinity=False)
populations = st.lists(
    st.none() | numbers | st.sampled_from([0.0, -1.0, 0.5]), min_size=1, max_size=12
)


def frequencies(
    config: SelectionConfig, scores: list[float | None], *, draws: int = 2500
) -> np.ndarray:
    picked = select(config, scores, count=draws, rng=stream(0, config.type))
    return np.bincount(picked, minlength=len(scores)) / draws


@given(config=rules, scores=populations, count=st.integers(0, 15), seed=st.integers(0, 50))
def test_any_scores_can_be_selected_from(
    config: SelectionConfig, scores: list[float | None], count: int, seed: int
) -> None:
    picked = select(config, scores, count=count, rng=stream(seed))
    assert len(picked) == count
    assert picked == select(config, scores, count=count, rng=stream(seed))
    if any(score is not None for score in scores):
        assert all(scores[index] is not None for index in picked)


@given(config=rules, scores=populations, count=st.integers(0, 15), seed=st.integers(0, 50))
def test_distinct_picks_everybody_alive_at_most_once(
    config: SelectionConfig, scores: list[float | None], count: int, seed: int
) -> None:
    picked = select(config, scores, count=count, rng=stream(seed), distinct=True)
    alive = [i for i, score in enumerate(scores) if score is not None] or range(len(scores))
    assert len(set(picked)) == len(picked) == min(count, len(alive))
    assert set(picked) <= set(alive)


@pytest.mark.parametrize("config", ALL, ids=repr)
@pytest.mark.parametrize("value", [0.0, -3.0, None])
def test_equals_have_equal_chances(config: SelectionConfig, value: float | None) -> None:
    assert frequencies(config, [value] * 4) == pytest.approx([0.25] * 4, abs=0.035)


def test_tournament_has_the_stated_probabilities() -> None:
    # Of 3 pairs out of 3 candidates the best wins 2, the middle 1, the worst none.
    config = TournamentConfig(size=2, replacement=False)
    chance = frequencies(config, [0.0, 1.0, 2.0], draws=5000)
    assert chance == pytest.approx([0, 1 / 3, 2 / 3], abs=0.02)
    # With replacement 9 pairs: 1, 3 and 5.
    chance = frequencies(TournamentConfig(size=2), [0.0, 1.0, 2.0], draws=5000)
    assert chance == pytest.approx([1 / 9, 3 / 9, 5 / 9], abs=0.02)


def test_roulette_has_the_stated_probabilities() -> None:
    chance = frequencies(RouletteConfig(), [1.0, 3.0, None, 0.0], draws=20000)
    assert chance == pytest.approx([0.25, 0.75, 0, 0], abs=0.01)
    assert shares(np.array([-2.0, 0.0, 2.0])) == pytest.approx([0, 1 / 3, 2 / 3])
    assert shares(np.array([1.0, 3.0])) == pytest.approx([0.25, 0.75])
    assert shares(np.zeros(4)) == pytest.approx([0.25] * 4)
    assert shares(np.array([-1e308, 1e308])) == pytest.approx([0, 1])


def test_distinct_roulette_ends_with_the_worthless_in_order() -> None:
    picked = select(RouletteConfig(), [0.0, 2.0, 0.0], count=3, rng=stream(0), distinct=True)
    assert picked == (1, 0, 2)


def test_elites_are_the_best_in_order() -> None:
    assert elites([0.2, None, 0.9, 0.2, -1.0], count=3) == (2, 0, 3)
    assert elites([0.2, None], count=5) == (0,)
    assert elites([None, None, None], count=2) == (0, 1)
    assert elites([], count=2) == ()


@given(st.lists(st.sampled_from([-1.0, 0.0, 2.0, 5.0]), min_size=1, max_size=9))
def test_tied_ranks_against_counting(values: list[float]) -> None:
    expected = [sum(o < v for o in values) + (sum(o == v for o in values) - 1) / 2 for v in values]
    assert tied_ranks(values).tolist() == expected


def test_wrong_calls_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="no such pick"):
        select(RouletteConfig(), [], count=1, rng=stream(0))
    with pytest.raises(ValueError, match="finite"):
        select(RouletteConfig(), [float("nan")], count=1, rng=stream(0))
    assert select(RouletteConfig(), [], count=0, rng=stream(0)) == ()


def test_configs_are_a_union_on_type() -> None:
    adapter = TypeAdapter(SelectionConfig)
    for name in RULES:
        assert adapter.validate_python({"type": name}).type == name
    with pytest.raises(ValidationError):
        adapter.validate_python({"type": "lottery"})
