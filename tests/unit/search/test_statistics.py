"""Intervals: coverage in simulation, closed forms, strata, and honest refusals."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from marks import long

from rookery.search.statistics import (
    Strata,
    bootstrap_mean,
    paired_difference,
    proportion,
)
from rookery.seeding import stream

QUICK = 400
"""Resamples."""
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray | None]]


@pytest.mark.parametrize(
    "kind", ["skewed", pytest.param("normal", marks=long), pytest.param("binary", marks=long)]
)
def test_coverage_of_the_bootstrap(kind: str) -> None:
    truth = {"normal": 2.0, "binary": 0.3, "skewed": 1.0}[kind]
    hits, trials = 0, 250
    for seed in range(trials):
        rng = stream(seed, kind)
        values = {
            "normal": lambda r: r.normal(2.0, 3.0, 60),
            "binary": lambda r: (r.random(60) < 0.3).astype(float),
            "skewed": lambda r: r.exponential(1.0, 60),
        }[kind](rng)
        interval = bootstrap_mean(values.tolist(), rng=rng, num_resamples=QUICK)
        hits += interval.low <= truth <= interval.high
    assert 0.90 <= hits / trials <= 0.985


def right(count: int, trials: int) -> list[bool]:
    """The first `count` answers are right."""
    return [place < count for place in range(trials)]


def test_wilson_by_hand() -> None:
    interval = proportion(right(8, 10))
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert proportion(right(0, 10)).low == 0.0
    assert proportion(right(0, 10)).high == pytest.approx(0.2775, abs=1e-4)
    assert proportion(right(10, 10)).high == 1.0


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_its_estimate(counts: tuple[int, int]) -> None:
    interval = proportion(right(*counts))
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    assert interval.low < interval.high


def test_pairing_removes_the_difficulty_of_tasks() -> None:
    difficulty = stream(0).normal(0, 10, 100)
    theirs = difficulty + stream(1).normal(0, 0.5, 100)
    ours = difficulty + 0.5 + stream(2).normal(0, 0.5, 100)
    interval = paired_difference(ours.tolist(), theirs.tolist(), rng=stream(3))
    assert interval.low > 0
    assert interval.low < 0.5 < interval.high
    back = paired_difference(theirs.tolist(), ours.tolist(), rng=stream(3))
    assert back.estimate == -interval.estimate
    assert back.low <= 0
    apart = [bootstrap_mean(v.tolist(), rng=stream(3)) for v in (ours, theirs)]
    assert apart[0].low < apart[1].high


def test_sources_are_averaged_first() -> None:
    values = [1.0] * 30 + [0.0] * 10 + [1.0, 0.0]
    strata = Strata(names=("a",) * 40 + ("b",) * 2)
    assert bootstrap_mean(values, rng=stream(0), strata=strata).estimate == 0.625
    weighted = Strata(names=strata.names, weights={"a": 3.0, "b": 1.0})
    assert bootstrap_mean(values, rng=stream(0), strata=weighted).estimate == 0.6875
    # How far sources are apart does not widen the interval of their mean.
    flat = Strata(names=("a",) * 60 + ("b",) * 60)
    interval = bootstrap_mean([1.0] * 60 + [0.0] * 60, rng=stream(0), strata=flat)
    assert 0.47 < interval.low < 0.5 < interval.high < 0.53


def test_seeded_and_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    values = stream(0).random(50).tolist()
    first = bootstrap_mean(values, rng=stream(1), num_resamples=QUICK)
    assert first == bootstrap_mean(values, rng=stream(1), num_resamples=QUICK)
    assert first != bootstrap_mean(values, rng=stream(2), num_resamples=QUICK)
    monkeypatch.setattr("rookery.search.statistics.CHUNK", 1000)
    assert first == bootstrap_mean(values, rng=stream(1), num_resamples=QUICK)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
@example([699051.1386695367] * 3)  # their mean rounds to more
def test_any_values_have_an_interval_around_the_mean(values: list[float]) -> None:
    interval = bootstrap_mean(values, rng=stream(0), num_resamples=50)
    assert interval.low <= interval.estimate <= interval.high
    assert interval.num_values == len(values)


@pytest.mark.parametrize(
    "call",
    [
        lambda: bootstrap_mean([], rng=stream(0)),
        lambda: bootstrap_mean([1.0, float("nan")], rng=stream(0)),
        lambda: bootstrap_mean([1.0, 2.0], rng=stream(0), strata=Strata(names=("a",))),
        lambda: bootstrap_mean(
            [1.0, 2.0], rng=stream(0), strata=Strata(names=("a", "a"), weights={"b": 1.0})
        ),
        lambda: paired_difference([1.0, 2.0], [1.0], rng=stream(0)),
        lambda: proportion([]),
        lambda: proportion([True, False], clusters=["a"]),
    ],
)
def test_what_cannot_be_said_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"Got|needs"):
        call()


SIZES = [
    pytest.param(3, 60, marks=long),
    pytest.param(3, 10),
    pytest.param(8, 2),
    pytest.param(1, 2, marks=long),
    pytest.param(1, 5),
]
"""Sources, and tasks of each."""


def covers(
    draw: Draw, *, truth: float, num_sources: int, num_tasks: int, trials: int = 250
) -> float:
    """The part of samples whose interval holds the truth."""
    strata = Strata(names=tuple(f"s{i // num_tasks}" for i in range(num_sources * num_tasks)))
    hits = 0
    for seed in range(trials):
        ours, theirs = draw(stream(seed, num_sources, num_tasks), num_sources * num_tasks)
        measure = (
            partial(bootstrap_mean, ours.tolist())
            if theirs is None
            else partial(paired_difference, ours.tolist(), theirs.tolist())
        )
        interval = measure(rng=stream(seed), strata=strata, num_resamples=QUICK)
        hits += interval.low <= truth <= interval.high
    return hits / trials


@pytest.mark.parametrize(("num_sources", "num_tasks"), SIZES)
@pytest.mark.parametrize(
    "accuracy", [pytest.param(0.5, marks=long), pytest.param(0.7, marks=long), 0.9]
)
def test_coverage_of_the_mean_of_few_tasks(
    num_sources: int, num_tasks: int, accuracy: float
) -> None:
    def draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        return (rng.random(count) < accuracy).astype(float), None

    found = covers(draw, truth=accuracy, num_sources=num_sources, num_tasks=num_tasks)
    # 250 trials of 0.95 lie within 0.027 in 95 of 100; answers in steps cost 0.02 at most.
    assert found >= 0.91


@pytest.mark.parametrize(("num_sources", "num_tasks"), SIZES)
@pytest.mark.parametrize("gain", [pytest.param(0.0, marks=long), 0.15])
def test_coverage_of_the_difference_of_few_tasks(
    num_sources: int, num_tasks: int, gain: float
) -> None:
    def draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        luck = rng.random(count)
        other = np.where(rng.random(count) < 0.8, luck, rng.random(count))
        return (luck < 0.5 + gain).astype(float), (other < 0.5).astype(float)

    found = covers(draw, truth=gain, num_sources=num_sources, num_tasks=num_tasks)
    assert found >= 0.91


def test_few_tasks_prove_little_and_say_so() -> None:
    interval = paired_difference([1.0, 1.0], [0.0, 0.0], rng=stream(0))
    assert interval.low <= 0
    assert interval.small == "2 tasks in all, fewer than 30"
    assert bootstrap_mean([1.0], rng=stream(0)).low < 0.5
    strata = Strata(names=("a",) * 40 + ("b",) * 2, weights={"a": 1.0, "b": 1.0})
    uneven = bootstrap_mean([1.0, 0.0] * 21, rng=stream(0), strata=strata)
    assert uneven.small == "2 tasks of b, fewer than 5"
    unweighted = Strata(names=strata.names, weights={"a": 1.0})
    assert not bootstrap_mean([1.0, 0.0] * 21, rng=stream(0), strata=unweighted).small


def test_with_many_tasks_it_is_the_bootstrap_interval() -> None:
    rng = stream(0)
    values = (rng.random(600) < 0.8).astype(float)
    theirs = np.where(rng.random(600) < 0.9, values, 1 - values)
    small = rng.exponential(0.05, 600)
    for interval, data in (
        (bootstrap_mean(values.tolist(), rng=stream(1)), values),
        (bootstrap_mean(small.tolist(), rng=stream(1)), small),
        (paired_difference(values.tolist(), theirs.tolist(), rng=stream(1)), values - theirs),
    ):
        means = data[stream(1).integers(600, size=(10_000, 600))].mean(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        assert not interval.small
        assert interval.low == pytest.approx(low, abs=0.06 * (high - low))
        assert interval.high == pytest.approx(high, abs=0.06 * (high - low))


@pytest.mark.parametrize(
    ("num", "rate"),
    [(60, 0.03), pytest.param(100, 0.02, marks=long), pytest.param(200, 0.01, marks=long)],
)
def test_rare_differences_are_covered(num: int, rate: float) -> None:
    """The only differences are rare wins: the true gain is their rate."""
    draws = np.random.default_rng(0)
    hits = 0
    for seed in range(400):
        ours = (draws.random(num) < rate).astype(float).tolist()
        found = paired_difference(ours, [0.0] * num, rng=stream(seed), num_resamples=500)
        hits += found.low <= rate <= found.high
    assert hits / 400 >= 0.93


def test_no_difference_leaves_room_for_one() -> None:
    for num, least in ((60, 0.04), (200, 0.012)):
        same = [float(i % 2) for i in range(num)]
        found = paired_difference(same, same, rng=stream(0))
        assert found.low <= -least and found.high >= least


def answers(seed: int, *, num_questions: int, num_rows: int) -> tuple[list[int], np.ndarray]:
    """The question of each row, and two equally good models' answers, 0.6 right in the mean.

    Most rows of a question are right or wrong together, another question for each model.
    """
    rng = stream(seed, num_questions, num_rows)
    questions = np.repeat(np.arange(num_questions), num_rows)
    shares = rng.beta(0.6, 0.4, size=(2, num_questions))
    return questions.tolist(), (rng.random((2, len(questions))) < shares[:, questions]) * 1.0


@pytest.mark.parametrize("num_questions", [10, pytest.param(30, marks=long)])
def test_rows_of_one_question_are_no_independent_evidence(num_questions: int) -> None:
    covered, shares, claims = 0, 0, 0
    for seed in range(200):
        questions, (ours, theirs) = answers(seed, num_questions=num_questions, num_rows=8)
        strata = Strata(names=("all",) * len(questions), clusters=tuple(questions))
        measure = partial(paired_difference, rng=stream(seed), strata=strata, num_resamples=QUICK)
        gain = measure(ours.tolist(), theirs.tolist())
        mean = bootstrap_mean(ours.tolist(), rng=stream(seed), strata=strata, num_resamples=QUICK)
        share = proportion((ours > 0).tolist(), clusters=questions)
        covered += mean.low <= 0.6 <= mean.high
        shares += share.low <= 0.6 <= share.high
        claims += not gain.low <= 0 <= gain.high
        assert mean.num_values == gain.num_values == share.num_values == num_questions
    assert covered >= 185 and shares >= 185 and claims <= 12


def test_a_cluster_of_equal_sizes_counts_as_its_mean() -> None:
    questions, (ours, _) = answers(0, num_questions=30, num_rows=8)
    means = ours.reshape(30, 8).mean(axis=1).tolist()
    strata = Strata(names=("all",) * 240, clusters=tuple(questions))
    rows = bootstrap_mean(ours.tolist(), rng=stream(1), strata=strata)
    assert rows.low == pytest.approx(bootstrap_mean(means, rng=stream(1)).low, abs=1e-12)
    alone = Strata(names=strata.names, clusters=tuple(range(240)))
    plain = bootstrap_mean(ours.tolist(), rng=stream(1))
    assert bootstrap_mean(ours.tolist(), rng=stream(1), strata=alone) == plain
    assert rows.high - rows.low > 1.5 * (plain.high - plain.low)
    few = Strata(names=("all",) * 80, clusters=tuple(questions[:80]))
    small = bootstrap_mean(ours[:80].tolist(), rng=stream(1), strata=few).small
    assert small == "10 questions in all, fewer than 30"


def test_sources_that_ask_the_same_questions_are_no_independent_evidence() -> None:
    """Two sources with the same answers say as much as one of them."""
    ours = (stream(0).random(60) < 0.7) * 1.0
    both = Strata(names=("a",) * 60 + ("b",) * 60, clusters=tuple(range(60)) * 2)
    twice = bootstrap_mean([*ours, *ours], rng=stream(1), strata=both)
    once = bootstrap_mean(ours.tolist(), rng=stream(1))
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high), abs=1e-12)


def test_a_proportion_of_pairs_that_are_alike_counts_pairs() -> None:
    is_right = [place < 30 for place in range(40)]
    pairs = proportion(
        [own for own in is_right for _ in "ab"], clusters=[i // 2 for i in range(80)]
    )
    once = proportion(is_right)
    assert (pairs.low, pairs.high) == pytest.approx((once.low, once.high), abs=0.01)
    perfect = proportion([True] * 240, clusters=[i // 8 for i in range(240)])
    assert perfect.low == pytest.approx(proportion([True] * 30).low)


def test_two_large_questions_among_small_ones_prove_little() -> None:
    """Half of the time the two that hold 40 of 50 rows are both right, or both wrong."""
    sizes = [20, 20, *[1] * 10]
    questions = np.repeat(np.arange(12), sizes)
    strata = Strata(names=("all",) * 50, clusters=tuple(questions.tolist()))
    missed = shares = 0
    for seed in range(100):
        rows = (stream(seed).random(12) < 0.5)[questions]
        mean = bootstrap_mean(
            (rows * 1.0).tolist(), rng=stream(1), strata=strata, num_resamples=QUICK
        )
        share = proportion(rows.tolist(), clusters=questions.tolist())
        missed += not mean.low <= 0.5 <= mean.high
        shares += not share.low <= 0.5 <= share.high
    assert missed <= 8 and shares <= 8


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ((5, 400), (19.0, 1.0)),
        pytest.param((5, 400), (1.0, 1.0), marks=long),
        pytest.param((8, 8, 300), (5, 5, 1), marks=long),
    ],
)
def test_many_tasks_of_little_weight_do_not_make_the_few_that_decide_exact(
    sizes: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    """Two equally good models differ on half of the few tasks, and hardly on the many others."""
    names = tuple(f"s{i}" for i, size in enumerate(sizes) for _ in range(size))
    strata = Strata(names=names, weights={f"s{i}": weight for i, weight in enumerate(weights)})
    share = np.where(np.array(names) == f"s{len(sizes) - 1}", 0.02, 1.0)
    claims = 0
    for seed in range(300):
        rng = stream(seed)
        ours, drawn = (rng.random((2, len(names))) < 0.5) * 1.0
        theirs = np.where(rng.random(len(names)) < share, drawn, ours)
        found = paired_difference(
            ours.tolist(),
            theirs.tolist(),
            rng=rng,
            strata=strata,
            num_resamples=50,
        )
        claims += not found.low <= 0 <= found.high
    # 5 % are 15, and chance makes up to 23 of them.
    assert claims <= 23


def test_questions_count_as_many_as_they_are_worth() -> None:
    sizes = [40, 40, *[1] * 38]
    clusters = tuple(np.repeat(np.arange(40), sizes).tolist())
    strata = Strata(names=("all",) * len(clusters), clusters=clusters)
    values = [float(i % 2) for i in range(len(clusters))]
    small = bootstrap_mean(values, rng=stream(0), strata=strata, num_resamples=QUICK).small
    assert small == "40 questions that count for 4 in all, fewer than 30"
    even = Strata(names=("all",) * 60, clusters=tuple(i // 2 for i in range(60)))
    assert not bootstrap_mean(
        [0.0, 1.0] * 30, rng=stream(0), strata=even, num_resamples=QUICK
    ).small
