"""PPO's clipped objective with given advantages, averaged over all tokens of a step."""

from typing import Literal

from rookery.train.losses.clipped import ClippedLoss

__all__ = ["Ppo"]


class Ppo(ClippedLoss):
    """Schulman et al. 2017, without a value network: whoever has one gives its advantages."""

    type: Literal["ppo"] = "ppo"
