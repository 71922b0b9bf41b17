"""Confidence intervals for reports: bootstrap of a mean, of a paired difference, Wilson.

    bootstrap_mean(rewards, rng=stream(seed, "report"))              # Interval(0.61, 0.55, 0.67)
    paired_difference(ours, theirs, rng=stream(seed, "report"))      # positive: ours is better
    proportion(is_right, clusters=questions)                         # for right-or-wrong answers

Rewards are aligned by task. `Strata` names the source of each task: means are first taken per
source, and resampling stays within a source.

**Clusters.** Eight rows of one question are not eight independent values. The rows of a cluster
become one value, their linearised part of the mean: the values are independent, and keep the rows'
mean and its spread. A row alone in its cluster is its own value. Sources that share a cluster are
resampled together. Clusters of unequal size count as fewer of equal size (Kish 1965): if two hold
most rows, the others hardly make the mean more exact.

**Small samples.** A bootstrap only knows its sample: two right answers give [1, 1], and for eight
sources of two tasks it covers the truth in 80 % of cases instead of 95 %. So an interval reaches at
least as far as Student's for the same values plus `PRIOR` values at the limits (Agresti and Coull
1998), with each source's spread shrunk towards the common one and Satterthwaite's degrees of
freedom. From some hundred values on both agree.

Sequential tests side by side: is the mean of a finite list above a value? Look at any time.

    tests = MeanTests((num_pairs,), size=200, null=0.0, limits=(-1.0, 1.0), alpha=0.001)
    tests.see(values_K_N, first=0, where=(rows,))     # the next K values of the tests in `rows`
    tests.is_proven, tests.is_certain

**The test.** The `size` values are drawn in random order, without replacement, none below the first
of `limits`, low. If their mean is at most `null`, then after t of them, with sum S, the next has
mean at most m = (size * null - S) / (size - t). A gambler who stakes the share f of her wealth on
"more than m" multiplies it by 1 + f (x - m) / (m - low) each time. Under that hypothesis her wealth
ever reaches 1 / alpha with probability at most alpha (Ville). `STAKES` are played in parallel and
averaged. If the remaining values cannot bring S back to size * null, the claim is certain.

A value costs one multiplication per stake, however many came before.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rookery.errors import TaskError

__all__ = [
    "STAKES",
    "TOLERANCE",
    "Interval",
    "MeanTests",
    "Strata",
    "bootstrap_mean",
    "check_rewards",
    "paired_difference",
    "proportion",
    "two_sum",
]


PRIOR = 4.0
"""Values added, half of them at each limit: Agresti and Coull's two successes and two failures."""

POOLED = 2.0
"""Values' worth of the common spread that is added to each source's spread."""

MIN_VALUES = 30
"""With fewer values, or fewer than `MIN_PER_SOURCE` of a source, limits matter as much as data."""

MIN_PER_SOURCE = 5

RARE = 10
"""With fewer non-zero differences, resampling underestimates the spread."""

CHUNK = 1 << 21
"""Draws in memory at a time: 16 MiB of indices."""


CONFIDENCE = 0.95

NUM_RESAMPLES = 10_000
"""With this many, the end points move by about 1 % of the width between seeds."""

Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strata:
    """The source of each value and the weight of each source: the score is their weighted mean.

    `Strata(names=("gsm8k", "gsm8k", "mmlu", "mmlu"), weights={"gsm8k": 2.0, "mmlu": 1.0})`
    """

    names: tuple[str, ...]
    weights: Mapping[str, float] | None = None
    """None weighs all sources alike; a source without weight counts as 0."""
    clusters: tuple[Hashable, ...] | None = None
    """Question of each value; values of one question are dependent. None: all are independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float
    num_values: int
    """Number of values, or of clusters if values are in clusters."""
    small: str = ""
    """Why the sample is too small to rely on; empty if it is large enough."""


def bootstrap_mean(
    values: Sequence[float],
    *,
    rng: np.random.Generator,
    strata: Strata | None = None,
    num_resamples: int = NUM_RESAMPLES,
    limits: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Return the interval of the mean, or of the strata's weighted mean, by the BCa bootstrap.

    `limits` are the smallest and the largest possible value; values beyond widen them.
    """
    sources = _sources(values, strata)
    parts, shares = [source.values for source in sources], [source.share for source in sources]
    means = np.array([part.mean() for part in parts])
    # Rounding may move the mean of equal values away from them.
    estimate = float(np.clip(np.array(shares) @ means, min(values), max(values)))
    resampled = np.zeros(num_resamples)
    for part, share in zip(parts, shares, strict=True):
        resampled += share * _resample(part, num_resamples=len(resampled), rng=rng)
    centred = zip(parts, shares, means, strict=True)
    influence = np.concatenate([w / len(x) * (x - m) for x, w, m in centred])
    low, high = np.quantile(
        resampled, _bca_tails(resampled, estimate=estimate, influence=influence)
    )
    least, most = min(limits[0], *values), max(limits[1], *values)
    counted = [source for source in sources if source.share > 0]
    count = sum(len(source.values) for source in sources)
    around = _student(counted, ends=(least, most))
    return Interval(
        estimate=estimate,
        low=max(least, min(float(low), around[0], estimate)),
        high=min(most, max(float(high), around[1], estimate)),
        num_values=count,
        small=_why_small(counted, noun="tasks" if count == len(values) else "questions"),
    )


def paired_difference(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    rng: np.random.Generator,
    strata: Strata | None = None,
    num_resamples: int = NUM_RESAMPLES,
    limits: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Return the interval of the mean of ours - theirs, task by task: hard tasks do not widen it.

    `limits` are the smallest and the largest possible reward.
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"Got {len(ours)} and {len(theirs)} rewards: a paired difference needs the same tasks "
            "in the same order."
        )
    differences = np.subtract(ours, theirs)
    reach = max(limits[1] - limits[0], float(np.abs(differences).max(initial=0.0)))
    interval = bootstrap_mean(
        differences.tolist(),
        rng=rng,
        strata=strata,
        num_resamples=num_resamples,
        limits=(-reach, reach),
    )
    sources = _sources(differences.tolist(), strata)
    if sum(source.num_nonzero for source in sources) >= RARE:
        return interval
    low, high = _rare_difference(sources, reach=reach)
    return replace(interval, low=min(interval.low, low), high=max(interval.high, high))


def _rare_difference(sources: Sequence["_Source"], *, reach: float) -> tuple[float, float]:
    """Return wins minus losses, each with Wilson's interval, joined by Newcombe's method.

    If hardly a task differs, the spread says nothing: no difference on 60 tasks still allows one on
    every twentieth.
    """
    trials = 1.0 / math.fsum(s.share**2 / s.trials for s in sources if s.share > 0)
    wins, losses = (
        math.fsum(s.share * float(np.maximum(sign * s.values, 0.0).mean()) for s in sources) / reach
        for sign in (1.0, -1.0)
    )
    wins, losses = min(1.0, wins), min(1.0, losses)
    win_low, win_high = _wilson_ends(wins, trials)
    loss_low, loss_high = _wilson_ends(losses, trials)
    low = wins - losses - math.hypot(wins - win_low, loss_high - losses)
    high = wins - losses + math.hypot(win_high - wins, losses - loss_low)
    return reach * low, reach * high


def proportion(is_right: Sequence[bool], *, clusters: Sequence[Hashable] | None = None) -> Interval:
    """Return Wilson's score interval of right answers, which has a width even at 0 % and 100 %.

    Eight of ten: 0.49 to 0.94. Answers in clusters count as the number of independent ones that
    give a proportion as exact.
    """
    values = np.array(is_right, dtype=np.float64)
    strata = Strata(
        names=("all",) * len(values), clusters=None if clusters is None else tuple(clusters)
    )
    share = float(values.mean()) if len(values) else 0.0
    [source] = _sources((values if share <= 0.5 else 1 - values).tolist(), strata)
    low, high = _wilson_ends(share, source.trials)
    return Interval(estimate=share, low=low, high=high, num_values=len(source.values))


def _wilson_ends(share: float, trials: float) -> tuple[float, float]:
    z = Z
    shrink = 1.0 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if share <= 0 else max(0.0, centre - half)
    return low, 1.0 if share >= 1 else min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    values: NDArray[np.float64]
    """One per cluster."""
    share: float
    """Weight in the score; all shares sum to 1."""
    num_nonzero: int
    """Clusters with a row that is not 0."""
    trials: float
    """Independent rows that would give an equally exact mean."""
    num_equal: float
    """Clusters of equal weight with the same spread: two of 20 rows and ten of one count as 3."""


def _sources(values: Sequence[float], strata: Strata | None) -> list[_Source]:
    """Group rows by source, with a value per cluster; sources that share a cluster are one."""
    strata = strata or Strata(names=("all",) * len(values))
    clusters = range(len(values)) if strata.clusters is None else strata.clusters
    is_aligned = len(strata.names) == len(clusters) == len(values)
    if not is_aligned or not len(values) or not np.isfinite(values).all():
        raise ValueError(
            f"Got {len(values)} values of {len(strata.names)} named sources and {len(clusters)} "
            "clusters: there is at least one value, and each is finite and has both."
        )
    names = dict.fromkeys(strata.names)
    weights = strata.weights or dict.fromkeys(names, 1.0)
    raw = np.array([weights.get(name, 0.0) for name in names])
    if raw.min() < 0 or raw.sum() <= 0:
        raise ValueError(
            f"Got the weights {dict(weights)} for the sources {sorted(names)}: they are 0 or "
            "above and at least one is above 0."
        )
    shares = dict(zip(names, (raw / raw.sum()).tolist(), strict=True))
    joined = _join_sources(strata.names, clusters)
    rows: dict[str, dict[str, list[tuple[Hashable, float]]]] = {}
    for name, cluster, value in zip(strata.names, clusters, values, strict=True):
        rows.setdefault(joined[name], {}).setdefault(name, []).append((cluster, float(value)))
    return [_source(cells, shares) for cells in rows.values()]


def _join_sources(names: Sequence[str], clusters: Sequence[Hashable]) -> dict[str, str]:
    """Return per source the first of all sources linked to it by shared clusters."""
    joined = {name: name for name in names}
    first: dict[Hashable, str] = {}
    for name, cluster in zip(names, clusters, strict=True):
        one, other = joined[first.setdefault(cluster, name)], joined[name]
        if one != other:
            joined = {key: one if group == other else group for key, group in joined.items()}
    return joined


def _source(
    rows: Mapping[str, Sequence[tuple[Hashable, float]]], shares: Mapping[str, float]
) -> _Source:
    """Combine sources that share clusters; `rows` are (cluster, value) by source."""
    known = [cluster for cells in rows.values() for cluster, _ in cells]
    places = {cluster: place for place, cluster in enumerate(dict.fromkeys(known))}
    count, share = len(places), math.fsum(shares[name] for name in rows)
    clustered, is_nonzero, plain = np.zeros(count), np.zeros(count, dtype=bool), 0.0
    cluster_weights = np.zeros(count)
    for name, cells in rows.items():
        values = np.array([value for _, value in cells])
        codes = np.array([places[cluster] for cluster, _ in cells])
        sizes = count * np.bincount(codes, minlength=count) / len(cells)
        sums = count / len(cells) * np.bincount(codes, weights=values, minlength=count)
        cluster_values = sums - (sizes - 1.0) * values.mean()
        # A large cluster pulls the mean towards itself, and so appears too close to it.
        drawn = (1.0 - 1.0 / count) / np.maximum(1.0 - sizes / count, 1.0 / count) - 1.0
        added = drawn * (cluster_values - values.mean())
        part = shares[name] / share if share else 1.0 / len(rows)
        clustered += part * (cluster_values + (added - added.mean()))
        cluster_weights += part * sizes / count
        plain += part**2 * float(values.var()) / len(cells)
        is_nonzero[codes[values != 0]] = True
    num_nonzero = int(is_nonzero.sum())
    num_equal = min(float(count), 1.0 / float((cluster_weights**2).sum()))
    num_showing = num_nonzero * num_equal / count
    trials = _trials(clustered, num_showing, sizes=list(Counter(known).values()), plain=plain)
    return _Source(" and ".join(rows), clustered, share, num_nonzero, trials, num_equal)


def _trials(
    clustered: NDArray[np.float64], num_showing: float, *, sizes: Sequence[int], plain: float
) -> float:
    """Return the independent rows that give an equally exact mean.

    `plain` is the mean's variance if all rows were independent. `num_showing` clusters show the
    dependence of rows; clusters of zeros do not. `POOLED` clusters of identical rows are added.
    """
    num_rows = sum(sizes)
    if len(clustered) == num_rows:
        return float(num_rows)
    alike = sum(size * size for size in sizes) / num_rows
    has_spread = plain > 0 and len(clustered) > 1
    excess = float(clustered.var(ddof=1)) / len(clustered) / plain if has_spread else 0.0
    weight = num_showing if has_spread else 0.0
    return num_rows / max(1.0, (weight * excess + POOLED * alike) / (weight + POOLED))


def _why_small(sources: Sequence[_Source], *, noun: str) -> str:
    total = math.fsum(source.num_equal for source in sources)
    least = min(sources, key=lambda source: source.num_equal)
    if round(total, 6) < MIN_VALUES:
        count = sum(len(source.values) for source in sources)
        return f"{_counted(count, total, noun)} in all, fewer than {MIN_VALUES}"
    if round(least.num_equal, 6) < MIN_PER_SOURCE:
        counted = _counted(len(least.values), least.num_equal, noun)
        return f"{counted} of {least.name}, fewer than {MIN_PER_SOURCE}"
    return ""


def _counted(count: int, num_equal: float, noun: str) -> str:
    """Name the number of clusters, with the number of equal size if that is smaller."""
    fewer = round(num_equal)
    return f"{count} {noun}" if fewer == count else f"{count} {noun} that count for {fewer}"


def _student(sources: Sequence[_Source], *, ends: tuple[float, float]) -> tuple[float, float]:
    """Return Student's interval with `PRIOR` more values at the limits."""
    counts = np.array([source.num_equal for source in sources])
    shares = np.array([source.share for source in sources])
    # The mean of `counts` values of equal weight has the variance of the clusters' mean.
    scales = counts * (counts - 1) / [max(1, len(s.values) * (len(s.values) - 1)) for s in sources]
    squares = scales * [((s.values - s.values.mean()) ** 2).sum() for s in sources]
    estimate = math.fsum(source.share * source.values.mean() for source in sources)
    # Number of values of a single source that would give an equally exact mean.
    num_like = 1.0 / float((shares**2 / counts).sum())
    low, high = ends
    added = PRIOR / 2 * ((low - estimate) ** 2 + (high - estimate) ** 2)
    # A value weighs as much in the common spread as in the mean: many values of little weight say
    # nothing about the spread of the few that decide.
    weights = shares / counts / (shares / counts).max()
    pooled = float(weights @ squares + added) / (float(weights @ (counts - 1)) + PRIOR)
    # If values spread less than right-or-wrong ones of that mean, they pull the centre less.
    largest = (estimate - low) * (high - estimate)
    pull = PRIOR * min(1.0, pooled / largest) if largest > 0 else PRIOR
    centre = (num_like * estimate + pull * (low + high) / 2) / (num_like + pull)
    degrees = counts - 1 + POOLED
    parts = shares**2 * (squares + POOLED * pooled) / degrees / counts
    variance = float(parts.sum()) * num_like / (num_like + pull)
    freedom = float(parts.sum()) ** 2 / float((parts**2 / degrees).sum())
    half = _student_quantile(freedom) * math.sqrt(variance)
    return centre - half, centre + half


def _student_quantile(freedom: float) -> float:
    """Cornish and Fisher's expansion: within 1 % at 95 % from two degrees of freedom on."""
    z = Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def _resample(
    part: NDArray[np.float64], *, num_resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return the means of `num_resamples` resamples with replacement, each as large as the part."""
    rows = max(1, CHUNK // len(part))
    blocks = []
    for start in range(0, num_resamples, rows):
        shape = (min(rows, num_resamples - start), len(part))
        blocks.append(part[rng.integers(len(part), size=shape)].mean(axis=1))
    return np.concatenate(blocks)


def _bca_tails(
    resampled: NDArray[np.float64], *, estimate: float, influence: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the tails corrected for bias and skewness (Efron 1987)."""
    tail = (1.0 - CONFIDENCE) / 2.0
    tails = (tail, 1.0 - tail)
    largest = float(np.abs(influence).max())
    if largest == 0.0:
        return tails
    # Count half of the ties: with rewards in steps, many resamples equal the estimate.
    slack = 1e-12 * float(np.abs(resampled).max())
    is_tie = np.abs(resampled - estimate) <= slack
    below = (resampled < estimate - slack).mean() + 0.5 * is_tie.mean()
    normal = NormalDist()
    edge = 0.5 / len(resampled)
    bias = normal.inv_cdf(min(1.0 - edge, max(edge, float(below))))
    scaled = influence / largest
    acceleration = float((scaled**3).sum()) / (6.0 * float((scaled**2).sum()) ** 1.5)

    def corrected(tail: float) -> float:
        z = bias + normal.inv_cdf(tail)
        return normal.cdf(bias + z / max(1e-9, 1.0 - acceleration * z))

    return corrected(tails[0]), corrected(tails[1])


STAKES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Shares of the largest safe stake. The best one for a pair is (wins - losses) / (wins + losses) of
the tasks that differ. Averaging over ten costs at most a factor 10 of wealth."""

TOLERANCE = 1e-9
"""Relative rounding allowance of sums of rewards: a lead must exceed it to be certain."""

_LOST = 1e-250
"""Smaller wealth becomes 0: numbers near the smallest float are slow to compute with."""


class MeanTests:
    """Tests of one null hypothesis, each on its own values. Its maker owns and changes it. A proven
    test stays proven: it is valid to look at any time."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        size: int,
        null: float,
        limits: tuple[float, float],
        alpha: float,
    ) -> None:
        """`limits` are the smallest and the largest possible value."""
        self._size = size
        self._null = null
        self._low = limits[0]
        self._rounding = TOLERANCE * (limits[1] - limits[0]) / 2
        self._enough = 1.0 / alpha
        self.sums = np.zeros(shape)
        self._wealth = np.ones((len(STAKES), *shape))
        self.is_proven = np.zeros(shape, dtype=bool)
        """Whether the mean is above the null, at level alpha or with certainty."""
        self.is_certain = np.zeros(shape, dtype=bool)

    def see(self, values: NDArray[np.float64], *, first: int, where: Any) -> None:
        """Play values [K, *selected] on the tests that `where` selects by one index array per
        dimension; all of them have seen exactly `first` values."""
        sums, wealth = self.sums[where], self._wealth[(slice(None), *where)]
        is_proven, is_certain = self.is_proven[where], self.is_certain[where]
        stakes = STAKES.reshape(-1, *[1] * sums.ndim)
        target = self._size * self._null
        factors = np.empty_like(wealth)
        with np.errstate(over="ignore", under="ignore"):
            for left, value in zip(range(self._size - first, 0, -1), values, strict=False):
                mean = (target - sums) / left
                room = mean - self._low
                # If the hypothesis leaves no room to be wrong, there is no stake to place.
                gain = np.where(
                    room > self._rounding, (value - mean) / np.maximum(room, self._rounding), 0.0
                )
                np.multiply(stakes, gain, out=factors)
                factors += 1.0
                wealth *= factors
                sums += value
                is_proven |= wealth.mean(axis=0) >= self._enough
                surplus = sums + self._low * (left - 1) - target
                is_certain |= surplus > self._rounding * self._size
        wealth[wealth < _LOST] = 0.0
        self.sums[where], self._wealth[(slice(None), *where)] = sums, wealth
        self.is_proven[where], self.is_certain[where] = is_proven | is_certain, is_certain

    def reset(self, where: Any) -> None:
        self.sums[where], self._wealth[(slice(None), *where)] = 0.0, 1.0
        self.is_proven[where] = self.is_certain[where] = False


def two_sum(totals: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add values to [2, N]: the rounded sums, and their rounding errors."""
    high, low = totals
    total = high + values
    back = total - high
    low = low + ((high - (total - back)) + (values - back))
    rounded = total + low
    return np.stack([rounded, low - (rounded - total)])


def check_rewards(
    values: NDArray[np.float64],
    *,
    id: str,
    tasks: Sequence[str],
    limits: tuple[float, float] | None,
) -> None:
    """Raise TaskError unless all values are finite and within the limits, if there are any."""
    is_wrong = ~np.isfinite(values)
    if limits is not None:
        is_wrong |= (values < limits[0]) | (values > limits[1])
    if not is_wrong.any():
        return
    place = int(np.argmax(is_wrong))
    what = f"The reward of {id} on the task {tasks[place]} is {values[place]}"
    if limits is None or not np.isfinite(values[place]):
        raise TaskError(f"{what}: a reward is a finite number.")
    raise TaskError(
        f"{what}, outside the limits of the race, {limits[0]} to {limits[1]}. Write the smallest "
        "and the largest reward of the scorer as race.low and race.high, or race: {enabled: "
        "false}."
    )
