"""Genetic search: select, cross over, mutate, measure, keep the survivors.

population = founders
repeat: children = mutate(cross over(select(population))); measure; population = survivors
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from rookery.config import Config, without_removed
from rookery.loops.genome.stages.context import StageContext, num_survivors
from rookery.search import population as ga
from rookery.search.children import ChildrenConfig, CrossoverConfig, MutationConfig
from rookery.search.population import PopulationConfig, random_plans
from rookery.seeding import stream_seed
from rookery.types import Adapter

__all__ = ["GaStage", "RandomStage", "run_ga", "run_random"]


class RandomStage(Config):
    """Sums of the founders with random weights."""

    type: Literal["random"] = "random"
    count: int = Field(default=16, ge=1)
    """Number of sums."""

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """Return the number of measured candidates."""
        return self.count


async def run_random(config: RandomStage, context: StageContext) -> list[str]:
    """Measure the sums. They are the population."""
    founders = context.builder.founders
    generation = len(context.log.generations)
    seed = stream_seed(context.seed, "random stage", context.index)
    plans = [
        replace(plan, id=f"{context.prefix}r{generation:03d}-p{index:02d}", generation=generation)
        for index, plan in enumerate(random_plans(founders, count=config.count, seed=seed))
    ]
    if not await context.has_room(len(plans)):
        return []
    best = context.best()
    fitness = await context.measure(
        plans, rivals=[best] if best else [], keep=num_survivors(len(plans)), stage="random"
    )
    alive = [plan.id for plan in plans if not fitness[plan.id].is_failed]
    context.builder.keep(alive)
    return alive


_CHILDREN = ChildrenConfig(
    count=16,
    operators=(
        CrossoverConfig(name="layers", share=2.0, weights="uniform", num_parents=3),
        CrossoverConfig(name="layers", share=2.0, weights="uniform"),
        CrossoverConfig(name="mixture", share=1.0, weights="uniform"),
        CrossoverConfig(name="sum", share=1.0, weights="free", reach=0.2),
        MutationConfig(name="gaussian", share=0.5, after_crossover=0.0),
    ),
)
"""Layers from single parents keep skills that sums lose. A lone founder needs mutation."""


_ONE_ISLAND = {"num_islands": 1, "interval": 5, "num_migrants": 1}
_REMOVED = {
    "islands": (_ONE_ISLAND, "leave it out, and raise population.size for more variety"),
    "archive": (None, "leave it out, and write floors for tasksets that must not get worse"),
    "archive_parents": (2, "leave it out"),
}


class GaStage(Config):
    """A genetic algorithm."""

    type: Literal["ga"] = "ga"
    generations: int = Field(default=8, ge=1)
    """Number of generations after the founders."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many generations without improvement; null: never."""
    population: PopulationConfig = PopulationConfig(children=_CHILDREN)

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, document: object) -> object:
        return without_removed(document, _REMOVED)

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """Return the maximum number of measured candidates."""
        return self.generations * self.population.children.count

    @property
    def merges(self) -> set[str]:
        operators = self.population.children.operators
        return {o.name for o in operators if isinstance(o, CrossoverConfig)}

    @property
    def mutations(self) -> set[str]:
        operators = self.population.children.operators
        return {o.name for o in operators if isinstance(o, MutationConfig)}


async def run_ga(config: GaStage, context: StageContext) -> list[str]:
    """Evolve from everything measured so far. Returns the final population."""
    settings, seed = config.population, context.seed
    population = ga.make_population(
        context.fitness(), config=settings, seed=seed, prefix=context.prefix
    )
    for _ in range(config.generations):
        if config.patience is not None and population.num_stale >= config.patience:
            break
        plans = ga.ask(population, config=settings, seed=seed)
        if not await context.has_room(len(plans)):
            break
        members = [member.id for member in population.members]
        fitness = await context.measure(plans, rivals=members, keep=settings.size, stage="ga")
        population = ga.tell(population, fitness, config=settings, seed=seed)
        best = [population.best.id] if population.best is not None else []
        context.builder.keep([*(member.id for member in population.members), *best])
    return [member.id for member in population.members if not member.fitness.is_failed]
