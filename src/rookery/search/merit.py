"""What an answer counts in a search, apart from the reward that is reported of it.

    merits_of({"t1": 1.0, "t2": 0.0}, {"t1": 0.9, "t2": 0.4}, merit="certainty",
              num_choices={"t1": 2, "t2": 2})
        -> {"t1": 0.9, "t2": 0.4}

A reward of 0 or 1 says which choice was the likeliest; the probability of the right one also says
by how much, so that the same answers tell candidates apart with less noise.
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

# Floors in a race: which candidates are proven to keep them, to miss them, and by how much.
#
#     floors = FloorTests(sources, floors={"mmlu": 0.6}, num_candidates=8, limits=(0.0, 1.0),
#                         alpha=0.001)
#     floors.see(rewards_N_K, rows=rows, first=0)       # the next K tasks of some candidates
#     floors.standing(num_seen).is_feasible
#
# A floor holds of the mean over all tasks of its source. Each candidate has two sequential tests
# per floor, above it and below it, and the bounds that the remaining tasks leave for certain.


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known of every candidate's violation on all tasks; arrays over candidates."""

    is_feasible: NDArray[np.bool_]
    """Proven, by a test or for certain, to keep every floor."""
    is_infeasible: NDArray[np.bool_]
    """Proven, by a test or for certain, to miss one."""
    least: NDArray[np.float64]
    """The smallest violation that the remaining tasks can leave."""
    most: NDArray[np.float64]
    """The largest; 0 is feasible for certain."""
    so_far: NDArray[np.float64]
    """Of the means on the tasks seen."""


@dataclass(frozen=True, slots=True)
class _Floor:
    value: float
    places: NDArray[np.int64]
    """Of the source's tasks in the order of the race."""
    above: MeanTests
    below: MeanTests


class FloorTests:
    """The tests of all candidates on all floors. Owned and changed by a race."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        floors: Mapping[str, float],
        num_candidates: int,
        limits: tuple[float, float],
        alpha: float,
    ) -> None:
        """`sources` of the tasks in the order of the race; `alpha` of each single test."""
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
        """The candidate's violation on all tasks is known before the race."""
        self._known[row] = violation

    def see(self, rewards: NDArray[np.float64], *, rows: NDArray[np.int64], first: int) -> None:
        """Rewards [rows, K] on the tasks from `first` on; each row has seen all before it."""
        last = first + rewards.shape[1]
        for floor in self._floors:
            start, stop = np.searchsorted(floor.places, (first, last))
            values = rewards[:, floor.places[start:stop] - first].T
            floor.above.see(values, first=int(start), where=(rows,))
            floor.below.see(-values, first=int(start), where=(rows,))

    def standing(self, num_seen: NDArray[np.int64]) -> Standing:
        """Of candidates that have seen so many tasks each."""
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
    """As `fitness_of` has it; `rewards` are pairs of source and reward, of all tasks."""
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
"""What candidates are compared by: the probability of the right choice, its logarithm, the reward
alone, or the mean of these three. A task without choices counts by its reward in each of them."""

MIXED: tuple[Merit, ...] = ("certainty", "log_certainty", "reward")
"""Where certainty says little, such as of founders that are sure of wrong references, the reward
still counts; where it says much, two thirds are made of it."""

SHARPNESS = 3.0
"""How fast a choice becomes right as its log-odds pass its limit: three times as fast as its
probability."""

LOG_SPAN = 4.0
"""Halvings of the probability from 1 down to a log certainty of 0, of up to four choices. Of more
it is twice as many as a guess among them has: below that all candidates would look alike."""


def merits_of(
    rewards: Mapping[str, float],
    certainties: Mapping[str, float],
    *,
    merit: Merit,
    num_choices: Mapping[str, int],
) -> dict[str, float]:
    """By task id; as many as there are rewards. `num_choices` of each task with a certainty."""
    known = {task: certainties[task] for task in rewards if task in certainties}
    parts: dict[Merit, Mapping[str, float]] = {
        "reward": rewards,
        "certainty": known,
        "log_certainty": {t: _log_certainty(value, num_choices[t]) for t, value in known.items()},
    }
    of = MIXED if merit == "mixed" else (merit,)
    return {**rewards, **{t: math.fsum(parts[name][t] for name in of) / len(of) for t in known}}


def merits_at(
    certainties: Array, *, merit: Merit, num_choices: Sequence[int], limits: Array
) -> Array:
    """The merits of answers that are so certain, [..., tasks]; a task without choices is expected
    to earn as much. A choice is right from its limit on, and its reward rises smoothly around it:
    other tasks of the kind have theirs a little above or below."""
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
    """From 1 at certainty down to 0 at 2 ** -span and below."""
    if probability <= 0.0:
        return 0.0
    return max(0.0, 1.0 + math.log2(probability) / _log_span(num_choices))


def _log_span(num_choices: int) -> float:
    return max(LOG_SPAN, 2.0 * math.log2(max(num_choices, 1)))


# Majority vote over the answers of the best candidates, without looking at the reference.
#
# vote(["7", "12", "12"]) == "12"; vote(["7", "12"]) == "7"


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; `answers` come from the best voter to the worst.

    An answer is what the scorer reads of a text: texts that it reads alike vote together. On a tie
    the answer whose first voter is best wins. None (no answer, or a failed one) does not vote;
    when nobody votes the result is None.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    # Counter keeps the order of first appearance and max returns the first of equals.
    return max(counts, key=lambda answer: counts[answer], default=None)
