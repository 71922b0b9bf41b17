"""CMA-ES over merge coefficients: a candidate is a weighted sum of the founders' deltas.

repeat: points = coefficients from a normal distribution; measure the sums; adapt it
"""

from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import ConfigError
from rookery.loops.genome.stages.context import StageContext
from rookery.search.candidate import ChildPlan
from rookery.search.cmaes import Cmaes, CmaesConfig, average_start
from rookery.seeding import stream_seed

__all__ = ["CmaesStage", "run_cmaes"]


class CmaesStage(CmaesConfig, Config):
    """CMA-ES over one coefficient per founder, from their uniform average."""

    type: Literal["cmaes"] = "cmaes"
    generations: int = Field(default=6, ge=1)

    @property
    def num_candidates(self) -> int:
        """How many it measures, at the library's usual population of eight founders."""
        return self.generations * (self.population or 10)


async def run_cmaes(config: CmaesStage, context: StageContext) -> list[str]:
    """Search the coefficients of the founders; the last generation is the population."""
    founders = context.builder.founders
    if len(founders) < 2:
        raise ConfigError("The cmaes stage combines founders and needs at least two of them.")
    plain = CmaesConfig.model_validate(config.model_dump(exclude={"type", "generations"}))
    search = Cmaes(
        plain,
        seed=stream_seed(context.seed, "cmaes", context.index),
        start=average_start(plain, count=len(founders)),
    )
    population: list[str] = []
    for _ in range(config.generations):
        generation = len(context.log.generations)
        plans = [
            ChildPlan(
                id=f"{context.prefix}m{generation:03d}-p{index:02d}",
                generation=generation,
                merge="sum",
                parents=founders,
                weights=point,
                mutation=None,
                sigma=0.0,
                seed_key=0,
            )
            for index, point in enumerate(search.ask())
        ]
        best = context.best()
        fitness = await context.measure(
            plans, rivals=[best] if best else [], keep=max(2, len(plans) // 2), stage="cmaes"
        )
        search.tell([fitness[plan.id] for plan in plans])
        population = [plan.id for plan in plans if not fitness[plan.id].is_failed]
        context.builder.keep([best] if best else [])
    return population
