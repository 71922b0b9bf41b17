"""Several objectives at once: fronts, crowding, NSGA-II, with constraints by domination.

    fronts(fitnesses)            # [[0, 3], [1], [2]]: nobody in the first is dominated
    nsga2(fitnesses, count=8)    # the survivors
    crowded_scores(fitnesses)    # numbers any selection rule can use

Constraint domination: a feasible candidate dominates an infeasible one; of two infeasible ones
the smaller violation dominates; two feasible ones are compared by their objectives.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rookery.search.fitness import Fitness
from rookery.search.selection.elites import elites

__all__ = ["crowded_scores", "crowding", "dominates", "fronts", "nsga2"]


def dominates(a: Fitness, b: Fitness) -> bool:
    """Whether a is at least as good everywhere and better somewhere. Failed ones lose to all."""
    return len(fronts([a, b])) == 2 and fronts([a, b])[0] == [0]


def fronts(fitnesses: Sequence[Fitness]) -> list[list[int]]:
    """Indices by front, best front first; failed candidates are in the last front.

    Feasible candidates come first, by their objectives; then each violation is a front. O(n log n)
    for n candidates with two objectives; with more, each candidate is also compared with the
    members of a few fronts.
    """
    alive = [index for index, fitness in enumerate(fitnesses) if not fitness.is_failed]
    widths = {len(_vector(fitnesses[index])) for index in alive}
    if len(widths) > 1:
        raise ValueError(
            f"Got candidates with {sorted(widths)} objectives: all need the same ones."
        )
    feasible = [index for index in alive if fitnesses[index].violation == 0]
    found = [[feasible[place] for place in front] for front in _layers(fitnesses, feasible)]
    missing: dict[float, list[int]] = {}
    for index in alive:
        if fitnesses[index].violation > 0:
            missing.setdefault(fitnesses[index].violation, []).append(index)
    failed = [index for index, fitness in enumerate(fitnesses) if fitness.is_failed]
    by_violation = [missing[violation] for violation in sorted(missing)]
    return [*found, *by_violation, *([failed] if failed else [])]


def _layers(fitnesses: Sequence[Fitness], chosen: Sequence[int]) -> list[list[int]]:
    """Fronts of the chosen by their objectives alone, as places among them.

    In falling lexicographic order whoever dominates a candidate comes before it, and who is not
    dominated by a front is not by a later one either: its front is found by bisection.
    """
    if not chosen:
        return []
    values = np.array([_vector(fitnesses[index]) for index in chosen], dtype=np.float64)
    order = np.lexsort(-values.T[::-1]).tolist()
    find = _find_by_last(values) if values.shape[1] <= 2 else _find_by_all(values)
    layers: list[list[int]] = []
    for place in order:
        depth = find(place, layers)
        if depth == len(layers):
            layers.append([])
        layers[depth].append(place)
    return [sorted(layer) for layer in layers]


Find = Callable[[int, list[list[int]]], int]
"""The first of the fronts, none of whose members dominates the candidate at this place."""


def _find_by_last(values: NDArray[np.float64]) -> Find:
    """With one or two objectives only the last of a front matters: none of it is better in the
    second, and all of it is at least as good as the candidate in the first."""
    keys = [(-row[-1], -row[0]) for row in values.tolist()]
    return lambda place, layers: bisect_left(layers, keys[place], key=lambda layer: keys[layer[-1]])


def _find_by_all(values: NDArray[np.float64]) -> Find:
    def find(place: int, layers: list[list[int]]) -> int:
        def is_free(layer: list[int]) -> bool:
            rivals, own = values[layer], values[place]
            return not ((rivals >= own).all(axis=1) & (rivals > own).any(axis=1)).any()

        return bisect_left(layers, True, key=is_free)

    return find


def crowding(objectives: NDArray[np.float64]) -> NDArray[np.float64]:
    """Crowding distance of each row of one front [n, m]; infinite at the ends of an objective.

    An objective on which all rows are equal says nothing and adds nothing.
    """
    distance = np.zeros(len(objectives))
    for column in objectives.T:
        order = np.argsort(column, kind="stable")
        values = column[order]
        # Halves keep the span of the largest floats finite.
        span = values[-1] / 2 - values[0] / 2
        if span == 0:
            continue
        gaps = values[2:] / 2 - values[:-2] / 2
        distance[order[1:-1]] += gaps / span
        distance[order[[0, -1]]] = np.inf
    return distance


def crowded_scores(fitnesses: Sequence[Fitness]) -> list[float | None]:
    """Scores in NSGA-II's order: front first, then crowding; None for failed candidates.

    Selection by tournament of size 2 on these is NSGA-II's binary tournament.
    """
    keys: dict[int, tuple[int, float]] = {}
    for depth, front in enumerate(fronts(fitnesses)):
        alive = [index for index in front if not fitnesses[index].is_failed]
        if alive:
            distances = crowding(np.array([_vector(fitnesses[index]) for index in alive]))
            pairs = zip(alive, distances, strict=True)
            keys.update({index: (-depth, float(distance)) for index, distance in pairs})
    places = {key: float(place) for place, key in enumerate(sorted(set(keys.values())))}
    return [places[keys[index]] if index in keys else None for index in range(len(fitnesses))]


def nsga2(fitnesses: Sequence[Fitness], *, count: int) -> tuple[int, ...]:
    """The survivors: whole fronts while they fit, then the least crowded of the next one."""
    return elites(crowded_scores(fitnesses), count=count)


def _vector(fitness: Fitness) -> tuple[float, ...]:
    assert fitness.score is not None
    return fitness.objectives or (fitness.score,)
