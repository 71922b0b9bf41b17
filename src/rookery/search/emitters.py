"""Emitters: operators that learn from the fitness of the children they ask for.

    emitter = CmaesEmitter(config, count=6, at=EmitterPlace(...), founders=("poet", "clerk"))
    plans = emitter.ask(generation=3)
    emitter.tell({plan.id: fitness}, best="g003-c07")       # of all of them, every generation

`es` keeps a centre: its children are the centre and mirrored pairs around it, and their ranks move
the centre. When none of its children became the population's best for `patience` generations it
begins again from that best. `cmaes` keeps a normal distribution of merge coefficients, one per
founder. What an emitter asks follows from its config, its seed and what it was told: a resumed
search tells it the same again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search import es as strategy
from rookery.search.candidate import CMAES, ChildPlan, EsStep, Recipe
from rookery.search.es import Cmaes, CmaesConfig, Es, EsConfig, SeedWeight, average_start
from rookery.search.fitness import Fitness
from rookery.seeding import stream_seed
from rookery.types import Json

__all__ = [
    "CmaesEmitter",
    "CmaesOperatorConfig",
    "Emitter",
    "EmitterPlace",
    "EsEmitter",
    "EsOperatorConfig",
]


class EsOperatorConfig(Config):
    """Children around a centre that climbs: one step of an evolution strategy each generation."""

    least: ClassVar[int] = 3
    type: Literal["es"] = "es"
    share: float = Field(default=1.0, ge=0.0)
    """Its part of the children, relative to the shares of the other operators: the centre and as
    many mirrored pairs as fit, one at least."""
    sigma: float = Field(default=0.1, gt=0.0)
    """Length of a trial step, relative to the root mean square of the adapter it began from."""
    learning_rate: float = Field(default=1.0, gt=0.0)
    """Length of the update relative to the trial step."""
    patience: int = Field(default=3, ge=1)
    """Begin again from the population's best after so many generations in which none of its
    children became that best."""


class CmaesOperatorConfig(Config):
    """Sums of all founders, with coefficients from a distribution that adapts."""

    least: ClassVar[int] = 4
    type: Literal["cmaes"] = "cmaes"
    share: float = Field(default=1.0, ge=0.0)
    """Its part of the children, relative to the shares of the other operators; four at least."""
    sigma: float = Field(default=0.25, gt=0.0)
    """Standard deviation of the first coefficients around the uniform average."""
    low: float | None = 0.0
    """Smallest value of a coefficient; null is no limit."""
    high: float | None = 1.5
    """Largest value of a coefficient; null is no limit."""

    @model_validator(mode="after")
    def _check_limits(self) -> "CmaesOperatorConfig":
        self.search(count=self.least)
        return self

    def search(self, *, count: int) -> CmaesConfig:
        """The strategy that asks for so many children a generation."""
        return CmaesConfig(population=count, sigma=self.sigma, low=self.low, high=self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitterPlace:
    """Which emitter it is: everything that tells its ids and its seed from those of others."""

    seed: int
    island: str
    """Prefix of the ids of its population."""
    index: int
    """Place among the operators."""

    @property
    def name(self) -> str:
        return f"{self.island}o{self.index}"

    def key(self, kind: str) -> int:
        return stream_seed(self.seed, "emitter", kind, self.name)

    def child(self, generation: int, name: str) -> str:
        """The id "g003-o4-p00" of a child."""
        return f"{self.island}g{generation:03d}-o{self.index}-{name}"


class Emitter(Protocol):
    """Asks for children and is told the fitness of all of them."""

    @property
    def state(self) -> dict[str, Json]:
        """Where it stands, to be recorded."""
        ...

    @property
    def references(self) -> frozenset[str]:
        """Candidates that the next children are made of."""
        ...

    def ask(self, *, generation: int) -> tuple[Recipe, ...]:
        """The children of this generation; the same until they are told."""
        ...

    def tell(self, fitness: Mapping[str, Fitness], *, best: str | None) -> None:
        """The fitness of every child asked for, and the population's best after them."""
        ...


class EsEmitter:
    """An Emitter. It asks for nothing until it was given a candidate to begin from."""

    def __init__(self, config: EsOperatorConfig, *, count: int, at: EmitterPlace) -> None:
        plain = EsConfig(
            num_pairs=(count - 1) // 2, sigma=config.sigma, learning_rate=config.learning_rate
        )
        self._es = Es(config=plain, seed=at.key("es"))
        self._at = at
        self._patience = config.patience
        self._num_stale = 0
        self._parent: str | None = None
        """The centre before this one, or the candidate it began from."""
        self._is_chained = False
        self._scale = 1.0
        self._update: tuple[SeedWeight, ...] = ()
        self._asked: tuple[EsStep, ...] = ()
        """The centre, then the trials."""

    @property
    def needs_start(self) -> bool:
        return self._parent is None

    @property
    def state(self) -> dict[str, Json]:
        return {"centre": self._parent, "num_stale": self._num_stale}

    @property
    def references(self) -> frozenset[str]:
        return frozenset(() if self._parent is None else (self._parent,))

    def begin(self, candidate: str, *, scale: float) -> None:
        """Climb from this candidate; `scale` is the root mean square of its numbers."""
        self._parent, self._scale = candidate, scale
        self._is_chained, self._update, self._num_stale = False, (), 0

    def ask(self, *, generation: int) -> tuple[Recipe, ...]:
        if self._parent is None or self._asked:
            return self._asked
        centre = EsStep(
            id=self._at.child(generation, "centre"),
            generation=generation,
            parent=self._parent,
            seeds=tuple(term.seed for term in self._update),
            amounts=tuple(term.weight * self._scale for term in self._update),
            is_chained=self._is_chained,
        )
        length = self._es.config.sigma * self._scale
        trials = [
            EsStep(
                id=self._at.child(generation, trial.id.partition("-")[2]),
                generation=generation,
                parent=centre.id,
                seeds=(trial.seed,),
                amounts=(trial.sign * length,),
                is_chained=True,
            )
            for trial in strategy.ask(self._es)
        ]
        self._asked = (centre, *trials)
        return self._asked

    def tell(self, fitness: Mapping[str, Fitness], *, best: str | None) -> None:
        _check_told(self._asked, fitness)
        if not self._asked:
            return
        centre, *steps = self._asked
        trials = strategy.ask(self._es)
        self._es = strategy.tell(
            self._es,
            {trial.id: fitness[step.id] for trial, step in zip(trials, steps, strict=True)},
        )
        self._update, self._asked = self._es.updates[-1], ()
        self._parent, self._is_chained = centre.id, True
        self._num_stale = 0 if best in fitness else self._num_stale + 1
        if self._num_stale >= self._patience:
            self._parent = None


class CmaesEmitter:
    """An Emitter of weighted sums of the founders."""

    def __init__(
        self,
        config: CmaesOperatorConfig,
        *,
        count: int,
        at: EmitterPlace,
        founders: Sequence[str],
        mutation_sigma: float,
    ) -> None:
        """Children of its children begin with the mutation strength `mutation_sigma`."""
        plain = config.search(count=count)
        start = average_start(plain, count=len(founders))
        self._cmaes = Cmaes(plain, seed=at.key("cmaes"), start=start)
        self._at = at
        self._founders = tuple(founders)
        self._mutation_sigma = mutation_sigma
        self._asked: tuple[ChildPlan, ...] = ()

    @property
    def state(self) -> dict[str, Json]:
        return {"mean": list(self._cmaes.mean), "sigma": self._cmaes.sigma}

    @property
    def references(self) -> frozenset[str]:
        return frozenset(self._founders)

    def ask(self, *, generation: int) -> tuple[Recipe, ...]:
        if not self._asked:
            self._asked = tuple(
                ChildPlan(
                    id=self._at.child(generation, f"p{index:02d}"),
                    generation=generation,
                    merge=CMAES,
                    parents=self._founders,
                    weights=point,
                    mutation=None,
                    sigma=self._mutation_sigma,
                    seed_key=0,
                )
                for index, point in enumerate(self._cmaes.ask())
            )
        return self._asked

    def tell(self, fitness: Mapping[str, Fitness], *, best: str | None) -> None:  # noqa: ARG002
        _check_told(self._asked, fitness)
        self._cmaes.tell([fitness[plan.id] for plan in self._asked])
        self._asked = ()


def _check_told(asked: Sequence[Recipe], fitness: Mapping[str, Fitness]) -> None:
    wanted = {plan.id for plan in asked}
    if wanted != set(fitness):
        missing, unknown = sorted(wanted - set(fitness)), sorted(set(fitness) - wanted)
        raise ValueError(f"The children {missing} are missing, {unknown} were not asked for.")
