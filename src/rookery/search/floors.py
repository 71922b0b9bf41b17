"""Floors in a race: which candidates are proven to keep them, to miss them, and by how much.

    floors = FloorTests(sources, floors={"mmlu": 0.6}, num_candidates=8, limits=(0.0, 1.0),
                        alpha=0.001)
    floors.see(rewards_N_K, rows=rows, first=0)       # the next K tasks of some candidates
    floors.standing(num_seen).is_feasible

A floor holds of the mean over all tasks of its source. Each candidate has two sequential tests per
floor, above it and below it, and the bounds that the remaining tasks leave for certain.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rookery.search.sequential import TOLERANCE, MeanTests

__all__ = ["FloorTests", "Standing", "violation_of"]


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
