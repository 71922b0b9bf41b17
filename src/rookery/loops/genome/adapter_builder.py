"""Plans -> adapters. Every adapter is its recipe: what is not in memory is made again.

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
"""Of lineage documents. In those without one a mutation's sigma was written and not used; before 3
mutations had `adapt`, of which 0 was the default."""
_COMBINATION = LinearConfig(normalise=False)
"""A random sum and a point of CMA-ES: a linear combination whose weights are taken as they
are. They have names of their own, whatever the config calls its merges."""


_RECIPES: Mapping[str, TypeAdapter[Any]] = {
    "ChildPlan": TypeAdapter(ChildPlan),
    "EsStep": TypeAdapter(EsStep),
    "Drift": TypeAdapter(EsStep),  # its name in lineages of format 2
}


class AdapterBuilder:
    """Makes candidates and keeps the adapters that are needed."""

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
        """In float32, the ES steps that others are chained to."""
        self.chained: set[str] = set()
        """ES steps that others are chained to. Without the last one all are made again."""
        self._versions = {name: adapter.version for name, adapter in founders.items()}

    @property
    def founders(self) -> tuple[str, ...]:
        return tuple(self._founders)

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """How each candidate that is no founder is made, oldest first."""
        return self._recipes

    def plan(self, recipes: Iterable[Recipe]) -> None:
        """Learn how to make candidates; nothing is made yet."""
        for recipe in recipes:
            self._recipes[recipe.id] = recipe
            if isinstance(recipe, EsStep) and recipe.is_chained:
                self.chained.add(recipe.parent)

    def adapter(self, candidate: str) -> Adapter:
        """The candidate's weights, named after it; made again if they were let go."""
        if candidate in self._founders:
            return replace(self._founders[candidate], name=candidate)
        for name in self.missing(candidate):
            self._made[name] = self._make(self._recipes[name])
            self._versions[name] = self._made[name].version
        return self._made[candidate]

    def maker(self, candidate: str) -> Callable[[], Adapter]:
        """Makes the candidate when called, in any thread."""
        return partial(self.adapter, candidate)

    def population(self, centre: str, *, rank: int) -> StepPopulation:
        """What members around this ES step are made from; noise of this rank in each factor."""
        self.chained.add(centre)
        like = self.adapter(centre)
        exact = make_adapter(centre, base=like.base, factors=self._unrounded[centre])
        return StepPopulation.around(exact, like=like, rank=rank)

    def version(self, candidate: str) -> str | None:
        """Its content hash; None for one that was never made."""
        return self._versions.get(candidate)

    def learn(self, candidate: str, version: str | None) -> None:
        """Know the content hash of one that was made before this process, and is not made again
        because it could not be loaded."""
        if version is not None:
            self._versions[candidate] = version

    def num_distinct(self, candidates: Iterable[str]) -> int:
        """How many there are, of equal weights one; those that could not be made count each."""
        return len({self._versions.get(name, f"unmade/{name}") for name in candidates})

    def missing(self, candidate: str) -> list[str]:
        """What must be made to have the candidate: its ancestors that are not at hand, each after
        its parents, then itself."""
        order: dict[str, None] = {}
        stack = [candidate]
        while stack:
            name = stack[-1]
            if name in order or self._is_at_hand(name):
                stack.pop()
                continue
            parents = self._recipes[name].parents
            waiting = [p for p in parents if p not in order and not self._is_at_hand(p)]
            stack.extend(reversed(waiting))
            if not waiting:
                order[stack.pop()] = None
        return list(order)

    def _is_at_hand(self, name: str) -> bool:
        is_made = name in self._made and (name not in self.chained or name in self._unrounded)
        return is_made or name in self._founders

    def effort(self, candidate: str) -> int:
        """What making it takes, from 0, nothing, to 3, whole layers, which take by far the longest;
        1 is one parent changed, 2 are several combined."""
        recipe = self._recipes.get(candidate)
        if candidate in self._made or recipe is None:
            return 0
        if not isinstance(recipe, ChildPlan) or recipe.merge is None:
            return 1
        method = self._merge(recipe.merge)
        return 3 if is_dense(method) else 2

    def coefficients(self, candidate: str) -> tuple[float, ...] | None:
        """Of a candidate that is a sum of all founders, the weight of each, block by block where
        blocks have their own; None of all others."""
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
        """Let every adapter go but these."""
        self.forget((self._made.keys() | self._unrounded.keys()) - set(candidates))

    def forget(self, candidates: Iterable[str]) -> None:
        """Let these adapters go; they are made again when they are needed."""
        for name in candidates:
            self._made.pop(name, None)
            self._unrounded.pop(name, None)

    def lineage(self) -> dict[str, Any]:
        """Everything `rebuild` needs beside the founders' weights."""
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
            what, lacking = f"Making {recipe.id}", tuple(_NO_MEMORY)
            with boundary(AdapterError, what, foreign=lacking, remedy=_NO_MEMORY):
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
    """AdapterError unless candidates can be made there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise AdapterError(
            f"merge_device is {device}, and torch sees no GPU here: write "
            "merge_device: cpu. A run that began on a GPU goes on only on one."
        )


def rebuild(lineage: Mapping[str, Any], founders: Sequence[Adapter], candidate: str) -> Adapter:
    """Make any candidate of a finished run again from `lineage.json` and its founders.

    Raises AdapterError when the founders are not the run's, or the result is not bit-equal.
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
    """The candidate, each ancestor let go after the last one that needs it was made."""
    order = builder.missing(candidate)
    last_use = {p: name for name in order for p in builder.recipes[name].parents}
    for name in order:
        builder.adapter(name)
        builder.forget(p for p in builder.recipes[name].parents if last_use[p] == name)
    return builder.adapter(candidate)
