"""Losses: one file each, one dict of all. A new one is a file, a line here and one in the union."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rookery.config import parse_config
from rookery.errors import TrainError
from rookery.train.losses.cross_entropy import CrossEntropy
from rookery.train.losses.importance_sampling import ImportanceSampling
from rookery.train.losses.loss import Column, Loss, LossOutput, Targets
from rookery.types import Json

__all__ = ["LOSSES", "Column", "Loss", "LossConfig", "LossOutput", "Targets", "make_loss"]

LossConfig = Annotated[CrossEntropy | ImportanceSampling, Field(discriminator="type")]
"""Any loss with its options, as a part of a config file."""

LOSSES: dict[str, type[CrossEntropy] | type[ImportanceSampling]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceSampling,
}


def make_loss(name: str, options: Mapping[str, Json]) -> Loss:
    """The loss of that name with its options, or an error that says what there is."""
    kind = LOSSES.get(name)
    if kind is None:
        raise TrainError(f"{name!r} is not a loss. There are: {', '.join(LOSSES)}.")
    return parse_config(kind, options, origin=f"loss_options of {name}")
