"""Merits: what an answer counts in a search, while reports use its reward.

    merits_of({"t1": 1.0, "t2": 0.0}, {"t1": 0.9, "t2": 0.4}, merit="certainty",
              num_choices={"t1": 2, "t2": 2})
        -> {"t1": 0.9, "t2": 0.4}

A reward of 0 or 1 says whether the right choice was the likeliest. Its probability also says by how
much, so the same answers distinguish candidates with less noise.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rookery.search.statistics import TOLERANCE, MeanTests

__all__ = [
    "FloorTests",
    "Merit",
    "Standing",
    "merits_at",
    "merits_of",
    "violation_of",
    "vote",
]

# Floors in a race: which candidates are proven to keep or to miss them, and by how much.
#
#     floors = FloorTests(sources, floors={"mmlu": 0.6}, num_candidates=8, limits=(0.0, 1.0),
#                         alpha=0.001)
#     floors.see(rewards_N_K, rows=rows, first=0)       # the next K tasks of some candidates
#     floors.standing(num_seen).is_feasible
#
# A floor bounds the mean over all tasks of its source. Each candidate has two sequential tests per
# floor, above and below it, and the bounds that the remaining tasks leave with certainty.


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Bounds on every candidate's violation over all tasks; arrays over candidates."""

    is_feasible: NDArray[np.bool_]
    """Proven, by a test or with certainty, to keep every floor."""
    is_infeasible: NDArray[np.bool_]
    """Proven, by a test or with certainty, to miss a floor."""
    least: NDArray[np.float64]
    """Smallest violation that the remaining tasks can leave."""
    most: NDArray[np.float64]
    """Largest violation that the remaining tasks can leave; 0 is certainly feasible."""
    so_far: NDArray[np.float64]
    """Violation of the means over the tasks seen."""


@dataclass(frozen=True, slots=True)
class _Floor:
    value: float
    places: NDArray[np.int64]
    """Places of the source's tasks in the order of the race."""
    above: MeanTests
    below: MeanTests


class FloorTests:
    """The tests of all candidates on all floors. Its race owns and changes it."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        floors: Mapping[str, float],
        num_candidates: int,
        limits: tuple[float, float],
        alpha: float,
    ) -> None:
        """`sources` are by task in the order of the race; `alpha` is per test."""
        low, high = self._limits = limits
        self._floors = []
        for source, value in floors.items():
            places = np.array([i for i, name in enumerate(sources) if name == source], dtype=int)
            shape, size = (num_candidates,), len(places)
            above = MeanTests(shape, size=size, null=value, limits=limits, alpha=alpha)
            below = MeanTests(shape, size=size, null=-value, limits=(-high, -low), alpha=alpha)
            self._floors.append(_Floor(value, places, above, below))
        self._known = np.full(num_candidates, np.nan)

    def know(self, row: int, *, violation: float) -> None:
        """Set a candidate's violation on all tasks, known before the race."""
        self._known[row] = violation

    def see(self, rewards: NDArray[np.float64], *, rows: NDArray[np.int64], first: int) -> None:
        """Test rewards [rows, K] on the tasks from `first` on, which these rows see next."""
        last = first + rewards.shape[1]
        for floor in self._floors:
            start, stop = np.searchsorted(floor.places, (first, last))
            values = rewards[:, floor.places[start:stop] - first].T
            floor.above.see(values, first=int(start), where=(rows,))
            floor.below.see(-values, first=int(start), where=(rows,))

    def standing(self, num_seen: NDArray[np.int64]) -> Standing:
        """Return the bounds, given how many tasks each candidate has seen."""
        low, high = self._limits
        is_feasible = np.ones(len(num_seen), dtype=bool)
        is_infeasible = np.zeros(len(num_seen), dtype=bool)
        least, most, so_far = np.zeros((3, len(num_seen)))
        for floor in self._floors:
            size, seen = len(floor.places), np.searchsorted(floor.places, num_seen)
            sums, left = floor.above.sums, size - seen
            is_feasible &= floor.above.is_proven
            is_infeasible |= floor.below.is_proven
            least += np.maximum(0.0, floor.value - (sums + high * left) / size)
            most += np.maximum(0.0, floor.value - (sums + low * left) / size)
            mean = np.divide(sums, seen, out=np.full(len(seen), floor.value), where=seen > 0)
            so_far += np.maximum(0.0, floor.value - mean)
        rounding = TOLERANCE * (high - low)
        for bound in (least, most, so_far):
            bound[bound <= rounding] = 0.0
        is_known = ~np.isnan(self._known)
        for bound in (least, most, so_far):
            bound[is_known] = self._known[is_known]
        return Standing(
            is_feasible=np.where(is_known, self._known == 0.0, is_feasible),
            is_infeasible=np.where(is_known, self._known > 0.0, is_infeasible),
            least=least,
            most=most,
            so_far=so_far,
        )


def violation_of(rewards: Iterable[tuple[str, float]], floors: Mapping[str, float]) -> float:
    """Return the violation as in `fitness_of`; `rewards` are (source, reward) of all tasks."""
    values: dict[str, list[float]] = {source: [] for source in floors}
    for source, reward in rewards:
        if source in values:
            values[source].append(reward)
    return math.fsum(
        max(0.0, floor - sum(values[source]) / len(values[source]))
        for source, floor in floors.items()
    )


Array = NDArray[np.float64]

Merit = Literal["certainty", "log_certainty", "mixed", "reward"]
"""Merit that candidates are compared by: probability of the right choice, its logarithm, the reward
alone, or the mean of the three (`mixed`). A task without choices always counts by its reward."""

MIXED: tuple[Merit, ...] = ("certainty", "log_certainty", "reward")
"""If certainty says little, as for founders that are sure of wrong references, the reward still
counts; otherwise certainty makes up two thirds."""

SHARPNESS = 3.0
"""Steepness of the reward around its limit, relative to the probability's, in log-odds."""

LOG_SPAN = 4.0
"""Halvings of the probability from a log certainty of 1 to 0, for up to four choices. For more
choices it is twice the halvings of a random guess, as candidates below would all look alike."""


def merits_of(
    rewards: Mapping[str, float],
    certainties: Mapping[str, float],
    *,
    merit: Merit,
    num_choices: Mapping[str, int],
) -> dict[str, float]:
    """Return merits by task id, one per reward. Tasks with a certainty need `num_choices`."""
    known = {task: certainties[task] for task in rewards if task in certainties}
    parts: dict[Merit, Mapping[str, float]] = {
        "reward": rewards,
        "certainty": known,
        "log_certainty": {t: _log_certainty(value, num_choices[t]) for t, value in known.items()},
    }
    names = MIXED if merit == "mixed" else (merit,)
    return {
        **rewards,
        **{t: math.fsum(parts[name][t] for name in names) / len(names) for t in known},
    }


def merits_at(
    certainties: Array, *, merit: Merit, num_choices: Sequence[int], limits: Array
) -> Array:
    """Return the merits of these certainties, [..., tasks]. A task without choices is expected to
    earn its value. A choice is right above its limit, and its reward rises smoothly around it,
    because similar tasks have slightly other limits."""
    spans = np.array([_log_span(num) for num in num_choices])
    beyond = np.minimum(SHARPNESS * (_log_odds(limits) - _log_odds(certainties)), 700.0)
    parts: dict[Merit, Array] = {
        "reward": 1.0 / (1.0 + np.exp(beyond)),
        "certainty": certainties,
        "log_certainty": np.maximum(0.0, 1.0 + np.log2(np.maximum(certainties, 1e-30)) / spans),
    }
    merits = np.mean([parts[name] for name in (MIXED if merit == "mixed" else (merit,))], axis=0)
    mixed: Array = np.where(np.array(num_choices) > 0, merits, certainties)
    return mixed


def _log_odds(probabilities: Array) -> Array:
    near = np.clip(probabilities, 1e-6, 1 - 1e-6)
    odds: Array = np.log(near / (1 - near))
    return odds


def _log_certainty(probability: float, num_choices: int) -> float:
    """Return 1 at certainty, falling to 0 at 2 ** -span and below."""
    if probability <= 0.0:
        return 0.0
    return max(0.0, 1.0 + math.log2(probability) / _log_span(num_choices))


def _log_span(num_choices: int) -> float:
    return max(LOG_SPAN, 2.0 * math.log2(max(num_choices, 1)))


def vote(answers: Sequence[str | None]) -> str | None:
    """Return the most frequent answer, without looking at the reference; best voters come first.

    vote(["7", "12", "12"]) == "12"; vote(["7", "12"]) == "7". Votes are answers as the scorer reads
    them. On a tie the answer with the best first voter wins. None (no answer, or a failed one) does
    not vote; without votes the result is None.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    # Counter keeps the order of first appearance, and max returns the first of equals.
    return max(counts, key=lambda answer: counts[answer], default=None)
