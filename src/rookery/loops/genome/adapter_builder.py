"""Plans -> adapters. Recipes define adapters completely, so that any can be made again.

builder = AdapterBuilder(founders, merges=..., mutations=..., rank=8)
builder.plan([ChildPlan(...), EsStep(...)])
adapter = builder.adapter("g003-c07")        # the same bits every time
rebuild(lineage_document, founders, "g003-c07")
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from rookery.errors import AdapterError, boundary
from rookery.fleet.perturbed import StepPopulation, moved
from rookery.search.candidate import BY_BLOCK, COMBINATIONS, ChildPlan, EsStep, Recipe
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.merge import LinearConfig, MergeConfig, is_dense, merge, merge_by_block
from rookery.weights.mutate import GaussianConfig, mutate, rounded, unrounded

__all__ = ["AdapterBuilder", "check_device", "rebuild"]

_MERGE: TypeAdapter[MergeConfig] = TypeAdapter(MergeConfig)
_NO_MEMORY: Mapping[type[Exception], str] = {
    torch.OutOfMemoryError: "Lower launch.gpu_memory_utilization, or write merge_device: cpu"
}
_FORMAT = 3
"""Format of lineage documents. Without one, mutations ignored sigma. Before 3, they had `adapt`."""
_COMBINATION = LinearConfig(normalise=False)
"""Linear combination with the weights as given: random sums and points of CMA-ES. Its names are
reserved, so that a config's merges cannot replace them."""


_RECIPES: Mapping[str, TypeAdapter[Any]] = {
    "ChildPlan": TypeAdapter(ChildPlan),
    "EsStep": TypeAdapter(EsStep),
    "Drift": TypeAdapter(EsStep),  # the name of EsStep in format 2
}


class AdapterBuilder:
    """Makes candidates and caches their adapters."""

    def __init__(
        self,
        founders: Mapping[str, Adapter],
        *,
        merges: Mapping[str, MergeConfig],
        mutations: Mapping[str, GaussianConfig],
        rank: int,
        device: str = "cpu",
    ) -> None:
        """Parents are combined on `device`, which decides the last bits."""
        check_device(device)
        self._device = device
        self._founders = dict(founders)
        self._merges = dict(merges)
        self._mutations = dict(mutations)
        self._rank = rank
        self._recipes: dict[str, Recipe] = {}
        self._made: dict[str, Adapter] = {}
        self._unrounded: dict[str, Mapping[str, LoraFactors]] = {}
        """Float32 factors of the ES steps that others are chained to."""
        self.chained: set[str] = set()
        """ES steps that others are chained to. Without the last one, all must be made again."""
        self._versions = {name: adapter.version for name, adapter in founders.items()}

    @property
    def founders(self) -> tuple[str, ...]:
        return tuple(self._founders)

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Recipes of all candidates except founders, oldest first."""
        return self._recipes

    def plan(self, recipes: Iterable[Recipe]) -> None:
        """Add recipes. Makes nothing yet."""
        for recipe in recipes:
            self._recipes[recipe.id] = recipe
            if isinstance(recipe, EsStep) and recipe.is_chained:
                self.chained.add(recipe.parent)

    def adapter(self, candidate: str) -> Adapter:
        """Return the candidate's weights under its name, made again if necessary."""
        if candidate in self._founders:
            return replace(self._founders[candidate], name=candidate)
        for name in self.missing(candidate):
            self._made[name] = self._make(self._recipes[name])
            self._versions[name] = self._made[name].version
        return self._made[candidate]

    def maker(self, candidate: str) -> Callable[[], Adapter]:
        """Return a function that makes the candidate, callable in any thread."""
        return partial(self.adapter, candidate)

    def population(self, centre: str, *, rank: int) -> StepPopulation:
        """Return the basis for population members around this ES step, with noise of this rank."""
        self.chained.add(centre)
        like = self.adapter(centre)
        exact = make_adapter(centre, base=like.base, factors=self._unrounded[centre])
        return StepPopulation.around(exact, like=like, rank=rank)

    def version(self, candidate: str) -> str | None:
        """Return the content hash of a candidate, or None if it was never made."""
        return self._versions.get(candidate)

    def learn(self, candidate: str, version: str | None) -> None:
        """Set the content hash of a candidate that an earlier process made but could not load."""
        if version is not None:
            self._versions[candidate] = version

    def num_distinct(self, candidates: Iterable[str]) -> int:
        """Count the candidates with distinct weights. Unmade ones count as distinct."""
        return len({self._versions.get(name, f"unmade/{name}") for name in candidates})

    def missing(self, candidate: str) -> list[str]:
        """Return all adapters to make for the candidate, parents before children."""
        order: dict[str, None] = {}
        stack = [candidate]
        while stack:
            name = stack[-1]
            if name in order or self._is_available(name):
                stack.pop()
                continue
            parents = self._recipes[name].parents
            waiting = [p for p in parents if p not in order and not self._is_available(p)]
            stack.extend(reversed(waiting))
            if not waiting:
                order[stack.pop()] = None
        return list(order)

    def _is_available(self, name: str) -> bool:
        is_made = name in self._made and (name not in self.chained or name in self._unrounded)
        return is_made or name in self._founders

    def effort(self, candidate: str) -> int:
        """Return the effort of making a candidate: 0 for none, 1 to change one parent, 2 to combine
        several, 3 for merges of whole layers, by far the slowest."""
        recipe = self._recipes.get(candidate)
        if candidate in self._made or recipe is None:
            return 0
        if not isinstance(recipe, ChildPlan) or recipe.merge is None:
            return 1
        method = self._merge(recipe.merge)
        return 3 if is_dense(method) else 2

    def coefficients(self, candidate: str) -> tuple[float, ...] | None:
        """Return the founders' weights in a candidate that is a sum of all of them, block by block
        for sums by block; else None."""
        recipe = self._recipes.get(candidate)
        if not isinstance(recipe, ChildPlan) or recipe.merge is None or recipe.mutation is not None:
            return None
        is_of_all = sorted(recipe.parents) == sorted(self._founders)
        if not is_of_all or self._merge(recipe.merge) != _COMBINATION:
            return None
        if recipe.merge == BY_BLOCK:
            return recipe.weights
        weights = dict(zip(recipe.parents, recipe.weights, strict=True))
        return tuple(weights[founder] for founder in self._founders)

    def keep(self, candidates: Iterable[str]) -> None:
        """Forget all adapters but these."""
        self.forget((self._made.keys() | self._unrounded.keys()) - set(candidates))

    def forget(self, candidates: Iterable[str]) -> None:
        """Drop these adapters from memory. They are made again when needed."""
        for name in candidates:
            self._made.pop(name, None)
            self._unrounded.pop(name, None)

    def lineage(self) -> dict[str, Any]:
        """Return everything that `rebuild` needs besides the founders' weights."""
        return {
            "format": _FORMAT,
            "rank": self._rank,
            "device": self._device,
            "merges": {n: _MERGE.dump_python(m, mode="json") for n, m in self._merges.items()},
            "mutations": {n: m.model_dump(mode="json") for n, m in self._mutations.items()},
            "founders": {name: self._versions[name] for name in self._founders},
            "candidates": [
                {"kind": type(recipe).__name__, **asdict(recipe), "version": self._versions[name]}
                for name, recipe in self._recipes.items()
                if name in self._versions
            ],
        }

    def _make(self, recipe: Recipe) -> Adapter:
        parents = [self.adapter(parent) for parent in recipe.parents]
        if isinstance(recipe, EsStep):
            return self._es_step(recipe, parents[0])
        adapter = parents[0]
        if recipe.merge == BY_BLOCK:
            adapter = merge_by_block(
                parents, weights=recipe.weights, rank=self._rank, device=self._device
            )
        elif recipe.merge is not None:
            method = self._merge(recipe.merge)
            action, errors = f"Making {recipe.id}", tuple(_NO_MEMORY)
            with boundary(AdapterError, action, foreign=errors, remedy=_NO_MEMORY):
                adapter = merge(
                    parents,
                    weights=recipe.weights,
                    method=method,
                    rank=self._rank,
                    key=(recipe.seed_key,),
                    device=self._device,
                )
        if recipe.mutation is not None:
            change = self._mutations[recipe.mutation]
            key = (recipe.seed_key, "mutation")
            adapter = mutate(adapter, method=change, key=key, sigma=recipe.sigma).adapter
        return replace(adapter, name=recipe.id)

    def _es_step(self, recipe: EsStep, parent: Adapter) -> Adapter:
        start = self._unrounded[recipe.parent] if recipe.is_chained else parent.factors
        if recipe.rank is None:
            seeds = [(seed,) for seed in recipe.seeds]
            sums = unrounded(start, seeds=seeds, amounts=recipe.amounts)
        else:
            sums = moved(
                start,
                seeds=recipe.seeds,
                amounts=recipe.amounts,
                rank=recipe.rank,
                device=self._device,
            )
        if recipe.id in self.chained:
            self._unrounded[recipe.id] = sums
        return replace(rounded(sums, like=parent), name=recipe.id)

    def _merge(self, name: str) -> MergeConfig:
        if name in COMBINATIONS:
            return _COMBINATION
        if name not in self._merges:
            raise AdapterError(
                f"A plan names the merge {name!r}; there are {', '.join(self._merges)}."
            )
        return self._merges[name]


def check_device(device: str) -> None:
    """Raise AdapterError unless candidates can be made on this device."""
    if device != "cpu" and not torch.cuda.is_available():
        raise AdapterError(
            f"merge_device is {device}, and torch sees no GPU here: write "
            "merge_device: cpu. A run that began on a GPU goes on only on one."
        )


def rebuild(lineage: Mapping[str, Any], founders: Sequence[Adapter], candidate: str) -> Adapter:
    """Make any candidate of a finished run again, from `lineage.json` and its founders.

    Raises AdapterError if the founders are not the run's, or the result is not bit-equal.
    """
    known = {adapter.name: adapter for adapter in founders}
    for name, version in lineage["founders"].items():
        if name not in known or known[name].version != version:
            version_now = known[name].version if name in known else "not given"
            raise AdapterError(
                f"Founder {name!r} is {version_now}; this lineage began with {version}."
            )
    changes = {} if "format" in lineage else {"sigma": None}
    named = {name for plan in lineage["candidates"] for name in _methods_of(plan)}
    try:
        merges = {n: _MERGE.validate_python(m) for n, m in lineage["merges"].items() if n in named}
        mutations = {
            name: GaussianConfig(**{k: v for k, v in {**m, **changes}.items() if k != "adapt"})
            for name, m in lineage["mutations"].items()
            if name in named
        }
    except ValidationError as error:
        raise AdapterError(
            f"The lineage uses an operator that this version does not have: {error}"
        ) from None
    builder = AdapterBuilder(
        known,
        merges=merges,
        mutations=mutations,
        rank=lineage["rank"],
        device=lineage.get("device", "cpu"),
    )
    versions = dict(lineage["founders"])
    for entry in lineage["candidates"]:
        fields = dict(entry)
        versions[fields["id"]] = fields.pop("version")
        builder.plan([_RECIPES[fields.pop("kind")].validate_python(fields)])
    if candidate not in versions:
        raise AdapterError(f"{candidate!r} is not in this lineage of {len(versions)} candidates.")
    adapter = _make_alone(builder, candidate)
    if adapter.version != versions[candidate]:
        raise AdapterError(
            f"{candidate} came out as {adapter.version}, the run recorded {versions[candidate]}: "
            "rebuild it with the versions of torch and numpy that made it."
        )
    return adapter


def _methods_of(plan: Mapping[str, Any]) -> tuple[str | None, ...]:
    return plan.get("merge"), plan.get("mutation")


def _make_alone(builder: AdapterBuilder, candidate: str) -> Adapter:
    """Make the candidate, forgetting each ancestor after its last use."""
    order = builder.missing(candidate)
    last_use = {p: name for name in order for p in builder.recipes[name].parents}
    for name in order:
        builder.adapter(name)
        builder.forget(p for p in builder.recipes[name].parents if last_use[p] == name)
    return builder.adapter(candidate)
