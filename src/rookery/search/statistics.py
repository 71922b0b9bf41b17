"""Confidence intervals for reports: bootstrap of a mean, of a paired difference, Wilson.

    bootstrap_mean(rewards, rng=stream(seed, "report"))              # Interval(0.61, 0.55, 0.67)
    paired_difference(ours, theirs, rng=stream(seed, "report"))      # positive: ours is better
    wilson(successes=61, trials=100)                                 # for right-or-wrong answers

Rewards are aligned by task. `Strata` names the source of each task: means are taken per source
first, and resampling stays within a source.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bootstrap", "Interval", "Strata", "bootstrap_mean", "paired_difference", "wilson"]

CHUNK = 1 << 21
"""Draws held in memory at a time: 16 MiB of indices."""


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"Got confidence {confidence}: it lies between 0 and 1, such as 0.95.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """How an interval is made."""

    method: Literal["bca", "percentile"] = "bca"
    """bca corrects the percentiles for bias and skewness."""
    confidence: float = 0.95
    num_resamples: int = 10_000
    """At 10,000 the end points move by about 1 % of the width between seeds."""

    def __post_init__(self) -> None:
        _check_confidence(self.confidence)
        if self.num_resamples < 1:
            raise ValueError(f"Got {self.num_resamples} resamples: at least 1, better 10,000.")


DEFAULT = Bootstrap()
"""95 %, BCa, 10,000 resamples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strata:
    """The source of each value and the weight of each source: the score is their weighted mean.

    `Strata(names=("gsm8k", "gsm8k", "mmlu", "mmlu"), weights={"gsm8k": 2.0, "mmlu": 1.0})`
    """

    names: tuple[str, ...]
    weights: Mapping[str, float] | None = None
    """None weighs all sources alike; a source that is not named has weight 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and where the true value lies with the given confidence."""

    estimate: float
    low: float
    high: float
    confidence: float
    method: Literal["bca", "percentile", "wilson"]
    num_values: int

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is above 0: the gain is not chance at this confidence."""
        return self.low > 0


def bootstrap_mean(
    values: Sequence[float],
    *,
    rng: np.random.Generator,
    strata: Strata | None = None,
    bootstrap: Bootstrap = DEFAULT,
) -> Interval:
    """Interval of the mean; with strata of the weighted mean of the sources' means.

    When all values of each source are equal the interval has no width: the data show no spread.
    For right-or-wrong answers near 0 or 1 `wilson` is the honest choice.
    """
    parts, shares = _parts(values, strata)
    means = np.array([part.mean() for part in parts])
    estimate = float(shares @ means)
    resampled = np.zeros(bootstrap.num_resamples)
    for part, share in zip(parts, shares, strict=True):
        resampled += share * _resample(part, num_resamples=len(resampled), rng=rng)
    tail = (1.0 - bootstrap.confidence) / 2.0
    tails = (tail, 1.0 - tail)
    if bootstrap.method == "bca":
        centred = zip(parts, shares, means, strict=True)
        influence = np.concatenate([w / len(x) * (x - m) for x, w, m in centred])
        tails = _bca_tails(tails, resampled, estimate=estimate, influence=influence)
    low, high = np.quantile(resampled, tails)
    return Interval(
        estimate=estimate,
        low=min(float(low), estimate),
        high=max(float(high), estimate),
        confidence=bootstrap.confidence,
        method=bootstrap.method,
        num_values=len(values),
    )


def paired_difference(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    rng: np.random.Generator,
    strata: Strata | None = None,
    bootstrap: Bootstrap = DEFAULT,
) -> Interval:
    """Interval of the mean of ours - theirs, task by task: hard tasks do not widen it."""
    if len(ours) != len(theirs):
        raise ValueError(
            f"Got {len(ours)} and {len(theirs)} rewards: a paired difference needs the same tasks "
            "in the same order."
        )
    differences = np.subtract(ours, theirs).tolist()
    return bootstrap_mean(differences, rng=rng, strata=strata, bootstrap=bootstrap)


def wilson(*, successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion; never empty, also at 0 % and 100 %.

    wilson(successes=8, trials=10): 0.49 to 0.94.
    """
    _check_confidence(confidence)
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"Got {successes} successes of {trials} trials: there is no proportion.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share = successes / trials
    shrink = 1.0 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(
        estimate=share,
        low=0.0 if successes == 0 else max(0.0, centre - half),
        high=1.0 if successes == trials else min(1.0, centre + half),
        confidence=confidence,
        method="wilson",
        num_values=trials,
    )


def _parts(
    values: Sequence[float], strata: Strata | None
) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """The values of each source and the sources' shares, which sum to 1."""
    strata = strata or Strata(names=("all",) * len(values))
    if len(strata.names) != len(values) or not np.isfinite(values).all():
        raise ValueError(
            f"Got {len(values)} values of {len(strata.names)} named sources: "
            "each value is finite and has one."
        )
    parts: dict[str, list[float]] = {}
    for name, value in zip(strata.names, values, strict=True):
        parts.setdefault(name, []).append(float(value))
    small = sorted(name for name, part in parts.items() if len(part) < 2)
    if small or not parts:
        raise ValueError(
            f"An interval needs at least two values of each source, {small} has fewer: "
            "one shows no spread."
        )
    weights = strata.weights or dict.fromkeys(parts, 1.0)
    raw = np.array([weights.get(name, 0.0) for name in parts])
    if raw.min() < 0 or raw.sum() <= 0:
        raise ValueError(
            f"Got the weights {dict(weights)} for the sources {sorted(parts)}: they are 0 or "
            "above and at least one is above 0."
        )
    return [np.array(part) for part in parts.values()], raw / raw.sum()


def _resample(
    part: NDArray[np.float64], *, num_resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Means of `num_resamples` draws with replacement, as many as the part has values."""
    rows = max(1, CHUNK // len(part))
    blocks = []
    for start in range(0, num_resamples, rows):
        shape = (min(rows, num_resamples - start), len(part))
        blocks.append(part[rng.integers(len(part), size=shape)].mean(axis=1))
    return np.concatenate(blocks)


def _bca_tails(
    tails: tuple[float, float],
    resampled: NDArray[np.float64],
    *,
    estimate: float,
    influence: NDArray[np.float64],
) -> tuple[float, float]:
    """The tails corrected for bias and skewness (Efron 1987)."""
    largest = float(np.abs(influence).max())
    if largest == 0.0:
        return tails
    # Half of the ties: rewards in steps put a good part of the resamples on the estimate.
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
