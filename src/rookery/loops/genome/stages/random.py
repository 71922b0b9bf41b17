"""Random sums of all founders, measured once: more to start from than the founders themselves.

stages: [{type: random, count: 20}, {type: ga, generations: 3}]

A generation of a genetic search combines a few parents, and adapters of tasks that do not disturb
one another are best as a sum of all. A single founder is tried in other strengths.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.loops.genome.stages.context import StageContext, num_survivors
from rookery.search.founders import random_plans
from rookery.seeding import stream_seed
from rookery.types import Adapter

__all__ = ["RandomStage", "run_random"]


class RandomStage(Config):
    """Sums of the founders with random weights, as random search draws them."""

    type: Literal["random"] = "random"
    count: int = Field(default=16, ge=1)
    """How many."""

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """How many it measures."""
        return self.count


async def run_random(config: RandomStage, context: StageContext) -> list[str]:
    """Measure the sums; they are the population."""
    founders = context.builder.founders
    generation = len(context.log.generations)
    seed = stream_seed(context.seed, "random stage", context.index)
    plans = [
        replace(plan, id=f"{context.prefix}r{generation:03d}-p{index:02d}", generation=generation)
        for index, plan in enumerate(random_plans(founders, count=config.count, seed=seed))
    ]
    best = context.best()
    fitness = await context.measure(
        plans, rivals=[best] if best else [], keep=num_survivors(len(plans)), stage="random"
    )
    alive = [plan.id for plan in plans if not fitness[plan.id].is_failed]
    context.builder.keep(alive)
    return alive
