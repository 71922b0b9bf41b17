"""Evolution strategy over the numbers of one adapter: try directions forth and back, step.

    centre = best so far
    repeat: trials = centre ± sigma * noise(seed); measure; centre += sum of weighted noise

Directions are seeds. Only the current centre is kept as tensors: the next one is that plus one
update, a trial is that plus one noise, and any of them can be made again from the recipes.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import TaskError
from rookery.loops.genome.stages.context import StageContext
from rookery.search import es as strategy
from rookery.search.candidate import EsStep
from rookery.search.es import Es, EsConfig
from rookery.seeding import stream_seed
from rookery.types import Adapter

__all__ = ["EsStage", "run_es"]


class EsStage(EsConfig, Config):
    """Evolution strategy from the best candidate so far; sigma is relative to its numbers."""

    type: Literal["es"] = "es"
    steps: int = Field(default=5, ge=1)
    """Updates of the centre."""

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """How many it measures: trials and centres."""
        return self.steps * (2 * self.num_pairs + 1) + 1


async def run_es(config: EsStage, context: StageContext) -> list[str]:
    """Climb from the best candidate; the last centre is the population."""
    start = context.best()
    if start is None:
        raise TaskError("The es stage has no candidate to start from: every evaluation failed.")
    scale = await context.spread(start)
    plain = EsConfig.model_validate(config.model_dump(exclude={"type", "steps"}))
    es = Es(config=plain, seed=stream_seed(context.seed, "es", context.index))
    centre = _es_step(context, "e000-centre", start, terms=(), is_chained=False)
    for _ in range(config.steps):
        trials = strategy.ask(es)
        recipes = [
            _es_step(
                context,
                trial.id,
                centre.id,
                terms=[(trial.seed, trial.sign * plain.sigma * scale)],
            )
            for trial in trials
        ]
        fitness = await context.measure(
            [*recipes, centre], rivals=[start], keep=len(recipes) + 2, stage="es"
        )
        context.builder.keep([start, centre.id])
        es = strategy.tell(es, {trial.id: fitness[context.prefix + trial.id] for trial in trials})
        terms = [(term.seed, term.weight * scale) for term in es.updates[-1]]
        centre = _es_step(context, f"e{es.generation:03d}-centre", centre.id, terms=terms)
    last = await context.measure([centre], rivals=[start], keep=2, stage="es")
    return [start] if last[centre.id].is_failed else [centre.id]


def _es_step(
    context: StageContext,
    name: str,
    parent: str,
    *,
    terms: Sequence[tuple[int, float]],
    is_chained: bool = True,
) -> EsStep:
    """The parent plus the terms, each a seed and how much of its noise."""
    return EsStep(
        id=context.prefix + name,
        generation=len(context.log.generations),
        parent=parent,
        seeds=tuple(seed for seed, _ in terms),
        amounts=tuple(amount for _, amount in terms),
        is_chained=is_chained,
    )
