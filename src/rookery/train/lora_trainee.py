"""An adapter in training. All its factors lie in one tensor, and so do its gradients and moments: a
step is a few long operations, and moving a trainee moves four tensors.

Layers of one shape are adjacent, first all A, then all B: one operation copies or adds to them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from rookery.config import Config
from rookery.errors import TrainError, did_you_mean
from rookery.slots import SlottedModel
from rookery.slots.model import decoder_layer
from rookery.train.schedule import plain_moments
from rookery.train.trainee import Trainee
from rookery.types import Adapter, Json, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.stack import LayerShape, Layout, zero_adapter

__all__ = [
    "FlatTensors",
    "LoraConfig",
    "LoraTrainee",
    "initial_adapter",
    "new_adapter",
    "target_layers",
]

# Which linear layers an adapter gets, and the adapter that a training starts from.
#
#   config = LoraConfig(rank=8, targets=("q_proj", "v_proj"), layers=4)
#   start = initial_adapter(model, config, name="poet", base="smollm2", seed=1)


class LoraConfig(Config):
    """The shape of a new adapter."""

    rank: int = Field(default=8, ge=1)
    """Rank of the factors A [rank, in] and B [out, rank]."""
    alpha: float = Field(default=16.0, gt=0.0)
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1
    )
    """The linear layers to adapt, by the ends of their names, such as `mlp.up_proj` or `o_proj`."""
    layers: Literal["all"] | Annotated[int, Field(ge=1)] = "all"
    """`all`, or the number of last decoder layers to adapt. With 4 of 30, a step costs 4/30, since
    the layers below are computed once per sequence."""


def initial_adapter(
    model: SlottedModel, config: LoraConfig, *, name: str, base: str, seed: int
) -> Adapter:
    """Return an adapter that changes nothing yet: A drawn by the seed as in PEFT, B zero."""
    sizes = {name: (one.in_features, one.out_features) for name, one in model.linears.items()}
    return new_adapter(
        sizes, config, name=name, base=base, seed=seed, num_layers=model.shape.num_layers
    )


def new_adapter(
    sizes: Mapping[str, tuple[int, int]],
    config: LoraConfig,
    *,
    name: str,
    base: str,
    seed: int,
    num_layers: int | None = None,
) -> Adapter:
    """Return the initial adapter for a model elsewhere, by its layers' (in, out) sizes."""
    if num_layers is None:
        num_layers = 1 + max(decoder_layer(layer, default=-1) for layer in sizes)
    chosen = _chosen(sizes, config, num_layers=num_layers)
    layers = tuple(LayerShape(layer, *sizes[layer]) for layer in chosen)
    layout = Layout(base=base, layers=layers, rank=config.rank, scale=config.alpha / config.rank)
    return zero_adapter(layout, name=name, seed=(seed,))


def target_layers(model: SlottedModel, config: LoraConfig) -> list[str]:
    """Return the full names of the linear layers that the config selects, sorted."""
    return _chosen(model.linears, config, num_layers=model.shape.num_layers)


def _chosen(linears: Collection[str], config: LoraConfig, *, num_layers: int) -> list[str]:
    last = num_layers if config.layers == "all" else config.layers
    if last > num_layers:
        raise TrainError(
            f"layers is {last}; this model has {num_layers}: write 1 to {num_layers}, or all."
        )
    chosen: set[str] = set()
    for target in config.targets:
        matching = [n for n in linears if n == target or n.endswith(f".{target}")]
        if not matching:
            raise TrainError(_unknown_target(target, linears))
        chosen.update(
            n for n in matching if decoder_layer(n, default=num_layers) >= num_layers - last
        )
    if not chosen:
        raise TrainError(
            f"No linear layer of the last {last} is named {' or '.join(config.targets)}: raise "
            "layers or change targets."
        )
    return sorted(chosen)


def _unknown_target(target: str, linears: Iterable[str]) -> str:
    ends = sorted({name.rpartition(".")[2] for name in linears})
    hint = did_you_mean(target, ends)
    return (
        f"targets names {target!r}, and no linear layer of this model ends so.{hint} "
        f"There are: {', '.join(ends)}."
    )


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose factors have one shape."""

    layers: Sequence[str]
    rank: int
    num_inputs: int
    num_outputs: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of values in all A, and in all B."""
        num = len(self.layers) * self.rank
        return num * self.num_inputs, num * self.num_outputs

    @property
    def names(self) -> list[str]:
        return [f"{layer}/{letter}" for letter in "ab" for layer in self.layers]


class FlatTensors(list[torch.Tensor]):
    """Views of one tensor. `groups` has A [layers, rank, in] and B [layers, out, rank] of each."""

    def __init__(self, whole: torch.Tensor, groups: Sequence[LayerGroup]) -> None:
        parts = iter(torch.split(whole, [size for group in groups for size in group.sizes]))
        self.whole = whole
        self.groups = [
            (
                next(parts).view(len(group.layers), group.rank, group.num_inputs),
                next(parts).view(len(group.layers), group.num_outputs, group.rank),
            )
            for group in groups
        ]
        super().__init__(part for pair in self.groups for both in pair for part in both.unbind())


class LoraTrainee(Trainee):
    """An adapter in training. It keeps its start's ranks, scales and layers."""

    def __init__(self, start: Adapter, *, name: str, device: torch.device) -> None:
        self._name, self._base = name, start.base
        self.groups = _groups(start.factors)
        """In the order of the parameters."""
        self.places = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        """Layer -> (number of its group, place in the group)."""
        self._scales = {layer: start.factors[layer].scale for layer in sorted(start.factors)}
        named = {
            f"{layer}/{letter}": tensor
            for layer, lora in start.factors.items()
            for letter, tensor in (("a", lora.a), ("b", lora.b))
        }
        names = [name for group in self.groups for name in group.names]
        parts = [named[name].detach().to(torch.float32).reshape(-1) for name in names]
        self._flat = nn.Parameter(torch.cat(parts).to(device=device, copy=True))
        scales: Json = dict(self._scales)
        super().__init__(
            dict(zip(names, self._views(), strict=True)),
            fixed={"scales": scales},
            optimized=[self._flat],
        )
        self._set_views()

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, gradients and moments included, on any device."""
        return 4 * 4 * self._num_weights

    def adapter(self) -> Adapter:
        """Return a copy of the current weights: float32, on the CPU."""
        factors = {
            layer: LoraFactors(a=_copy(lora.a), b=_copy(lora.b), scale=lora.scale)
            for layer, lora in self.factors.items()
        }
        return make_adapter(self._name, base=self._base, factors=factors)

    def snapshot(self) -> Adapter:
        """Copy the current weights on their device, versioned by step, as a hash reads them all."""
        factors = self._factors(FlatTensors(self._flat.detach().clone(), self.groups))
        version = f"step-{self.num_steps}"
        return Adapter(name=self._name, base=self._base, factors=factors, version=version)

    def zeros(self) -> list[torch.Tensor]:
        return FlatTensors(torch.zeros_like(self._flat.detach()), self.groups)

    def add_gradients(self, gradients: list[torch.Tensor]) -> None:
        if isinstance(self.gradients, FlatTensors) and isinstance(gradients, FlatTensors):
            self.gradients.whole += gradients.whole
        else:
            super().add_gradients(gradients)

    def move(self, device: torch.device) -> None:
        self._flat.data = self._flat.data.to(device)
        state = self._optimizer.state[self._flat] if self.num_steps else {}
        state.update({name: tensor.to(device) for name, tensor in state.items()})
        if self.gradients is not None:
            whole = self._for_optimizer(self.gradients)[0].to(device)
            self.gradients = FlatTensors(whole, self.groups)
        self._set_views()

    def park(self, path: Path) -> None:
        """Write all its tensors to a file and free them."""
        self.save(path)
        self.gradients = None
        self._optimizer.state.clear()
        self._flat.data = torch.empty(0)

    def unpark(self, path: Path, *, device: torch.device) -> None:
        self._flat.data = torch.empty(self._num_weights, device=device)
        self._set_views()
        self.load(path)

    def _for_optimizer(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(gradients, FlatTensors):
            return [gradients.whole]
        return [torch.cat([gradient.reshape(-1) for gradient in gradients])]

    def _moments(self) -> dict[str, torch.Tensor]:
        moments = plain_moments(self._optimizer, self._flat)
        return {
            name: tensor
            for moment, whole in moments.items()
            for name, tensor in self._named(moment, FlatTensors(whole, self.groups)).items()
        }

    @property
    def _num_weights(self) -> int:
        return sum(size for group in self.groups for size in group.sizes)

    def _views(self) -> FlatTensors:
        return FlatTensors(self._flat.detach(), self.groups)

    def _set_views(self) -> None:
        self.parameters = self.views = self._views()
        self.factors = self._factors(self.views)

    def _factors(self, tensors: FlatTensors) -> dict[str, LoraFactors]:
        factors = {}
        for layer, scale in self._scales.items():
            group, place = self.places[layer]
            a, b = tensors.groups[group]
            factors[layer] = LoraFactors(a=a[place], b=b[place], scale=scale)
        return factors


def _groups(factors: Mapping[str, LoraFactors]) -> list[LayerGroup]:
    def shape(layer: str) -> tuple[int, int, int]:
        lora = factors[layer]
        return len(lora.a), lora.a.shape[1], len(lora.b)

    ordered = sorted(factors, key=lambda layer: (shape(layer), layer))
    return [LayerGroup(list(layers), *key) for key, layers in groupby(ordered, key=shape)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True)
