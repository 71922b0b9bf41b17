"""Candidates -> fitness. All of a generation are asked together, in one batch.

With racing they are asked block by block, the same tasks for everybody, and those who can no
longer survive are dropped. Members of the population that have seen every task race along for
free: they set the bar. Where the engine computes elsewhere, the first to be made do not wait for
the others: making goes on while they are asked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rookery.errors import AdapterError, TaskError
from rookery.loops.genome.brood import Arrivals, brood
from rookery.loops.genome.nursery import Nursery
from rookery.ports import Adapters
from rookery.rollout import TasksetEvaluator, mean_by_source, together
from rookery.search import racing
from rookery.search.fitness import FAILED, Fitness, fitness_of
from rookery.search.racing import Race, RaceConfig
from rookery.search.streams import stream
from rookery.types import ModelRef, Task

__all__ = ["Measured", "Trials"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One candidate's result on the search split."""

    fitness: Fitness
    rewards: Mapping[str, float]
    """By task id; fewer than all when it was dropped."""
    is_complete: bool
    error: str = ""


class Trials:
    """The search split, and everything measured on it."""

    def __init__(
        self,
        evaluator: TasksetEvaluator,
        *,
        adapters: Adapters,
        nursery: Nursery,
        tasks: Sequence[Task],
        weights: Mapping[str, float],
        race: RaceConfig,
        is_elsewhere: bool = False,
    ) -> None:
        self._evaluator = evaluator
        self._adapters = adapters
        self._nursery = nursery
        self._is_elsewhere = is_elsewhere
        self._tasks = {task.id: task for task in tasks}
        self._weights = dict(weights)
        self._race = race
        self._factors = _contributions(tasks, weights)
        self.floors: dict[str, float] = {}
        """Means that a candidate must not fall below, by source."""
        self.measured: dict[str, Measured] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._errors: dict[str, str] = {}

    async def measure(
        self, candidates: Sequence[str], *, rivals: Sequence[str], seed: int, keep: int
    ) -> dict[str, Measured]:
        """Make and measure the candidates of these names; `keep` of all may survive."""
        async with brood(candidates, nursery=self._nursery, adapters=self._adapters) as arrivals:
            race = await self._run(candidates, arrivals, rivals=rivals, seed=seed, keep=keep)
        return {name: self._conclude(name, race) for name in candidates}

    async def _run(
        self,
        candidates: Sequence[str],
        arrivals: Arrivals,
        *,
        rivals: Sequence[str],
        seed: int,
        keep: int,
    ) -> Race:
        known = {r: self.measured[r].rewards for r in rivals if self.measured[r].is_complete}
        top = max(self._factors.values())
        config = replace_limits(self._race, top=top, keep=keep)
        if not config.enabled:
            config = config.model_copy(update={"block": len(self._tasks)})
        race = racing.start(
            [*known, *candidates], list(self._tasks), config=config, rng=stream(seed, "race")
        )
        while race.asks:
            told: dict[str, list[float] | None] = {
                name: [self._factors[t] * known[name][t] for t in tasks]
                for name, tasks in race.asks.items()
                if name in known
            }
            asked = {name: tasks for name, tasks in race.asks.items() if name in arrivals}
            told |= await self._ask(asked, arrivals)
            race = racing.tell(race, told)
        return race

    async def _ask(
        self, asked: Mapping[str, Sequence[str]], arrivals: Arrivals
    ) -> dict[str, list[float] | None]:
        """Contributions of each candidate on its tasks; None when any of them failed."""
        told: dict[str, list[float] | None] = {}
        # Nearly always all candidates are asked for the same tasks: then this is one batch.
        for tasks in dict.fromkeys(tuple(tasks) for tasks in asked.values()):
            names = [name for name in asked if tuple(asked[name]) == tasks]
            for part in await together(
                self._ask_wave(wave, tasks, arrivals) for wave in self._waves(names, arrivals)
            ):
                told |= part
        return told

    def _waves(self, names: Sequence[str], arrivals: Arrivals) -> list[list[str]]:
        """Who is asked together: all, or those that are there and each of the others by itself."""
        late = [name for name in names if self._is_elsewhere and not arrivals[name].done()]
        there = [name for name in names if name not in late]
        return [wave for wave in (there, *([name] for name in late)) if wave]

    async def _ask_wave(
        self, names: Sequence[str], tasks: Sequence[str], arrivals: Arrivals
    ) -> dict[str, list[float] | None]:
        told: dict[str, list[float] | None] = dict.fromkeys(names)
        refs: dict[str, ModelRef] = {}
        for name in names:
            try:
                refs[name] = await arrivals[name]
            except AdapterError as error:
                self._errors[name] = str(error)
        evaluations = await self._evaluator.evaluate(
            list(refs.values()), [self._tasks[task] for task in tasks]
        )
        for name, evaluation in zip(refs, evaluations, strict=True):
            if evaluation.errors:
                self._errors[name] = next(iter(evaluation.errors.values()))
            else:
                self._rewards.setdefault(name, {}).update(evaluation.rewards)
                told[name] = [self._factors[t] * evaluation.rewards[t] for t in tasks]
        return told

    def means(self, name: str) -> dict[str, float]:
        """A candidate's mean reward by source, of the tasks it saw."""
        return mean_by_source(self.measured[name].rewards, self._tasks.values())

    def _conclude(self, name: str, race: Race) -> Measured:
        rewards = self._rewards.get(name, {})
        if name in self._errors:
            measured = Measured(
                fitness=FAILED, rewards=rewards, is_complete=False, error=self._errors[name]
            )
        else:
            measured = Measured(
                fitness=self._fitness(rewards, race.estimates[name]),
                rewards=rewards,
                is_complete=len(rewards) == len(self._tasks),
            )
        self.measured[name] = measured
        return measured

    def _fitness(self, rewards: Mapping[str, float], estimate: float | None) -> Fitness:
        """From all tasks, or for a dropped candidate from those it saw and the race's estimate."""
        means = mean_by_source(rewards, self._tasks.values())
        if set(means) >= set(self._weights) | set(self.floors):
            fitness = fitness_of(means, weights=self._weights, floors=self.floors)
            if len(rewards) == len(self._tasks) or estimate is None:
                return fitness
            return replace(fitness, score=estimate)
        return Fitness(score=estimate)


def replace_limits(config: RaceConfig, *, top: float, keep: int) -> RaceConfig:
    """The race over contributions: rewards times factors of at most `top`."""
    low, high = min(0.0, config.low * top), max(0.0, config.high * top)
    return config.model_copy(update={"keep": max(config.keep, keep), "low": low, "high": high})


def _contributions(tasks: Sequence[Task], weights: Mapping[str, float]) -> dict[str, float]:
    """Factors by task such that the mean of factor * reward is the weighted mean over sources.

    Two sources of weight 1 with 1 and 3 tasks: factors 2 and 2/3.
    """
    sizes: dict[str, int] = {}
    for task in tasks:
        sizes[task.source] = sizes.get(task.source, 0) + 1
    total = math.fsum(weights[source] for source in sizes)
    if not tasks or total <= 0:
        raise TaskError("The search split holds no tasks of a taskset with a weight above 0.")
    return {
        task.id: weights[task.source] / total * len(tasks) / sizes[task.source] for task in tasks
    }
