"""Losses: one dict of all. A new loss is a class, a line here and one in the union."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rookery.config import parse_config
from rookery.errors import TrainError
from rookery.train.losses.custom import Custom
from rookery.train.losses.loss import Column, CrossEntropy, Loss, LossOutput, Targets
from rookery.train.losses.policy import (
    Bnpo,
    Cispo,
    CorrectionConfig,
    Dapo,
    DrGrpo,
    Dro,
    Grpo,
    Gspo,
    ImportanceSampling,
    KlConfig,
    PolicyLoss,
    Ppo,
    Reinforce,
)
from rookery.types import Json

__all__ = [
    "LOSSES",
    "Column",
    "CorrectionConfig",
    "KlConfig",
    "Loss",
    "LossOutput",
    "PolicyLoss",
    "PolicyLossConfig",
    "Targets",
    "make_loss",
]

PolicyLossConfig = Annotated[
    Grpo | DrGrpo | Dapo | Bnpo | Gspo | Cispo | Ppo | ImportanceSampling | Reinforce | Dro,
    Field(discriminator="type"),
]
"""Any loss of sampled tokens with its options, as a part of a config file."""

LOSSES: dict[str, type[CrossEntropy] | type[PolicyLoss] | type[Custom]] = {
    "cross_entropy": CrossEntropy,
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "bnpo": Bnpo,
    "gspo": Gspo,
    "cispo": Cispo,
    "ppo": Ppo,
    "importance_sampling": ImportanceSampling,
    "reinforce": Reinforce,
    "dro": Dro,
    "custom": Custom,
}


def make_loss(name: str, options: Mapping[str, Json]) -> Loss:
    """Return the named loss with its options; TrainError lists the known names."""
    kind = LOSSES.get(name)
    if kind is None:
        raise TrainError(f"{name!r} is not a loss. There are: {', '.join(LOSSES)}.")
    return parse_config(kind, options, origin=f"loss_options of {name}")
