"""The emitters of a genetic search, those of every island apart: started, asked and told."""

import asyncio
from collections.abc import Mapping, Sequence

from rookery.loops.genome.stages.context import StageContext
from rookery.search.candidate import Recipe
from rookery.search.children import ChildrenConfig
from rookery.search.emitters import (
    CmaesEmitter,
    CmaesOperatorConfig,
    Emitter,
    EmitterPlace,
    EsEmitter,
    EsOperatorConfig,
)
from rookery.search.fitness import Fitness
from rookery.search.population import Population
from rookery.types import Json

__all__ = ["Emission"]


class Emission:
    """What emitters ask for in one generation after another."""

    def __init__(
        self, config: ChildrenConfig, *, context: StageContext, islands: Sequence[str]
    ) -> None:
        """`islands` are the prefixes of the populations' ids."""
        self._context = context
        self._asked: dict[str, tuple[Recipe, ...]] = {}
        self._emitters: list[dict[str, Emitter]] = []
        """Of each island, by name, in the order of the operators."""
        for island in islands:
            places = [
                EmitterPlace(seed=context.seed, island=island, index=index)
                for index in config.emitted
            ]
            self._emitters.append({at.name: _open(config, context, at) for at in places})

    @property
    def references(self) -> frozenset[str]:
        """Candidates that the next children are made of."""
        emitters = [emitter for island in self._emitters for emitter in island.values()]
        return frozenset(id for emitter in emitters for id in emitter.references)

    async def ask(self, populations: Sequence[Population]) -> list[tuple[Recipe, ...]]:
        """The children for each population; an emitter without a start begins from its best."""
        emitted = []
        for emitters, population in zip(self._emitters, populations, strict=True):
            for name, emitter in emitters.items():
                if isinstance(emitter, EsEmitter) and emitter.needs_start and population.best:
                    start = population.best.id
                    emitter.begin(start, scale=await self._context.spread(start))
                self._asked[name] = emitter.ask(generation=population.generation + 1)
            emitted.append(tuple(plan for name in emitters for plan in self._asked[name]))
        return emitted

    async def tell(self, fitness: Mapping[str, Fitness], populations: Sequence[Population]) -> None:
        """Each emitter is told of its own children; the populations are those after them."""
        states = await asyncio.to_thread(self._tell, fitness, populations)
        if states:
            await self._context.log.record_emitters(states)

    def _tell(
        self, fitness: Mapping[str, Fitness], populations: Sequence[Population]
    ) -> dict[str, Mapping[str, Json]]:
        states: dict[str, Mapping[str, Json]] = {}
        for emitters, population in zip(self._emitters, populations, strict=True):
            best = None if population.best is None else population.best.id
            for name, emitter in emitters.items():
                emitter.tell({p.id: fitness[p.id] for p in self._asked[name]}, best=best)
                states[name] = emitter.state
        return states


def _open(config: ChildrenConfig, context: StageContext, at: EmitterPlace) -> Emitter:
    operator, count = config.operators[at.index], config.emitted[at.index]
    if isinstance(operator, EsOperatorConfig):
        return EsEmitter(operator, count=count, at=at)
    assert isinstance(operator, CmaesOperatorConfig)
    return CmaesEmitter(
        operator,
        count=count,
        at=at,
        founders=context.builder.founders,
        mutation_sigma=config.sigma.start,
    )
