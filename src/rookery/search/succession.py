"""Who lives on, and where the living move: survivors of a pool, and moves of a particle swarm.

    kept = survivors(scores, size=16, config=SurvivalConfig(), rng=rng)
    plans = plan_moves(members, config=SwarmConfig(), at=swarm_state, seed=7)

A move is a plan like any other: a linear combination of named candidates, under a new id, to be
evaluated anew.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from rookery.config import Config
from rookery.search.candidate import Candidate, ChildPlan, ParticleState
from rookery.search.fitness import Fitness, rank_key
from rookery.search.selection import SelectionConfig, elites, select
from rookery.seeding import stream, stream_seed

__all__ = [
    "SurvivalConfig",
    "SwarmConfig",
    "SwarmState",
    "next_particle_state",
    "plan_moves",
    "step_length",
    "survivors",
]


class SurvivalConfig(Config):
    """Who survives of parents and children together."""

    num_elites: int = Field(default=1, ge=1)
    """The best so many always survive."""
    rule: SelectionConfig | None = None
    """Who fills the places after the elites; null takes the next best."""


class SwarmConfig(Config):
    """Particle-style moves. Each pull is multiplied by a fresh random number, then all four are
    divided by their sum."""

    inertia: float = Field(default=0.2, ge=0.0)
    """Weight of going on in the direction of the last move."""
    own_best: float = Field(default=0.2, ge=0.0)
    """Pull to the candidate's own best place."""
    global_best: float = Field(default=0.2, ge=0.0)
    """Pull to the best candidate seen."""
    global_worst: float = Field(default=0.1, ge=0.0)
    """Push away from the worst candidate seen."""
    step: float = Field(default=0.5, gt=0.0)
    """Length of the steps of the first generation."""
    decay: float = Field(default=0.95, gt=0.0, le=1.0)
    """The step shrinks by this factor each generation."""
    min_step: float = Field(default=0.1, ge=0.0)
    """It does not shrink below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmState:
    """What all moves of one generation have in common."""

    generation: int
    """The generation that the moves lead into, from 1."""
    best: str
    """Id of the best candidate seen."""
    worst: str
    """Id of the worst one seen that did not fail."""
    prefix: str = ""
    """Put before the ids of plans, to tell islands apart."""


def survivors(
    scores: Sequence[float | None],
    *,
    size: int,
    config: SurvivalConfig,
    rng: np.random.Generator,
) -> tuple[int, ...]:
    """Indices of those who live on: the elites, best first, then by the rule.

    Failed candidates do not survive, unless all failed; then the pool is taken as all equal.
    Fewer than `size` survive when fewer are alive.
    """
    kept = elites(scores, count=min(config.num_elites, size))
    alive = [index for index, score in enumerate(scores) if score is not None]
    rest = [index for index in alive or range(len(scores)) if index not in set(kept)]
    values = [scores[index] for index in rest]
    count = min(size - len(kept), len(rest))
    if count == 0:
        return kept
    if config.rule is None:
        chosen = elites(values, count=count)
    else:
        chosen = select(config.rule, values, count=count, rng=rng, distinct=True)
    return (*kept, *(rest[index] for index in chosen))


def step_length(config: SwarmConfig, *, generation: int) -> float:
    """The step of moves into this generation: once per generation, however many move."""
    shrunk = config.step * math.prod([config.decay] * (generation - 1))
    return max(config.min_step, shrunk)


def plan_moves(
    members: Sequence[Candidate], *, config: SwarmConfig, at: SwarmState, seed: int
) -> tuple[ChildPlan, ...]:
    """The next place of every member that did not fail and has somewhere to go.

    x' = x + step / C * [inertia v + own (p - x) + best (g - x) - worst (w - x)], each coefficient
    times its own random number, C their sum. Written out as weights of ids they sum to 1.
    """
    step = step_length(config, generation=at.generation)
    plans = []
    for index, member in enumerate(members):
        if member.fitness.is_failed:
            continue
        weights = _weights(member, config=config, at=at, step=step, seed=seed)
        if set(weights) == {member.id}:
            continue
        name = f"{at.prefix}g{at.generation:03d}-m{index:02d}"
        plans.append(
            ChildPlan(
                id=name,
                generation=at.generation,
                merge="move",
                parents=tuple(weights),
                weights=tuple(weights.values()),
                mutation=None,
                sigma=member.sigma,
                seed_key=stream_seed(seed, "plan", name),
                moved_from=member.id,
                step=step,
            )
        )
    return tuple(plans)


def next_particle_state(source: Candidate, plan: ChildPlan, *, fitness: Fitness) -> ParticleState:
    """What the moved candidate remembers; its own best is the better of here and before."""
    best, best_fitness = source.id, source.fitness
    if source.particle is not None and rank_key(source.particle.best_fitness) > rank_key(
        best_fitness
    ):
        best, best_fitness = source.particle.best, source.particle.best_fitness
    if rank_key(fitness) > rank_key(best_fitness):
        best, best_fitness = plan.id, fitness
    return ParticleState(best=best, best_fitness=best_fitness, previous=source.id, step=plan.step)


def _weights(
    member: Candidate, *, config: SwarmConfig, at: SwarmState, step: float, seed: int
) -> dict[str, float]:
    """The weight of every id in the new place; the member's own comes first."""
    rng = stream(seed, "move", at.prefix, at.generation, member.id)
    pulls = (config.inertia, config.own_best, config.global_best, config.global_worst)
    inertia, own, best, worst = (pull * float(rng.random()) for pull in pulls)
    total = (inertia + own + best + worst) or 1.0
    terms = [(own, _own_best(member)), (best, at.best), (-worst, at.worst)]
    if member.particle is not None:
        terms.append((-inertia / member.particle.step, member.particle.previous))
    weights = {member.id: 1.0}
    for coefficient, target in terms:
        pull = step * coefficient / total
        weights[target] = weights.get(target, 0.0) + pull
        weights[member.id] -= pull
    return {id: weight for id, weight in weights.items() if weight != 0 or id == member.id}


def _own_best(member: Candidate) -> str:
    return member.id if member.particle is None else member.particle.best
