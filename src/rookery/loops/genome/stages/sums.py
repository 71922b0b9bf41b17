"""What the stages that search coefficients share: sums of all founders, as a whole or by block."""

from collections.abc import Sequence
from typing import Literal

from rookery.loops.genome.stages.context import StageContext, num_survivors
from rookery.search.candidate import BY_BLOCK, ChildPlan
from rookery.search.fitness import Fitness
from rookery.types import Adapter
from rookery.weights.merge import adapted_blocks, block_names

__all__ = ["Unit", "count_blocks", "live_coefficients", "measure_sums"]

Unit = Literal["block", "model"]
"""What has coefficients of its own: every block of the model, or the model as one."""


def count_blocks(unit: Unit, founders: Sequence[Adapter]) -> int:
    """How many times each founder has a coefficient."""
    return len(block_names(founders)) if unit == "block" else 1


def live_coefficients(unit: Unit, founders: Sequence[Adapter]) -> tuple[bool, ...]:
    """Of each coefficient whether it changes anything: a founder may not adapt every block."""
    return adapted_blocks(founders) if unit == "block" else (True,) * len(founders)


async def measure_sums(
    context: StageContext,
    points: Sequence[tuple[float, ...]],
    *,
    stage: Literal["cmaes", "surrogate"],
    letter: str,
    unit: Unit,
) -> dict[str, Fitness]:
    """Measure the sums of these coefficients as one generation; by name, in the order of the
    points. Names begin with the letter."""
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
