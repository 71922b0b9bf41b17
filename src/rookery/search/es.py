"""An evolution strategy over seeds: directions are seeds, an update is a weight for each of them.

    es = Es(config=EsConfig(), seed=7)
    fitness = {p.id: evaluate(centre + p.sign * es.config.sigma * noise(p.seed)) for p in ask(es)}
    es = tell(es, fitness)
    centre += sum(u.weight * noise(u.seed) for u in es.updates[-1])

`noise(seed)` is standard normal, drawn elsewhere, with a generator of its own for every tensor
(the tensor's name belongs into its key, else tensors of one shape get the same noise). No tensor
is stored: the centre is its start plus all `updates`, so any generation can be rebuilt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import Field

from rookery.config import Config
from rookery.search.fitness import Fitness, fitness_ranks
from rookery.seeding import stream_seed

__all__ = ["Es", "EsConfig", "Perturbation", "SeedWeight", "ask", "tell", "utilities"]


class EsConfig(Config):
    """Mirrored evolution strategy with centred ranks."""

    num_pairs: int = Field(default=16, ge=1)
    """Directions per generation; each is tried forth and back, so twice as many evaluations."""
    sigma: float = Field(default=0.1, gt=0.0)
    """Length of a trial step, in units of the noise: with noise scaled to each tensor's standard
    deviation, 0.1 changes every weight by a tenth of it."""
    learning_rate: float = Field(default=1.0, gt=0.0)
    """Length of the update relative to the trial step: 1 moves by about sigma / 2 along a clear
    slope. The classic rate alpha of alpha / (n sigma) is learning_rate * sigma^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """One trial: the centre moved by sign * sigma * noise(seed)."""

    id: str
    """e003-p05-pos or e003-p05-neg: generation 3, direction 5."""
    seed: int
    sign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedWeight:
    """One term of an update: weight * noise(seed) is added to the centre."""

    seed: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Es:
    """The strategy as a value: what it asks next follows from the number of updates made."""

    config: EsConfig
    seed: int
    updates: tuple[tuple[SeedWeight, ...], ...] = ()
    """One per generation told."""

    @property
    def generation(self) -> int:
        return len(self.updates)


def ask(es: Es) -> tuple[Perturbation, ...]:
    """The trials of this generation: every direction with both signs."""
    trials = []
    for pair in range(es.config.num_pairs):
        seed = stream_seed(es.seed, "es", es.generation, pair)
        name = f"e{es.generation:03d}-p{pair:02d}"
        trials.append(Perturbation(id=f"{name}-pos", seed=seed, sign=1))
        trials.append(Perturbation(id=f"{name}-neg", seed=seed, sign=-1))
    return tuple(trials)


def tell(es: Es, fitness: Mapping[str, Fitness]) -> Es:
    """Add the update that these measurements call for.

    Failed trials share the lowest utility. When all are equal, or all failed, every weight is 0.
    """
    trials = ask(es)
    if set(fitness) != {trial.id for trial in trials}:
        missing = sorted({trial.id for trial in trials} - set(fitness))
        unknown = sorted(set(fitness) - {trial.id for trial in trials})
        raise ValueError(f"The trials {missing} are missing, {unknown} were not asked for.")
    utility = utilities({trial.id: fitness[trial.id] for trial in trials})
    scale = es.config.learning_rate * es.config.sigma / es.config.num_pairs
    update = tuple(
        SeedWeight(seed=forth.seed, weight=scale * (utility[forth.id] - utility[back.id]))
        for forth, back in zip(trials[::2], trials[1::2], strict=True)
    )
    return replace(es, updates=(*es.updates, update))


def utilities(fitness: Mapping[str, Fitness]) -> dict[str, float]:
    """Centred ranks: -0.5 for the worst to 0.5 for the best, ties share; their sum is 0.

    Only the order counts, so one outlier cannot own the update.
    """
    middle = (len(fitness) - 1) / 2
    ranks = fitness_ranks(list(fitness.values()))
    return {
        id: (rank - middle) / max(1, len(fitness) - 1)
        for id, rank in zip(fitness, ranks, strict=True)
    }
