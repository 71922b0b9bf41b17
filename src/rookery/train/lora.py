"""Which linear layers an adapter gets, and the adapter a training starts from.

config = LoraConfig(rank=8, targets=("q_proj", "v_proj"), layers=4)
start = initial_adapter(model, config, name="poet", base="smollm2", seed=1)
"""

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import TrainError
from rookery.slots import SlottedModel
from rookery.slots.model import decoder_layer
from rookery.types import Adapter
from rookery.weights.init import zero_adapter
from rookery.weights.stack import LayerShape, Layout

__all__ = ["LoraConfig", "initial_adapter", "target_layers"]


class LoraConfig(Config):
    """The shape of a new adapter."""

    rank: int = Field(default=8, ge=1)
    """Of both factors: [rank, in] and [out, rank]."""
    alpha: float = Field(default=16.0, gt=0.0)
    """The adapter's part is multiplied by alpha / rank."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1
    )
    """Which linear layers: the ends of their names, such as `mlp.up_proj` or `o_proj`."""
    layers: Literal["all"] | Annotated[int, Field(ge=1)] = "all"
    """`all`, or how many of the last decoder layers: with 4 of 30, those below are computed once
    per sequence and a step costs 4/30."""


def initial_adapter(
    model: SlottedModel, config: LoraConfig, *, name: str, base: str, seed: int
) -> Adapter:
    """An adapter that changes nothing yet: A as PEFT draws it, from the seed, and B zero."""
    layers = tuple(
        LayerShape(layer, model.linears[layer].in_features, model.linears[layer].out_features)
        for layer in target_layers(model, config)
    )
    layout = Layout(base=base, layers=layers, rank=config.rank, scale=config.alpha / config.rank)
    return zero_adapter(layout, name=name, seed=(seed,))


def target_layers(model: SlottedModel, config: LoraConfig) -> list[str]:
    """The full names of the linear layers that the config means, sorted."""
    num_layers = model.shape.num_layers
    last = num_layers if config.layers == "all" else config.layers
    if last > num_layers:
        raise TrainError(
            f"layers is {last}; this model has {num_layers}: write 1 to {num_layers}, or all."
        )
    chosen: set[str] = set()
    for target in config.targets:
        matching = [n for n in model.linears if n == target or n.endswith(f".{target}")]
        if not matching:
            raise TrainError(_unknown_target(target, model.linears))
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
    near = difflib.get_close_matches(target, ends, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"targets names {target!r}, and no linear layer of this model ends so.{hint} "
        f"There are: {', '.join(ends)}."
    )
