"""CMA-ES over merge coefficients: a candidate is a weighted sum of the founders' deltas, with one
coefficient per founder or, with `unit: block`, one per founder and block of the model.

repeat: points = coefficients from a normal distribution; measure the sums; adapt it
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import ConfigError
from rookery.loops.genome.stages.context import StageContext, Unit, count_blocks, measure_sums
from rookery.search.es import Cmaes, CmaesConfig, average_start, population_size
from rookery.search.fitness import rank_key
from rookery.seeding import stream_seed
from rookery.types import Adapter

__all__ = ["CmaesStage", "run_cmaes"]


class CmaesStage(CmaesConfig, Config):
    """CMA-ES over the founders' coefficients, from the best sum of all founders so far, else from
    their uniform average."""

    type: Literal["cmaes"] = "cmaes"
    generations: int = Field(default=6, ge=1)
    """How many generations the stage has."""
    unit: Unit = "model"
    """What has coefficients of its own: every block of the model, or the model as one."""

    def num_candidates(self, founders: Sequence[Adapter]) -> int:
        """How many it measures, of so many founders and their blocks."""
        num_coefficients = len(founders) * count_blocks(self.unit, founders)
        return self.generations * population_size(self, count=num_coefficients)


async def run_cmaes(config: CmaesStage, context: StageContext) -> list[str]:
    """Search the coefficients of the founders; the last generation is the population."""
    founders = context.builder.founders
    if len(founders) < 2:
        raise ConfigError("The cmaes stage combines founders and needs at least two of them.")
    plain = CmaesConfig.model_validate(config.model_dump(exclude={"type", "generations", "unit"}))
    num_blocks = count_blocks(config.unit, [context.builder.adapter(f) for f in founders])
    search = Cmaes(
        plain,
        seed=stream_seed(context.seed, "cmaes", context.index),
        start=_start(plain, context, num_blocks),
    )
    population: list[str] = []
    for _ in range(config.generations):
        points = await asyncio.to_thread(search.ask)
        fitness = await measure_sums(context, points, stage="cmaes", letter="m", unit=config.unit)
        await asyncio.to_thread(search.tell, list(fitness.values()))
        population = [name for name, own in fitness.items() if not own.is_failed]
    return population


def _start(config: CmaesConfig, context: StageContext, num_blocks: int) -> tuple[float, ...]:
    """The coefficients of the best sum of all founders, in every block the same unless it is one by
    block."""
    num_founders, measured = len(context.builder.founders), context.search.measured
    sums = {
        id: weights
        for id in context.fitness()
        if (weights := context.builder.coefficients(id)) is not None
        and len(weights) in (num_founders, num_founders * num_blocks)
        and measured[id].is_complete
    }
    if not sums:
        return average_start(config, count=num_founders) * num_blocks
    best = sums[max(sums, key=lambda id: rank_key(measured[id].fitness))]
    low = -math.inf if config.low is None else config.low
    high = math.inf if config.high is None else config.high
    start = tuple(min(high, max(low, weight)) for weight in best)
    return start if len(start) == num_founders * num_blocks else start * num_blocks
