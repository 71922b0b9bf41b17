"""A population of adapters as one tensor [P, D], on which the operators of a generation work.

    population = stack(adapters)                    # data [P, D], one row per adapter
    population.a("model.layers.0.mlp.up_proj")      # view [P, rank, in]
    unstack(population, names=["poet", "clerk"])    # adapters again

Adapters of different ranks and layers share one layout: smaller ranks are padded with zeros, absent
layers are zero, and all layers get one common scale. This changes no delta W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rookery.errors import AdapterError
from rookery.model_names import loadable_model
from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.folder import make_adapter

__all__ = [
    "LayerShape",
    "Layout",
    "Place",
    "Stack",
    "bernoulli_positions",
    "empty_stack",
    "layout_of",
    "normal",
    "places",
    "random_adapter",
    "stack",
    "unstack",
    "zero_adapter",
]


_ALIGNMENT = 64
"""Every factor starts at a multiple of this many numbers (256 bytes), so that no vector instruction
straddles two factors; the gaps are zero."""


class LayerShape(NamedTuple):
    """Name and sizes of one linear layer of the base model."""

    name: str
    num_in: int
    num_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The shape that a population shares: adapted layers, rank and scale.

    `Layout(base="smollm2", layers=(LayerShape("model.layers.0.mlp.up_proj", 576, 1536),), rank=8,
    scale=2.0)`
    """

    base: str
    layers: tuple[LayerShape, ...]
    """Sorted by name."""
    rank: int
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    """Dtype of adapters made from this layout; a stack itself is always float32."""


class Place(NamedTuple):
    """Position of one layer's factor in a row: `row[start:stop].view(shape)`."""

    layer: str
    factor: str
    """"a" or "b"."""
    start: int
    stop: int
    shape: tuple[int, int]


@lru_cache(maxsize=64)
def places(layout: Layout) -> tuple[Place, ...]:
    """Return the places of a row's factors in order: a, then b, layer after layer."""
    placed, start = [], 0
    for layer in layout.layers:
        for factor, shape in (
            ("a", (layout.rank, layer.num_in)),
            ("b", (layer.num_out, layout.rank)),
        ):
            stop = start + shape[0] * shape[1]
            placed.append(Place(layer.name, factor, start, stop, shape))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
    return tuple(placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """P adapters of one layout: delta W of row p is `scale * b(layer)[p] @ a(layer)[p]`."""

    layout: Layout
    data: torch.Tensor
    """[P, D] float32."""
    ranks: tuple[tuple[int, ...], ...]
    """Rank per row and layer, without the padding; 0 if the layer is absent."""

    def a(self, layer: str) -> torch.Tensor:
        """[P, rank, in], a view."""
        return self._view(layer, "a")

    def b(self, layer: str) -> torch.Tensor:
        """[P, out, rank], a view."""
        return self._view(layer, "b")

    def to(self, device: torch.device | str) -> "Stack":
        return replace(self, data=self.data.to(device))

    def _view(self, layer: str, factor: str) -> torch.Tensor:
        place = _index(self.layout)[layer, factor]
        return self.data[:, place.start : place.stop].view(-1, *place.shape)


@lru_cache(maxsize=64)
def _index(layout: Layout) -> dict[tuple[str, str], Place]:
    return {(place.layer, place.factor): place for place in places(layout)}


def empty_stack(layout: Layout, *, num_rows: int, device: torch.device | str = "cpu") -> Stack:
    """Make rows of zeros at full rank, to be filled."""
    width = max((place.stop for place in places(layout)), default=0)
    width = -(-width // _ALIGNMENT) * _ALIGNMENT
    return Stack(
        layout=layout,
        data=torch.zeros(num_rows, width, device=device),
        ranks=((layout.rank,) * len(layout.layers),) * num_rows,
    )


def layout_of(adapters: Sequence[Adapter]) -> Layout:
    """Return the smallest layout that holds all adapters; AdapterError if they cannot share one.

    The scale is that of the first adapter's first layer; the dtype is the common one, else float32.
    """
    bases = {loadable_model(a.base): a.base for a in reversed(adapters) if a.base}
    if len(bases) > 1:
        raise AdapterError(
            f"The adapters are of different base models ({', '.join(sorted(bases.values()))}); "
            "adapters can be combined only when they share one."
        )
    shapes: dict[str, LayerShape] = {}
    for adapter in adapters:
        for name, lora in adapter.factors.items():
            shape = LayerShape(name, lora.a.shape[1], lora.b.shape[0])
            known = shapes.setdefault(name, shape)
            if known != shape:
                raise AdapterError(
                    f"The layer {name} of {adapter.name!r} maps {shape.num_in} to {shape.num_out}, "
                    f"of another adapter {known.num_in} to {known.num_out}; "
                    "adapters can be combined only on one base model."
                )
    if not shapes:
        raise AdapterError("Got no adapter with layers; give at least one.")
    every = [lora for adapter in adapters for lora in adapter.factors.values()]
    dtypes = {tensor.dtype for lora in every for tensor in (lora.a, lora.b)}
    return Layout(
        base=next(iter(bases.values()), ""),
        layers=tuple(shapes[name] for name in sorted(shapes)),
        rank=max(adapter.rank for adapter in adapters),
        scale=every[0].scale or 1.0,
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
    )


def stack(adapters: Sequence[Adapter], *, layout: Layout | None = None) -> Stack:
    """Copy adapters into one [P, D] tensor. A scale that differs from the layout's goes into b."""
    shared = layout or layout_of(adapters)
    filled = empty_stack(shared, num_rows=len(adapters))
    for layer in shared.layers:
        a_P, b_P = filled.a(layer.name), filled.b(layer.name)
        for row, adapter in enumerate(adapters):
            lora = adapter.factors.get(layer.name)
            if lora is None:
                continue
            rank = lora.a.shape[0]
            a_P[row, :rank] = lora.a.detach()
            b_P[row, :, :rank] = lora.b.detach()
            if lora.scale != shared.scale:
                b_P[row] *= lora.scale / shared.scale
    ranks = tuple(
        tuple(_rank(adapter.factors.get(layer.name)) for layer in shared.layers)
        for adapter in adapters
    )
    return replace(filled, ranks=ranks)


def _rank(lora: LoraFactors | None) -> int:
    return 0 if lora is None else lora.a.shape[0]


def unstack(population: Stack, *, names: Sequence[str]) -> list[Adapter]:
    """Make one adapter per row, in the layout's dtype, without the padding of the rank.

    For adapters of one scale the round trip is exact: `unstack(stack(x), names) == x`.
    """
    layout = population.layout
    if len(names) != population.data.shape[0]:
        raise AdapterError(
            f"Got {len(names)} names for {population.data.shape[0]} rows; give one name per row."
        )
    factors: list[dict[str, LoraFactors]] = [{} for _ in names]
    for index, layer in enumerate(layout.layers):
        a_P = population.a(layer.name).to(layout.dtype)
        b_P = population.b(layer.name).to(layout.dtype)
        for row, ranks in enumerate(population.ranks):
            if rank := ranks[index]:
                factors[row][layer.name] = LoraFactors(
                    a=a_P[row, :rank].clone(),
                    b=b_P[row, :, :rank].clone(memory_format=torch.contiguous_format),
                    scale=layout.scale,
                )
    return [
        make_adapter(name, base=layout.base, factors=row)
        for name, row in zip(names, factors, strict=True)
    ]


def normal(rng: np.random.Generator, shape: Sequence[int]) -> torch.Tensor:
    """Draw standard normal float32 numbers on the CPU in one thread, at 8 ns per number."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


def bernoulli_positions(
    rng: np.random.Generator, *, num_places: int, rate: float
) -> NDArray[np.int64]:
    """Return, ascending, the positions at which independent trials of probability `rate` succeed.

    Only the gaps between successes are drawn: a rate of 0.01 costs a hundredth of a full mask.
    """
    if rate >= 1:
        return np.arange(num_places, dtype=np.int64)
    if rate <= 0 or num_places == 0:
        return np.empty(0, dtype=np.int64)
    batches, last = [], -1
    while last < num_places:
        expected = (num_places - last) * rate
        gaps = rng.geometric(rate, size=int(expected + 4 * expected**0.5) + 8)
        places = last + np.cumsum(gaps, dtype=np.int64)
        batches.append(places)
        last = int(places[-1])
    places = np.concatenate(batches)
    return places[: int(np.searchsorted(places, num_places))]


def zero_adapter(layout: Layout, *, name: str, seed: Key) -> Adapter:
    """Make an adapter with delta W = 0: b is zero, a is uniform within 1 / sqrt(in), as in PEFT.

    If both factors were zero, a small change of one would leave the product zero.
    """
    return _draw(layout, name=name, seed=seed, size=0.0)


def random_adapter(layout: Layout, *, name: str, seed: Key, size: float = 1e-3) -> Adapter:
    """Make an adapter with a random delta W whose entries have standard deviation `size`.

    Language models' weights have a standard deviation of 0.02 to 0.1: the default is harmless.
    """
    return _draw(layout, name=name, seed=seed, size=size)


def _draw(layout: Layout, *, name: str, seed: Key, size: float) -> Adapter:
    factors = {layer.name: _factors(layout, layer, seed, size) for layer in layout.layers}
    return make_adapter(name, base=layout.base, factors=factors)


def _factors(layout: Layout, layer: LayerShape, seed: Key, size: float) -> LoraFactors:
    rng = bulk_stream("init", layer.name, *seed)
    bound = 1 / sqrt(layer.num_in)
    uniform = torch.from_numpy(rng.random((layout.rank, layer.num_in), dtype="float32"))
    a = (uniform * 2 - 1) * bound
    # Var(delta) = scale^2 * rank * Var(a) * Var(b), and Var(a) = bound^2 / 3.
    spread = size / (layout.scale * bound * sqrt(layout.rank / 3))
    b = normal(rng, (layer.num_out, layout.rank)) * spread
    return LoraFactors(a=a.to(layout.dtype), b=b.to(layout.dtype), scale=layout.scale)
