"""A model of every task's answer as a function of merge coefficients, and its proposals.

    surrogate = Surrogate(points, certainties, num_blocks=4)    # [n, d], [n, tasks], NaN: not asked
    points = propose(surrogate, starts=best, box=Bounds(0.0, 1.5), worth=worth, count=10, rng=rng)

The log-odds of a task's right answer change almost linearly with the coefficients x of a sum of
adapters. The worth of all answers does not: it has a maximum in between, and follows from the
log-odds, which are a Gaussian process with one kernel for all tasks,

    k(x, x') = BASE + x x' / b + curvature (x x' / b)^2     b: blocks, each with its coefficients

times a scale, plus noise. Scale, curvature and noise maximise the likelihood of the answers. One
proposal is the point of highest expected worth, each other one the best by a draw of the log-odds
(Thompson sampling), among random points and points around the best known ones. Uncertain log-odds
lower the expected worth: being wrong costs more than being right gains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, product

import numpy as np
from numpy.typing import NDArray

from rookery.search.population import random_weights

__all__ = ["Bounds", "Surrogate", "Worth", "propose"]

Array = NDArray[np.float64]
Worth = Callable[[Array], Array]
"""Probabilities of the right answers [points, tasks] -> worth of each point [points]."""

BASE = 4.0
"""Variance of the log-odds without adapters; like the next two, in units of the linear part."""
CURVATURES = (0.0, 0.1, 0.3, 1.0)
NOISES = (0.01, 0.03, 0.1, 0.3, 1.0)
LEAST = 0.01
"""Certainties are clipped this far from 0 and 1: log-odds beyond only differ by rounding."""
MOST_PARTS = 256
"""Most parts used to choose curvature and noise, evenly spaced. Fitting a part takes as long for
one task as for many, and after several races hardly two tasks were asked the same points."""
FEW_POINTS = 64
"""With more points fewer parts are used, by the square: 256 points leave 16 parts, which are as
many answers. The time of a fit grows with the cube of the points."""

NUM_POINTS = 800
NUM_ROUNDS = 4
NUM_STARTS = 5
DECIMALS = 4
"""Decimals of coefficients, so that machines that round differently nearly always agree."""
STEPS = (0.05, 0.1, 0.2, 0.4)
"""Standard deviations of the points around a centre."""
FEW_FOUNDERS = 3
"""More founders move less each: twenty that all move by 0.4 would leave the known region."""
NODES = ((-(3.0**0.5), 1 / 6), (0.0, 2 / 3), (3.0**0.5, 1 / 6))
"""Nodes and weights of the normal distribution, exact up to polynomials of degree five."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of every coefficient."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Tasks that were asked at the same points."""

    points: NDArray[np.intp]
    tasks: NDArray[np.intp]
    odds: Array
    """[points, tasks]"""


@dataclass(frozen=True, slots=True)
class _Fit:
    curvature: float
    gram: Array
    """Kernel of the points with itself, plus noise."""
    scale: float
    weights: Array
    """[points, tasks]: factors of the kernel to each point."""
    log_likelihood: float


class Surrogate:
    """A model fitted to points [n, blocks * founders] and certainties [n, tasks]."""

    def __init__(
        self,
        points: Array,
        certainties: Array,
        *,
        num_blocks: int,
        is_live: NDArray[np.bool_] | None = None,
    ) -> None:
        """`is_live` [blocks * founders]: whether a coefficient has an effect; others count as 0."""
        self.num_blocks = num_blocks
        self.is_live = np.ones(points.shape[1], dtype=bool) if is_live is None else is_live
        self._points = points * self.is_live
        self._num_tasks = certainties.shape[1]
        parts = list(_parts(certainties))
        most = MOST_PARTS * FEW_POINTS**2 // max(FEW_POINTS, len(points)) ** 2 or 1
        some = parts[:: -(-len(parts) // most) or 1]
        fits = {options: self._fit(some, *options) for options in product(CURVATURES, NOISES)}
        self._best = self._fit(parts, *max(fits, key=lambda options: fits[options].log_likelihood))

    @property
    def points(self) -> Array:
        return self._points

    def mean(self, points: Array) -> Array:
        """Return the expected log-odds [points, tasks]."""
        return self._kernel(points, self._points, self._best.curvature) @ self._best.weights

    def spread(self, points: Array) -> Array:
        """Return the log-odds' deviation [points], for a task asked at all fitted points."""
        fit = self._best
        cross = self._kernel(points, self._points, fit.curvature)
        linear = np.square(points).sum(axis=1) / self.num_blocks
        variance = BASE + linear + fit.curvature * linear**2
        known = np.einsum("pn,np->p", cross, np.linalg.solve(fit.gram, cross.T))
        deviation: Array = np.sqrt(fit.scale * np.maximum(variance - known, 0.0))
        return deviation

    def draw(self, points: Array, *, rng: np.random.Generator) -> Iterator[Array]:
        """Yield random log-odds [points, tasks] without end, with the deviation of `spread`."""
        fit, mean = self._best, self.mean(points)
        cross = self._kernel(points, self._points, fit.curvature)
        prior = self._kernel(points, points, fit.curvature)
        spread = prior - cross @ np.linalg.solve(fit.gram, cross.T)
        jitter = 1e-6 * float(np.trace(prior)) / len(prior)
        lower = np.linalg.cholesky(fit.scale * (spread + jitter * np.eye(len(spread))))
        while True:
            yield mean + lower @ rng.standard_normal(mean.shape)

    def _kernel(self, one: Array, other: Array, curvature: float) -> Array:
        linear = one @ other.T / self.num_blocks
        return BASE + linear + curvature * linear**2

    def _fit(self, parts: list[_Part], curvature: float, noise: float) -> _Fit:
        """Fit with the scale of maximum likelihood."""
        num = len(self._points)
        gram = self._kernel(self._points, self._points, curvature) + noise * np.eye(num)
        weights = np.zeros((num, self._num_tasks))
        squares, count, logs = 0.0, 0, 0.0
        for part in parts:
            block = gram[np.ix_(part.points, part.points)]
            solved = np.linalg.solve(block, part.odds)
            weights[np.ix_(part.points, part.tasks)] = solved
            squares += float((part.odds * solved).sum())
            count += solved.size
            logs += len(part.tasks) * float(np.log(np.diag(np.linalg.cholesky(block))).sum())
        scale = max(squares, 1e-12) / max(count, 1)
        likelihood = -0.5 * count * float(np.log(scale)) - logs
        return _Fit(curvature, gram, scale, weights, likelihood)


def _parts(certainties: Array) -> Iterator[_Part]:
    is_asked = ~np.isnan(certainties)
    kinds, kind_of = np.unique(is_asked, axis=1, return_inverse=True)
    near = np.clip(certainties, LEAST, 1 - LEAST)
    odds = np.log(near / (1 - near))
    for kind in range(kinds.shape[1]):
        points, tasks = np.flatnonzero(kinds[:, kind]), np.flatnonzero(kind_of.ravel() == kind)
        if len(points):
            yield _Part(points, tasks, odds[np.ix_(points, tasks)])


def propose(
    surrogate: Surrogate,
    *,
    starts: Array,
    box: Bounds,
    worth: Worth,
    count: int,
    rng: np.random.Generator,
) -> Array:
    """Return points [count, d] to measure next, all new and different; fewer if the box holds no
    more. `starts` [n, d] are the best measured. Coefficients that are not live are 0."""
    blocks, is_live = surrogate.num_blocks, surrogate.is_live
    num_founders = starts.shape[1] // blocks
    sums = [random_weights(num_founders, rng=rng) for _ in range(NUM_POINTS // 4)]
    drawn = np.clip(np.tile(sums, blocks), box.low, box.high)
    pool = np.concatenate([drawn, _around(starts, box, blocks, rng)]) * is_live
    for _ in range(NUM_ROUNDS):
        value = _expected(worth, surrogate, pool)
        best = pool[np.argsort(-value, kind="stable")[:NUM_STARTS]]
        near = _around(np.concatenate([best, starts]), box, blocks, rng)
        pool = np.concatenate([best, near * is_live])
    points = np.clip(np.round(pool, DECIMALS), box.low, box.high) * is_live
    # Compare rounded points: a limit with more decimals stays exact in the points at it.
    names = _rounded(points)
    draws = islice(surrogate.draw(pool, rng=rng), count - 1)
    values = (worth(_probability(odds)) for odds in draws)
    seen = set(_rounded(surrogate.points))
    chosen: list[int] = []
    for value in chain([_expected(worth, surrogate, pool)], values):
        order = np.argsort(-value, kind="stable").tolist()
        new = next((place for place in order if names[place] not in seen), None)
        if new is None:
            break
        seen.add(names[new])
        chosen.append(new)
    proposed: Array = points[chosen]
    return proposed


def _rounded(points: Array) -> list[tuple[float, ...]]:
    return [tuple(point) for point in np.round(points, DECIMALS).tolist()]


def _expected(worth: Worth, surrogate: Surrogate, points: Array) -> Array:
    """Return the mean worth of the points over the distribution of their log-odds."""
    mean, spread = surrogate.mean(points), surrogate.spread(points)[:, None]
    values = [weight * worth(_probability(mean + node * spread)) for node, weight in NODES]
    total: Array = np.sum(values, axis=0)
    return total


def _around(centres: Array, box: Bounds, num_blocks: int, rng: np.random.Generator) -> Array:
    """Return points near the centres; half of them move alike in all blocks. With many founders
    each moves less, so that the whole step has the same length."""
    size = centres.shape[1]
    shrink = min(1.0, (FEW_FOUNDERS / (size // num_blocks)) ** 0.5)
    origins = centres[rng.integers(len(centres), size=NUM_POINTS)]
    alike = np.tile(rng.standard_normal((NUM_POINTS, size // num_blocks)), num_blocks)
    apart = rng.standard_normal((NUM_POINTS, size))
    moves = np.where(rng.random((NUM_POINTS, 1)) < 0.5, alike, apart)
    steps = shrink * rng.choice(STEPS, (NUM_POINTS, 1))
    points: Array = np.clip(origins + steps * moves, box.low, box.high)
    return points


def _probability(odds: Array) -> Array:
    probability: Array = 1.0 / (1.0 + np.exp(np.minimum(-odds, 700.0)))  # beyond it overflows
    return probability
