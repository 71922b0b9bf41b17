"""The model of all answers: what it expects, how sure it is, and what it proposes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rookery.search.surrogate import (
    BASE,
    CURVATURES,
    DECIMALS,
    LEAST,
    MOST_PARTS,
    NOISES,
    Bounds,
    Surrogate,
    propose,
)

Array = NDArray[np.float64]
FOUNDERS, BLOCKS, TASKS = 3, 4, 60


def make_world(seed: int = 0) -> tuple[Array, Array]:
    """Log-odds without adapters [tasks], and what each coefficient adds [d, tasks]. Every founder
    helps its own third of the tasks and harms the others, more in some blocks than in others."""
    rng = np.random.default_rng(seed)
    own = np.repeat(np.arange(FOUNDERS), TASKS // FOUNDERS)
    slopes = rng.normal(-0.4, 0.2, (BLOCKS, FOUNDERS, TASKS))
    slopes[:, own, np.arange(TASKS)] += 1.2
    slopes += rng.normal(0.0, 0.5, (BLOCKS, FOUNDERS, FOUNDERS))[:, :, own]
    return rng.normal(0.0, 0.5, TASKS), slopes.reshape(BLOCKS * FOUNDERS, TASKS) / BLOCKS


def sigmoid(odds: Array) -> Array:
    result: Array = 1.0 / (1.0 + np.exp(-odds))
    return result


def worth(probabilities: Array) -> Array:
    result: Array = np.log(probabilities).mean(axis=1)
    return result


def random_sums(count: int, *, seed: int = 1) -> Array:
    drawn = 1.5 * np.random.default_rng(seed).random((count, FOUNDERS))
    return np.tile(drawn, BLOCKS)


def test_it_expects_what_a_linear_world_gives() -> None:
    base, slopes = make_world()
    rng = np.random.default_rng(2)
    points = 1.5 * rng.random((40, BLOCKS * FOUNDERS))
    surrogate = Surrogate(points, sigmoid(base + points @ slopes), num_blocks=BLOCKS)
    others = 1.5 * rng.random((20, BLOCKS * FOUNDERS))
    assert surrogate.mean(others) == pytest.approx(base + others @ slopes, abs=0.15)


def test_the_fit_is_the_likeliest_and_as_computed_by_plain_inverses() -> None:
    """All curvatures and noises by the textbook, with the density of a normal distribution."""
    base, slopes = make_world()
    points = random_sums(12)
    odds = base + points @ slopes + 0.3 * (points @ slopes) ** 2
    certainties = np.clip(sigmoid(odds), LEAST, 1 - LEAST)
    odds = np.log(certainties / (1 - certainties))
    others = random_sums(5, seed=3)
    found = {}
    for curvature in CURVATURES:
        for noise in NOISES:
            inner, cross = points @ points.T / BLOCKS, others @ points.T / BLOCKS
            gram = BASE + inner + curvature * inner**2 + noise * np.eye(len(points))
            inverse = np.linalg.inv(gram)
            scale = np.einsum("it,ij,jt->", odds, inverse, odds) / odds.size
            _, logdet = np.linalg.slogdet(scale * gram)
            density = -0.5 * (odds.size + TASKS * logdet + odds.size * np.log(2 * np.pi))
            found[density] = (BASE + cross + curvature * cross**2) @ inverse @ odds
    surrogate = Surrogate(points, certainties, num_blocks=BLOCKS)
    assert surrogate.mean(others) == pytest.approx(found[max(found)], abs=1e-6)


def test_a_task_is_expected_from_the_points_that_were_asked_it() -> None:
    base, slopes = make_world()
    points = random_sums(16)
    certainties = sigmoid(base + points @ slopes)
    partly = certainties.copy()
    partly[8:, 30:] = np.nan
    partly[:, -1] = np.nan
    others = random_sums(5, seed=3)
    found = Surrogate(points, partly, num_blocks=BLOCKS).mean(others)
    first = Surrogate(points[:8], certainties[:8], num_blocks=BLOCKS).mean(others)
    assert np.isfinite(found).all()
    assert found[:, 30:-1] == pytest.approx(first[:, 30:-1], abs=0.3)
    assert found[:, -1] == pytest.approx(0.0)


def test_draws_are_as_far_apart_as_it_is_unsure() -> None:
    base, slopes = make_world()
    points = random_sums(12)
    surrogate = Surrogate(points, sigmoid(base + points @ slopes), num_blocks=BLOCKS)
    lonely = np.zeros((1, BLOCKS * FOUNDERS))
    lonely[0, 0] = 6.0
    places = np.concatenate([points[:1], lonely])
    draws = surrogate.draw(places, rng=np.random.default_rng(0))
    spread = np.std([next(draws) for _ in range(50)], axis=0).mean(axis=1)
    assert spread[1] > 3 * spread[0] > 0


def test_proposals_beat_all_that_chance_finds() -> None:
    """After twenty random sums: the best of ten proposals against the best of a thousand sums."""
    base, slopes = make_world()
    box = Bounds(0.0, 1.5)
    known = random_sums(20)

    def value(points: Array) -> Array:
        return worth(sigmoid(base + points @ slopes))

    surrogate = Surrogate(known, sigmoid(base + known @ slopes), num_blocks=BLOCKS)
    starts = known[np.argsort(-value(known))[:5]]
    proposed, again = (
        propose(surrogate, starts=starts, box=box, worth=worth, count=10,
                rng=np.random.default_rng(4))
        for _ in range(2)
    )  # fmt: skip
    assert np.array_equal(proposed, again)
    assert len(np.unique(proposed, axis=0)) == 10
    assert proposed.min() >= box.low and proposed.max() <= box.high
    luck = random_sums(1000, seed=5)
    assert value(proposed).max() > value(luck).max()
    assert value(proposed).mean() > np.median(value(luck))


@pytest.mark.parametrize("high", [1.5, 5 / 3], ids=["short", "long"])
@pytest.mark.parametrize("founders", [1, 3])
def test_proposals_differ_where_the_best_point_is_a_corner(founders: int, high: float) -> None:
    """Every founder helps with every task: the best sum has all of them at their limit, which is
    measured only once, also where it has more decimals than coefficients are rounded to."""
    rng = np.random.default_rng(0)
    known = high * rng.random((20, founders))
    known[0] = high
    certainties = np.tile(sigmoid(known.sum(axis=1, keepdims=True) - 2.0), TASKS)
    surrogate = Surrogate(known, certainties, num_blocks=1)
    proposed = propose(surrogate, starts=known[:5], box=Bounds(0.0, high), worth=worth, count=10,
                       rng=np.random.default_rng(1))  # fmt: skip
    assert len(np.unique(proposed, axis=0)) == 10
    assert np.array_equal(proposed, np.minimum(np.round(proposed, DECIMALS), high))
    assert not (proposed == high).all(axis=1).any()


def test_coefficients_that_change_nothing_count_for_nothing() -> None:
    base, slopes = make_world()
    is_live = np.random.default_rng(3).random(BLOCKS * FOUNDERS) < 0.6
    points = random_sums(12)
    certainties = sigmoid(base + points * is_live @ slopes)
    surrogate = Surrogate(points, certainties, num_blocks=BLOCKS, is_live=is_live)
    without = Surrogate(points[:, is_live], certainties, num_blocks=BLOCKS)
    others = random_sums(5, seed=4)
    expected = without.mean(others[:, is_live])
    assert surrogate.mean(others * is_live) == pytest.approx(expected, abs=1e-9)
    found = propose(
        surrogate,
        starts=points[:3],
        box=Bounds(0.5, 1.5),
        worth=worth,
        count=20,
        rng=np.random.default_rng(5),
    )
    assert not found[:, ~is_live].any() and (found[:, is_live] >= 0.5).all()
    assert len({tuple(point) for point in found[:, is_live].tolist()}) == 20


def test_a_box_that_holds_fewer_points_gives_fewer() -> None:
    base, slopes = make_world()
    known = random_sums(12)
    surrogate = Surrogate(known, sigmoid(base + known @ slopes), num_blocks=BLOCKS)
    at = 0.5 + 10.0**-DECIMALS / 8
    one = propose(surrogate, starts=known[:5], box=Bounds(0.5, at), worth=worth, count=4,
                  rng=np.random.default_rng(1))  # fmt: skip
    assert one == pytest.approx(np.full((1, BLOCKS * FOUNDERS), 0.5))
    all_known = np.concatenate([known, one])
    surrogate = Surrogate(all_known, sigmoid(base + all_known @ slopes), num_blocks=BLOCKS)
    none = propose(surrogate, starts=known[:5], box=Bounds(0.5, at), worth=worth, count=4,
                   rng=np.random.default_rng(1))  # fmt: skip
    assert none.shape == (0, BLOCKS * FOUNDERS)


@pytest.mark.parametrize(("num_points", "most"), [(24, MOST_PARTS), (192, MOST_PARTS // 9)])
def test_many_tasks_asked_of_different_points_cost_one_fit_each(num_points: int, most: int) -> None:
    """Curvature and noise are chosen by some of them, of many points by fewer: the same ones where
    all tasks are alike."""
    rng = np.random.default_rng(2)
    points = 1.5 * rng.random((num_points, FOUNDERS))
    slopes = rng.normal(0.0, 1.0, (FOUNDERS, 3 * MOST_PARTS))
    certainties = sigmoid(points @ slopes + rng.normal(0.0, 0.3, (num_points, 3 * MOST_PARTS)))
    certainties[rng.random(certainties.shape) < 0.3] = np.nan
    num_solved = 0
    solve = np.linalg.solve

    def counted(*args: Any) -> Any:
        nonlocal num_solved
        num_solved += 1
        return solve(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.linalg, "solve", counted)
        surrogate = Surrogate(points, certainties, num_blocks=1)
    assert num_solved <= len(CURVATURES) * len(NOISES) * most + 3 * MOST_PARTS
    others = 1.5 * rng.random((20, FOUNDERS))
    assert np.abs(surrogate.mean(others) - others @ slopes).mean() < 0.2


def test_of_twenty_founders_no_proposal_is_an_exploding_sum() -> None:
    """Where nothing is known to be better, proposals are sums as random search draws them, and what
    is near these. Every coefficient anywhere in the box is a total of fifteen."""
    founders = np.eye(20)
    proposed = propose(
        Surrogate(founders, np.full((20, TASKS), 0.5), num_blocks=1),
        starts=founders[:5],
        box=Bounds(0.0, 1.5),
        worth=lambda probabilities: np.zeros(len(probabilities)),
        count=10,
        rng=np.random.default_rng(0),
    )
    assert len(proposed) == 10
    assert proposed.sum(axis=1).mean() < 8
