"""The interface of a stage to the run: candidates so far, how to make and measure more."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.generation_log import GenerationLog
from rookery.loops.genome.search_evaluator import SearchEvaluator
from rookery.runtime.concurrency import together
from rookery.search.candidate import BY_BLOCK, ChildPlan, EsStep, Fitness, Recipe, rank_key
from rookery.seeding import shuffled, stream, stream_seed
from rookery.types import Adapter
from rookery.weights.merge import adapted_blocks, block_names
from rookery.weights.mutate import spread

__all__ = [
    "Noise",
    "StageContext",
    "Unit",
    "count_blocks",
    "live_coefficients",
    "measure_sums",
    "num_survivors",
]

MOST_SURVIVORS = 64
"""Limit of survivors in a generation of sums. A race compares each candidate with twice as many
rivals, so half of a thousand sums would cost more than their answers."""


def num_survivors(num_candidates: int) -> int:
    """Return how many sums of a generation a race must leave: half of them."""
    return min(max(2, num_candidates // 2), MOST_SURVIVORS)


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise that a population member adds to its centre."""

    seed: int
    amount: float


@dataclass(frozen=True, slots=True)
class StageContext:
    """One stage's view of the run."""

    builder: AdapterBuilder
    search: SearchEvaluator
    log: GenerationLog
    seed: int
    index: int
    """Index of the stage."""
    baselines: frozenset[str] = frozenset()
    """Candidates measured only for comparison. The search does not start from them."""

    @property
    def prefix(self) -> str:
        """Prefix of this stage's candidate ids, which makes them unique among stages."""
        return f"s{self.index}-" if self.index else ""

    def fitness(self) -> dict[str, Fitness]:
        """Return all candidates that the search may start from, in order of measurement."""
        return {n: m.fitness for n, m in self.search.measured.items() if n not in self.baselines}

    def best(self) -> str | None:
        """Return the best of these that saw every task, if any."""
        measured = self.search.measured
        complete = [n for n in self.fitness() if measured[n].is_complete]
        return max(complete, key=lambda n: rank_key(measured[n].fitness), default=None)

    async def spread(self, candidate: str) -> float:
        """Return the spread of the candidate's weights, the unit of ES steps. May make it."""
        return await asyncio.to_thread(lambda: spread(self.builder.adapter(candidate)))

    async def measure(
        self, recipes: Sequence[Recipe], *, rivals: Iterable[str], keep: int, stage: str
    ) -> dict[str, Fitness]:
        """Make the candidates, measure them together and record the generation."""
        number = len(self.log.generations)
        with self.log.phase(f"{stage} {number}") as cost:
            self.builder.plan(recipes)
            measured = await self.search.measure(
                [recipe.id for recipe in recipes],
                rivals=[name for name in rivals if name in self.search.measured],
                seed=stream_seed(self.seed, "race", self.index, number),
                keep=keep,
            )
            self.search.put_last(measured)
            await self.log.record(stage, measured, cost())
        return {name: m.fitness for name, m in measured.items()}

    async def has_room(self, num_candidates: int, *, num_member_answers: int = 0) -> bool:
        """Return True if the budget has room for a generation on all tasks and members' answers."""
        return await self.log.has_room(
            num_candidates,
            num_tasks=len(self.search.tasks),
            num_member_answers=num_member_answers,
        )

    def draw_tasks(self, count: int | None, *, step: int) -> list[str]:
        """Draw one step's tasks: all, or `count` with at least one of every taskset."""
        tasks = self.search.tasks
        if count is None or count >= len(tasks):
            return [task.id for task in tasks]
        order = shuffled(tasks, rng=stream(self.seed, "tasks", self.index, step))
        first = {task.source: task.id for task in reversed(order)}
        chosen = dict.fromkeys([*first.values(), *(task.id for task in order)])
        return list(chosen)[:count]

    async def measure_population(
        self, centre: EsStep, members: Mapping[str, Noise], *, rank: int, tasks: Sequence[str]
    ) -> dict[str, Fitness]:
        """Measure members on these tasks and their centre on all, and record the generation."""
        number = len(self.log.generations)
        with self.log.phase(f"es {number}") as cost:
            self.builder.plan([centre])
            seed = stream_seed(self.seed, "race", self.index, number)
            population = await asyncio.to_thread(self.builder.population, centre.id, rank=rank)
            makers = {
                name: partial(population.member, name, seed=noise.seed, amount=noise.amount)
                for name, noise in members.items()
            }
            at_centre, measured = await together(
                [
                    self.search.measure([centre.id], rivals=[], seed=seed, keep=1),
                    self.search.measure_members(makers, tasks),
                ]
            )
            self.search.put_last(at_centre)
            await self.log.record("es", at_centre, cost(), members=list(measured.values()))
        return {name: candidate.fitness for name, candidate in measured.items()}


Unit = Literal["block", "model"]
"""Part of the model with its own coefficients: each block, or the model as a whole."""


def count_blocks(unit: Unit, founders: Sequence[Adapter]) -> int:
    """Return the number of coefficients per founder."""
    return len(block_names(founders)) if unit == "block" else 1


def live_coefficients(unit: Unit, founders: Sequence[Adapter]) -> tuple[bool, ...]:
    """Return for each coefficient whether it has an effect: a founder may not adapt every block."""
    return adapted_blocks(founders) if unit == "block" else (True,) * len(founders)


async def measure_sums(
    context: StageContext,
    points: Sequence[tuple[float, ...]],
    *,
    stage: Literal["cmaes", "surrogate"],
    letter: str,
    unit: Unit,
) -> dict[str, Fitness]:
    """Measure sums of all founders with these coefficients as one generation, in the order of the
    points. Their names begin with `letter`."""
    generation = len(context.log.generations)
    plans = [
        ChildPlan(
            id=f"{context.prefix}{letter}{generation:03d}-p{index:02d}",
            generation=generation,
            merge=BY_BLOCK if unit == "block" else stage,
            parents=context.builder.founders,
            weights=point,
            mutation=None,
            sigma=0.0,
            seed_key=0,
        )
        for index, point in enumerate(points)
    ]
    best = context.best()
    fitness = await context.measure(
        plans, rivals=[best] if best else [], keep=num_survivors(len(plans)), stage=stage
    )
    context.builder.keep([best] if best else [])
    return {plan.id: fitness[plan.id] for plan in plans}
