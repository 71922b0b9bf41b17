"""The records of a generation: a candidate that was measured, a plan of one that is to be made.

Plans name ids, weights and seeds; whoever holds the tensors or programs carries them out.
"""

from dataclasses import dataclass

from rookery.search.fitness import Fitness

__all__ = [
    "BY_BLOCK",
    "CMAES",
    "COMBINATIONS",
    "RANDOM_SUM",
    "SURROGATE",
    "Candidate",
    "ChildPlan",
    "EsStep",
    "Recipe",
]

BY_BLOCK, CMAES, RANDOM_SUM, SURROGATE = "by_block", "cmaes", "random", "surrogate"
COMBINATIONS = frozenset({BY_BLOCK, CMAES, RANDOM_SUM, SURROGATE, "move"})
"""Merges that plans name and no config: weighted sums of the parents, by block with weights of its
own for every block of the model; "move" is in lineages of older runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member of a population. `sigma` is the strength of its last mutation, inherited."""

    id: str
    generation: int
    fitness: Fitness
    sigma: float
    operator: str = "founder"
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """How to make one child: merge the parents with the weights, then mutate.

    `ChildPlan(id="g003-c07", generation=3, merge="ties", parents=("g002-c01", "g000-c04"),
    weights=(0.6, 0.4), mutation=None, sigma=0.1, seed_key=4711)`. A plan that only mutates has
    merge None and one parent; the merges "cmaes" and "random" are weighted sums, and so is
    "by_block", with the weights of all parents in the first block, then in the second, and so on.
    """

    id: str
    generation: int
    merge: str | None
    parents: tuple[str, ...]
    weights: tuple[float, ...]
    mutation: str | None
    sigma: float
    """Strength of the mutation."""
    seed_key: int
    """Seed of everything random in carrying the plan out."""

    @property
    def operator(self) -> str:
        """What made the child: "ties", "gaussian", or "ties+gaussian"."""
        return "+".join(name for name in (self.merge, self.mutation) if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EsStep:
    """A parent plus sum_i amounts[i] * noise(seeds[i]): a trial or a centre of an ES.

    A centre is the centre before it plus one update, a trial is a centre plus one noise: the chain
    costs as much per step at any step.
    """

    id: str
    generation: int
    parent: str
    seeds: tuple[int, ...]
    amounts: tuple[float, ...]
    is_chained: bool = False
    """The parent is an ES step, and its numbers are taken before they are rounded to its dtype:
    small updates add up as if they were made at once."""

    @property
    def parents(self) -> tuple[str, ...]:
        return (self.parent,)

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,)

    @property
    def operator(self) -> str:
        return "es"


Recipe = ChildPlan | EsStep
"""How to make a candidate that is no founder."""
