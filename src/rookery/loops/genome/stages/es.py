"""Evolution strategy over the numbers of one adapter: try directions forth and back, step.

    centre = best so far
    repeat: trials = centre ± sigma * noise(seed); measure; centre += sum of weighted noise

Directions are seeds: no tensor is stored, and every centre can be made again from its recipe.
"""

from typing import Literal

import torch
from pydantic import Field

from rookery.config import Config
from rookery.errors import TaskError
from rookery.loops.genome.nursery import Drift
from rookery.loops.genome.stages.context import StageContext
from rookery.search import es as strategy
from rookery.search.es import Es, EsConfig
from rookery.search.streams import stream_seed
from rookery.types import Adapter

__all__ = ["EsStage", "run_es"]


class EsStage(EsConfig, Config):
    """Evolution strategy from the best candidate so far; sigma is relative to its numbers."""

    type: Literal["es"] = "es"
    steps: int = Field(default=5, ge=1)
    """Updates of the centre."""

    @property
    def num_candidates(self) -> int:
        """How many it measures: trials and centres."""
        return self.steps * (2 * self.num_pairs + 1) + 1


async def run_es(config: EsStage, context: StageContext) -> list[str]:
    """Climb from the best candidate; the last centre is the population."""
    start = context.best()
    if start is None:
        raise TaskError("The es stage has no candidate to start from: every evaluation failed.")
    scale = _spread(context.nursery.adapter(start))
    plain = EsConfig.model_validate(config.model_dump(exclude={"type", "steps"}))
    es = Es(config=plain, seed=stream_seed(context.seed, "es", context.index))
    for _ in range(config.steps):
        trials = strategy.ask(es)
        recipes = [
            _drift(context, es, start, scale, trial.id, trial.seed, trial.sign) for trial in trials
        ]
        centre = _drift(context, es, start, scale, f"e{es.generation:03d}-centre", 0, 0)
        fitness = await context.measure(
            [*recipes, centre], rivals=[start], keep=len(recipes) + 2, stage="es"
        )
        told = {trial.id: fitness[context.prefix + trial.id] for trial in trials}
        es = strategy.tell(es, told)
        context.nursery.keep([start])
    last = _drift(context, es, start, scale, f"e{es.generation:03d}-centre", 0, 0)
    fitness = await context.measure([last], rivals=[start], keep=2, stage="es")
    return [start] if fitness[last.id].is_failed else [last.id]


def _drift(
    context: StageContext, es: Es, start: str, scale: float, name: str, seed: int, sign: int
) -> Drift:
    """The start plus all updates so far, plus one trial step if `sign` is not 0."""
    terms = [(term.seed, term.weight * scale) for update in es.updates for term in update]
    if sign:
        terms.append((seed, sign * es.config.sigma * scale))
    return Drift(
        id=context.prefix + name,
        generation=len(context.log.generations),
        parent=start,
        seeds=tuple(seed for seed, _ in terms),
        amounts=tuple(amount for _, amount in terms),
    )


def _spread(adapter: Adapter) -> float:
    """Root mean square of all numbers of an adapter; 1 / 100 when they are all zero."""
    tensors = [t for f in adapter.factors.values() for t in (f.a, f.b)]
    total = sum(float(t.double().square().sum()) for t in tensors)
    size = sum(t.numel() for t in tensors)
    return float(torch.tensor(total / size).sqrt()) or 0.01
