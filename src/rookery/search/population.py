"""One generation of a population as a pure plan: ask for children, tell their fitness.

    population = found(fitness_by_id, config=config, seed=seed)
    while population.generation < 10:
        plans = ask(population, config=config, seed=seed)
        fitness = evaluate(carry_out(plans))             # every plan's id -> Fitness
        population = tell(population, fitness, config=config, seed=seed)
    population.best

What is asked follows from (population, config, seed) alone, so `tell` asks again instead of
remembering: a population saved after any generation goes on as if it had never stopped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search.archive import crowded_scores
from rookery.search.candidate import Candidate, ChildPlan, ParticleState, Recipe
from rookery.search.children import Birth, ChildrenConfig, plan_children
from rookery.search.fitness import Fitness, comparable_scores, rank_key
from rookery.search.selection import SelectionConfig, elites, select
from rookery.seeding import stream, stream_seed

__all__ = [
    "Mark",
    "Population",
    "PopulationConfig",
    "SurvivalConfig",
    "SwarmConfig",
    "SwarmState",
    "ask",
    "found",
    "immigrate",
    "invite",
    "next_particle_state",
    "plan_moves",
    "references",
    "step_length",
    "survivors",
    "tell",
]

# Who lives on, and where the living move: survivors of a pool, and moves of a particle swarm.
#
#     kept = survivors(scores, size=16, config=SurvivalConfig(), rng=rng)
#     plans = plan_moves(members, config=SwarmConfig(), at=swarm_state, seed=7)
#
# A move is a plan like any other: a linear combination of named candidates, under a new id, to be
# evaluated anew.


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


class PopulationConfig(Config):
    """How a population makes its next generation."""

    size: int = Field(default=16, ge=1)
    """How many candidates live at a time."""
    objective: Literal["pareto", "score"] = "score"
    """score compares the weighted score, pareto all objectives (NSGA-II)."""
    children: ChildrenConfig = ChildrenConfig()
    """How the next ones are made."""
    survival: SurvivalConfig = SurvivalConfig()
    """Who lives on of parents and children."""
    swarm: SwarmConfig | None = None
    """Also move every candidate each generation; null moves none."""

    @model_validator(mode="after")
    def _check_counts(self) -> "PopulationConfig":
        if self.survival.num_elites > self.size:
            raise ValueError(
                f"survival.num_elites is {self.survival.num_elites} in a population of "
                f"{self.size}; it is at most the size."
            )
        if self.objective == "pareto" and self.children.emitted:
            raise ValueError(
                "objective pareto compares every taskset by itself, and the operators es and cmaes "
                "climb the weighted score: write objective: score, or leave them out"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The best or the worst candidate ever seen, and when."""

    id: str
    fitness: Fitness
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The living candidates after a generation, survivors first to last as they were picked."""

    generation: int
    members: tuple[Candidate, ...]
    best: Mark | None
    """None while every evaluation failed."""
    worst: Mark | None
    num_evaluated: int
    """Evaluations so far, founders and failures included."""
    island: str = ""
    """Prefix of the ids of its children; populations that share ids need different ones."""
    guests: tuple[Candidate, ...] = ()
    """Parents of the next generation that are no members."""

    @property
    def num_stale(self) -> int:
        """Generations since the best candidate was found."""
        return self.generation - (self.best.generation if self.best is not None else 0)


def found(
    fitness: Mapping[str, Fitness], *, config: PopulationConfig, seed: int, island: str = ""
) -> Population:
    """Generation 0: the founders with their fitness, at most `size` of them."""
    if not fitness:
        raise ValueError("Got no founders: a population starts with at least one candidate.")
    founders = [
        Candidate(id=id, generation=0, fitness=measured, sigma=config.children.sigma.start)
        for id, measured in fitness.items()
    ]
    empty = Population(
        generation=0, members=(), best=None, worst=None, num_evaluated=0, island=island
    )
    return _settle(empty, founders, founders, config=config, seed=seed)


def ask(population: Population, *, config: PopulationConfig, seed: int) -> tuple[ChildPlan, ...]:
    """The plans of the next generation: moves first, then children.

    There are no children when every operator needs more living parents than there are.
    """
    generation, prefix = population.generation + 1, population.island
    moves: tuple[ChildPlan, ...] = ()
    if config.swarm is not None and population.best is not None and population.worst is not None:
        at = SwarmState(
            generation=generation,
            best=population.best.id,
            worst=population.worst.id,
            prefix=prefix,
        )
        moves = plan_moves(population.members, config=config.swarm, at=at, seed=seed)
    parents = (*population.members, *population.guests)
    children = plan_children(
        parents,
        _scores([parent.fitness for parent in parents], config),
        config=config.children,
        at=Birth(generation=generation, prefix=prefix),
        seed=seed,
        num_guests=len(population.guests),
    )
    return (*moves, *children)


def tell(
    population: Population,
    fitness: Mapping[str, Fitness],
    *,
    config: PopulationConfig,
    seed: int,
    emitted: Sequence[Recipe] = (),
) -> Population:
    """The next generation, given the fitness of every plan asked for, and of those that emitters
    asked for beside them.

    A candidate that moved is replaced by where it moved to, unless it is an elite or the move
    failed.
    """
    plans = (*ask(population, config=config, seed=seed), *emitted)
    if set(fitness) != {plan.id for plan in plans}:
        missing = sorted({plan.id for plan in plans} - set(fitness))
        unknown = sorted(set(fitness) - {plan.id for plan in plans})
        raise ValueError(f"The children {missing} are missing, {unknown} were not asked for.")
    by_id = {member.id: member for member in population.members}
    sigma = config.children.sigma.start
    children = [_child(plan, fitness[plan.id], by_id, sigma=sigma) for plan in plans]
    pool = [*population.members, *children]
    best = elites(_scores([c.fitness for c in pool], config), count=config.survival.num_elites)
    moves = {p.id: p.moved_from for p in plans if isinstance(p, ChildPlan) and p.moved_from}
    moved = {source for id, source in moves.items() if not fitness[id].is_failed}
    left = moved - {pool[index].id for index in best}
    pool = [candidate for candidate in pool if candidate.id not in left]
    following = replace(population, generation=population.generation + 1, guests=())
    return _settle(following, pool, children, config=config, seed=seed)


def immigrate(
    population: Population, newcomers: Sequence[Candidate], *, config: PopulationConfig
) -> Population:
    """The population with newcomers who are not there yet, the worst pushed out above `size`.

    Evaluations are counted where they were made.
    """
    present = {member.id for member in population.members}
    pool = [*population.members, *(c for c in newcomers if c.id not in present)]
    scores = _scores([candidate.fitness for candidate in pool], config)
    kept = set(elites(scores, count=config.size))
    marked = _mark(population, [c for c in newcomers if c.id not in present])
    return replace(marked, members=tuple(c for index, c in enumerate(pool) if index in kept))


def invite(population: Population, guests: Sequence[Candidate]) -> Population:
    """The population with guests: each is a parent of one child of the next generation, whatever
    its fitness, and gone after it unless invited again.

    So an archive's elites take part where `immigrate` would push them out at once. Members and
    failed candidates are left out; evaluations are counted where they were made.
    """
    present = {member.id for member in population.members}
    welcome = {g.id: g for g in guests if g.id not in present and not g.fitness.is_failed}
    return replace(population, guests=tuple(welcome.values()))


def references(population: Population) -> frozenset[str]:
    """Every id that plans of this population may name: what must be kept to carry them out."""
    particles = [member.particle for member in population.members if member.particle is not None]
    marks = [mark for mark in (population.best, population.worst) if mark is not None]
    return frozenset(
        [parent.id for parent in (*population.members, *population.guests)]
        + [id for particle in particles for id in (particle.best, particle.previous)]
        + [mark.id for mark in marks]
    )


def _settle(
    population: Population,
    pool: Sequence[Candidate],
    measured: Sequence[Candidate],
    *,
    config: PopulationConfig,
    seed: int,
) -> Population:
    """Survivors of the pool become the members; `measured` ones are counted and marked."""
    rng = stream(seed, "survival", population.island, population.generation)
    scores = _scores([candidate.fitness for candidate in pool], config)
    kept = survivors(scores, size=config.size, config=config.survival, rng=rng)
    return replace(
        _mark(population, measured),
        members=tuple(pool[index] for index in kept),
        num_evaluated=population.num_evaluated + len(measured),
    )


def _mark(population: Population, measured: Sequence[Candidate]) -> Population:
    best, worst = population.best, population.worst
    for candidate in measured:
        if candidate.fitness.is_failed:
            continue
        key = rank_key(candidate.fitness)
        mark = Mark(id=candidate.id, fitness=candidate.fitness, generation=population.generation)
        best = mark if best is None or key > rank_key(best.fitness) else best
        worst = mark if worst is None or key < rank_key(worst.fitness) else worst
    return replace(population, best=best, worst=worst)


def _child(
    plan: Recipe, fitness: Fitness, by_id: Mapping[str, Candidate], *, sigma: float
) -> Candidate:
    """An ES step has no mutation strength of its own and begins with `sigma`."""
    child = Candidate(
        id=plan.id,
        generation=plan.generation,
        fitness=fitness,
        sigma=plan.sigma if isinstance(plan, ChildPlan) else sigma,
        operator=plan.operator,
        parents=plan.parents,
    )
    if not isinstance(plan, ChildPlan) or plan.moved_from is None:
        return child
    source = by_id[plan.moved_from]
    return replace(child, particle=next_particle_state(source, plan, fitness=fitness))


def _scores(fitnesses: Sequence[Fitness], config: PopulationConfig) -> list[float | None]:
    if config.objective == "pareto":
        return crowded_scores(fitnesses)
    return comparable_scores(fitnesses)
