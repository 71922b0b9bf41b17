"""Averages of the best so far: one adapter that keeps what several good ones agree on.

best = the candidates so far, best first
measure(average of the first 2, of the first 3, ...)
"""

from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.loops.genome.stages.context import StageContext
from rookery.search.candidate import ChildPlan
from rookery.search.fitness import rank_key

__all__ = ["AverageStage", "run_average"]


class AverageStage(Config):
    """Averages of the best 2, 3, ... candidates that saw every task."""

    type: Literal["average"] = "average"
    most: int = Field(default=5, ge=2)
    """How many the largest of them averages."""

    @property
    def num_candidates(self) -> int:
        """How many it measures at most."""
        return self.most - 1


async def run_average(config: AverageStage, context: StageContext) -> list[str]:
    """Measure the averages; they and what they are made of are the population."""
    measured = context.search.measured
    fitness = context.fitness()
    complete = [name for name in fitness if measured[name].is_complete]
    best = sorted(complete, key=lambda name: rank_key(fitness[name]), reverse=True)[: config.most]
    generation = len(context.log.generations)
    plans = [
        ChildPlan(
            id=f"{context.prefix}m{generation:03d}-average{size}",
            generation=generation,
            merge="linear",
            parents=tuple(best[:size]),
            weights=(1.0 / size,) * size,
            mutation=None,
            sigma=0.0,
            seed_key=0,
        )
        for size in range(2, len(best) + 1)
    ]
    if not plans:
        return best
    found = await context.measure(plans, rivals=best, keep=len(best) + len(plans), stage="average")
    return [*best, *(name for name in found if not found[name].is_failed)]
