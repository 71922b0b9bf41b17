"""What every stage is handed: the candidates so far, how to make more, how to measure them."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rookery.concurrency import together
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.generation_log import GenerationLog
from rookery.loops.genome.search_evaluator import Measured, SearchEvaluator
from rookery.search.candidate import Recipe
from rookery.search.fitness import Fitness, rank_key
from rookery.seeding import stream_seed
from rookery.weights.perturb import spread

__all__ = ["StageContext", "num_survivors"]

MOST_SURVIVORS = 64
"""Of a generation of sums: a race compares every candidate with twice as many rivals, and a
thousand sums of which half survive would cost more than their answers."""


def num_survivors(num_candidates: int) -> int:
    """How many of the sums of one generation a race must leave: half of them."""
    return min(max(2, num_candidates // 2), MOST_SURVIVORS)


@dataclass(frozen=True, slots=True)
class StageContext:
    """One stage's view of the run."""

    builder: AdapterBuilder
    search: SearchEvaluator
    log: GenerationLog
    seed: int
    index: int
    """Place of the stage among the stages."""
    baselines: frozenset[str] = frozenset()
    """Candidates that were measured to compare with and that the search does not start from."""

    @property
    def prefix(self) -> str:
        """Begins the ids of this stage's candidates, so that two stages never share one."""
        return f"s{self.index}-" if self.index else ""

    def fitness(self) -> dict[str, Fitness]:
        """Everything the search may start from, in the order of measurement."""
        return {n: m.fitness for n, m in self.search.measured.items() if n not in self.baselines}

    def best(self) -> str | None:
        """The best of these that saw every task; None when there is none."""
        measured = self.search.measured
        complete = [n for n in self.fitness() if measured[n].is_complete]
        return max(complete, key=lambda n: rank_key(measured[n].fitness), default=None)

    async def spread(self, candidate: str) -> float:
        """The size of its numbers, which the steps of an ES are relative to. May make it."""
        return await asyncio.to_thread(lambda: spread(self.builder.adapter(candidate)))

    async def measure(
        self, recipes: Sequence[Recipe], *, rivals: Iterable[str], keep: int, stage: str
    ) -> dict[str, Fitness]:
        """Make the candidates, measure them together and record the generation."""
        return await self.measure_apart([(recipes, rivals)], keep=keep, stage=stage)

    async def measure_apart(
        self, races: Sequence[tuple[Sequence[Recipe], Iterable[str]]], *, keep: int, stage: str
    ) -> dict[str, Fitness]:
        """The same for candidates that race apart, each list against its own rivals: `keep` of
        each may survive. They are asked at the same time and recorded as one generation."""
        number = len(self.log.generations)
        with self.log.phase(f"{stage} {number}") as cost:
            measured: dict[str, Measured] = {}
            for part in await together(
                self._race(recipes, rivals, keep=keep, key=(number, *([k] if k else ())))
                for k, (recipes, rivals) in enumerate(races)
            ):
                measured |= part
            self.search.put_last(measured)
            await self.log.record(stage, measured, cost())
        return {name: m.fitness for name, m in measured.items()}

    async def _race(
        self, recipes: Sequence[Recipe], rivals: Iterable[str], *, keep: int, key: tuple[int, ...]
    ) -> dict[str, Measured]:
        self.builder.plan(recipes)
        known = [name for name in rivals if name in self.search.measured]
        return await self.search.measure(
            [recipe.id for recipe in recipes],
            rivals=known,
            seed=stream_seed(self.seed, "race", self.index, *key),
            keep=keep,
        )
