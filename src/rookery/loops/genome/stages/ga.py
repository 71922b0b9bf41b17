"""Genetic search: select, cross over, mutate, (move), measure, keep the survivors.

    population = founders
    repeat: children = mutate(cross over(select(population))); measure; population = survivors

Islands search apart and send their best around a ring; an archive keeps the best of every cell of
a grid and sends some of them back as parents.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.loops.genome.stages.context import Emission, StageContext
from rookery.search import archive as grid
from rookery.search import islands as ring
from rookery.search import population as ga
from rookery.search.archive import Archive, ArchiveConfig
from rookery.search.candidate import Candidate
from rookery.search.children import ChildrenConfig, CrossoverConfig, MutationConfig
from rookery.search.fitness import comparable_scores
from rookery.search.islands import Islands, IslandsConfig
from rookery.search.population import Population, PopulationConfig
from rookery.seeding import stream
from rookery.types import Adapter

__all__ = ["GaStage", "run_ga"]

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
"""Parents chosen layer by layer keep what sums of interfering adapters forget; mutation is what a
founder without others has."""


class GaStage(Config):
    """A genetic algorithm."""

    type: Literal["ga"] = "ga"
    generations: int = Field(default=8, ge=1)
    """How many after the founders."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after so many generations without a better best; null never stops early."""
    population: PopulationConfig = PopulationConfig(children=_CHILDREN)
    islands: IslandsConfig = IslandsConfig()
    archive: ArchiveConfig | None = None
    """Quality-diversity: the best of every cell; features are named after tasksets."""
    archive_parents: int = Field(default=2, ge=0)
    """How many of the archive are parents each generation, of a child each, beside the members."""

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """How many it measures at most."""
        moves = self.population.size if self.population.swarm is not None else 0
        each = self.population.children.count + moves
        return self.generations * self.islands.num_islands * each

    @property
    def merges(self) -> set[str]:
        """The merges its operators name."""
        operators = self.population.children.operators
        return {o.name for o in operators if isinstance(o, CrossoverConfig)}

    @property
    def mutations(self) -> set[str]:
        operators = self.population.children.operators
        return {o.name for o in operators if isinstance(o, MutationConfig)}


async def run_ga(config: GaStage, context: StageContext) -> list[str]:
    """Evolve from everything measured so far; the members of all islands at the end."""
    settings = config.population
    populations = _settle(config, context)
    archive = Archive(config=config.archive) if config.archive is not None else None
    emission = Emission(settings.children, context=context, islands=[p.island for p in populations])
    for generation in range(1, config.generations + 1):
        if _is_stale(populations, config.patience):
            break
        emitted = await emission.ask(populations)
        plans = [
            (*ga.ask(p, config=settings, seed=context.seed), *island_emitted)
            for p, island_emitted in zip(populations, emitted, strict=True)
        ]
        # Who survives is decided on each island by itself, and so is who is dropped.
        races = [
            (island, [m.id for m in p.members])
            for p, island in zip(populations, plans, strict=True)
        ]
        fitness = await context.measure_apart(races, keep=settings.size, stage="ga")
        populations = [
            ga.tell(p, {plan.id: fitness[plan.id] for plan in island}, config=settings,
                    seed=context.seed, emitted=island_emitted)
            for p, island, island_emitted in zip(populations, plans, emitted, strict=True)
        ]  # fmt: skip
        await emission.tell(fitness, populations)
        populations = _migrate(populations, config, generation)
        if archive is not None:
            archive = _archive(archive, list(fitness), context)
            populations = _recall(archive, populations, config, context, generation)
        context.builder.keep(emission.references.union(*map(ga.references, populations)))
    return [m.id for p in populations for m in p.members if not m.fitness.is_failed]


def _settle(config: GaStage, context: StageContext) -> list[Population]:
    """One population per island, the candidates so far dealt out in turn."""
    fitness = context.fitness()
    islands = ring.settle(list(fitness), config=config.islands)
    return [
        ga.found(
            {id: fitness[id] for id in members},
            config=config.population,
            seed=context.seed,
            island=context.prefix + (f"i{k}-" if config.islands.num_islands > 1 else ""),
        )
        for k, members in enumerate(islands.members)
    ]


def _is_stale(populations: list[Population], patience: int | None) -> bool:
    return patience is not None and min(p.num_stale for p in populations) >= patience


def _migrate(populations: list[Population], config: GaStage, generation: int) -> list[Population]:
    if not ring.is_due(generation, config=config.islands):
        return populations
    by_id: dict[str, Candidate] = {m.id: m for p in populations for m in p.members}
    scores = dict(zip(by_id, comparable_scores([c.fitness for c in by_id.values()]), strict=True))
    islands = Islands(members=tuple(tuple(m.id for m in p.members) for p in populations))
    moves = ring.migrations(islands, scores, config=config.islands, generation=generation)
    for move in moves:
        newcomers = [by_id[id] for id in move.ids]
        populations[move.target] = ga.immigrate(
            populations[move.target], newcomers, config=config.population
        )
    return populations


def _archive(archive: Archive, ids: list[str], context: StageContext) -> Archive:
    names = {feature.name for feature in archive.config.features}
    rows = []
    for id in ids:
        fitness, means = context.search.measured[id].fitness, context.search.means(id)
        if names <= set(means) and fitness.violation == 0:
            rows.append((id, fitness.score, {name: means[name] for name in names}))
    return grid.extend(archive, rows)[0]


def _recall(
    archive: Archive,
    populations: list[Population],
    config: GaStage,
    context: StageContext,
    generation: int,
) -> list[Population]:
    """Let some of the archive be parents of each population's next generation."""
    recalled = []
    for k, population in enumerate(populations):
        rng = stream(context.seed, "archive", k, generation)
        ids = grid.sample(archive, count=config.archive_parents, rng=rng)
        guests = [
            Candidate(
                id=id,
                generation=population.generation,
                fitness=context.search.measured[id].fitness,
                sigma=config.population.children.sigma.start,
                operator="archive",
            )
            for id in ids
        ]
        recalled.append(ga.invite(population, guests))
    return recalled
