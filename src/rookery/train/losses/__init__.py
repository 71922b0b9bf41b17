"""Losses: one file each, one dict of all. A new one is a file and a line in `LOSSES`."""

from rookery.errors import TrainError
from rookery.train.losses.cross_entropy import cross_entropy
from rookery.train.losses.loss import Loss, LossOutput, Targets

__all__ = ["LOSSES", "Loss", "LossOutput", "Targets", "find_loss"]

LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
}


def find_loss(name: str) -> Loss:
    """The loss of that name, or a TrainError that lists them."""
    loss = LOSSES.get(name)
    if loss is None:
        raise TrainError(f"{name!r} is not a loss. There are: {', '.join(LOSSES)}.")
    return loss
