"""Evolution strategies: over the weights of one adapter, and over merge coefficients.

    centre = best so far
    repeat: trials = centre ± sigma * noise(seed); measure; centre += sum of weighted noise

Directions are seeds. Only the current centre is kept as tensors. The next one is that plus an
update, a trial is that plus one noise, and all can be made again from their recipes.

With a `rank`, trials are members of a population: low-rank noise, made from its seed on the server,
so that hundreds cost servers no more than one. A member serves only to compute the next centre.

CMA-ES searches merge coefficients: a candidate is a weighted sum of the founders' deltas, with one
coefficient per founder or, with `unit: block`, per founder and block of the model.

    repeat: points = coefficients from a normal distribution; measure the sums; adapt it
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import ConfigError, TaskError
from rookery.loops.genome.stages.context import (
    Noise,
    StageContext,
    Unit,
    count_blocks,
    measure_sums,
)
from rookery.search import es as strategy
from rookery.search.candidate import EsStep, Fitness, rank_key
from rookery.search.es import Cmaes, CmaesConfig, Es, EsConfig, average_start, population_size
from rookery.seeding import stream_seed
from rookery.types import Adapter

__all__ = ["CmaesStage", "EsStage", "run_cmaes", "run_es"]


class EsStage(EsConfig, Config):
    """Evolution strategy from the best candidate. sigma is relative to the size of its weights."""

    type: Literal["es"] = "es"
    steps: int = Field(default=5, ge=1)
    """Number of updates of the centre."""
    population: int | None = Field(default=None, ge=2)
    """Trials per step, in mirrored pairs. Sets num_pairs to half of it."""
    rank: int | None = Field(default=None, ge=1)
    """Rank of the noise in each factor of an adapter. Servers then make the members from seeds.
    null: independent noise in every weight; trials are made here one by one, and are candidates."""
    tasks_per_step: int | None = Field(default=None, ge=1)
    """Search tasks drawn per step, for all its members; null: all tasks. Requires a rank."""

    @model_validator(mode="after")
    def _read_population(self) -> Self:
        size = self.population
        if size is None:
            return self
        if size % 2:
            raise ValueError(
                f"population is {size}, and members come in mirrored pairs: write an even number, "
                f"such as {size + 1}."
            )
        if "num_pairs" in self.model_fields_set and self.num_pairs != size // 2:
            raise ValueError(
                f"population is {size} and num_pairs is {self.num_pairs}; the first is twice "
                "the second: write one of them."
            )
        object.__setattr__(self, "num_pairs", size // 2)  # the model is frozen
        return self

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if self.tasks_per_step is not None and self.rank is None:
            raise ValueError(
                f"tasks_per_step is {self.tasks_per_step}, and without a rank every trial is a "
                "candidate that sees all tasks: write rank: 1 besides, or leave it out."
            )
        return self

    def num_candidates(self, founders: Sequence[Adapter]) -> int:  # noqa: ARG002
        """Return the number of measured trials and centres."""
        return self.steps * (2 * self.num_pairs + 1) + 1


async def run_es(config: EsStage, context: StageContext) -> list[str]:
    """Climb from the best candidate. The last centre is the population."""
    start = context.best()
    if start is None:
        raise TaskError("The es stage has no candidate to start from: every evaluation failed.")
    scale = await context.spread(start)
    plain = EsConfig.model_validate(config.model_dump(include=set(EsConfig.model_fields)))
    es = Es(config=plain, seed=stream_seed(context.seed, "es", context.index))
    first = f"{context.prefix}e000-centre"
    step = _es_step(context, first, start, terms=(), rank=config.rank, is_chained=False)
    for _ in range(config.steps):
        if not await _has_room(config, context):
            break
        trials = {
            context.prefix + trial.id: Noise(trial.seed, trial.sign * config.sigma * scale)
            for trial in strategy.ask(es)
        }
        if config.rank is None:
            fitness = await _measure_trials(context, step, trials, start=start)
        else:
            tasks = context.draw_tasks(config.tasks_per_step, step=es.generation)
            fitness = await context.measure_population(step, trials, rank=config.rank, tasks=tasks)
        context.builder.keep([start, step.id])
        fitness_by_trial = {name.removeprefix(context.prefix): fitness[name] for name in trials}
        es = strategy.tell(es, fitness_by_trial)
        terms = [Noise(term.seed, term.weight * scale) for term in es.updates[-1]]
        name = f"{context.prefix}e{es.generation:03d}-centre"
        step = _es_step(context, name, step.id, terms=terms, rank=config.rank)
    last = await context.measure([step], rivals=[start], keep=2, stage="es")
    return [start] if last[step.id].is_failed else [step.id]


async def _has_room(config: EsStage, context: StageContext) -> bool:
    """Return True if the budget has room for a step's trials, their centre and the last centre."""
    num_trials = 2 * config.num_pairs
    if config.rank is None:
        return await context.has_room(num_trials + 2)
    num_tasks = len(context.draw_tasks(config.tasks_per_step, step=0))
    return await context.has_room(2, num_member_answers=num_trials * num_tasks)


async def _measure_trials(
    context: StageContext, centre: EsStep, trials: Mapping[str, Noise], *, start: str
) -> dict[str, Fitness]:
    """Measure trials as candidates, together with their centre."""
    recipes = [_es_step(context, name, centre.id, terms=[noise]) for name, noise in trials.items()]
    return await context.measure(
        [*recipes, centre], rivals=[start], keep=len(recipes) + 2, stage="es"
    )


def _es_step(
    context: StageContext,
    name: str,
    parent: str,
    *,
    terms: Sequence[Noise],
    rank: int | None = None,
    is_chained: bool = True,
) -> EsStep:
    return EsStep(
        id=name,
        generation=len(context.log.generations),
        parent=parent,
        seeds=tuple(term.seed for term in terms),
        amounts=tuple(term.amount for term in terms),
        is_chained=is_chained,
        rank=rank,
    )


class CmaesStage(CmaesConfig, Config):
    """CMA-ES over the founders' coefficients, from the best sum of all, else their average."""

    type: Literal["cmaes"] = "cmaes"
    generations: int = Field(default=6, ge=1)
    """Number of generations."""
    unit: Unit = "model"
    """Part of the model with its own coefficients: each block, or the model as a whole."""

    def num_candidates(self, founders: Sequence[Adapter]) -> int:
        """Return the number of measured candidates, for this number of founders and blocks."""
        num_coefficients = len(founders) * count_blocks(self.unit, founders)
        return self.generations * population_size(self, count=num_coefficients)


async def run_cmaes(config: CmaesStage, context: StageContext) -> list[str]:
    """Search the founders' coefficients. The last generation is the population."""
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
        if not await context.has_room(len(points)):
            break
        fitness = await measure_sums(context, points, stage="cmaes", letter="m", unit=config.unit)
        await asyncio.to_thread(search.tell, list(fitness.values()))
        population = [name for name, member in fitness.items() if not member.is_failed]
    return population


def _start(config: CmaesConfig, context: StageContext, num_blocks: int) -> tuple[float, ...]:
    """Return the coefficients of the best sum of all founders, repeated per block if needed."""
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
