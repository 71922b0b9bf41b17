"""The clipped objective of PPO, which most losses here share."""

import torch
from pydantic import Field, model_validator

from rookery.train.losses.policy import Objective, PolicyLoss, Terms

__all__ = ["ClippedLoss"]


class ClippedLoss(PolicyLoss):
    """min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), A the advantage.

    A gradient ends where a token has already moved far enough the way its advantage points: with
    clips of 0.2 at ratio 1.5 and A 1, and at ratio 0.5 and A -1; not at ratio 1.5 and A -1.
    """

    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """How far a ratio counts below 1."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """How far a ratio counts above 1."""
    max_ratio: float | None = Field(default=None)
    """Larger ratios count as this one where the advantage is negative too; none by default."""

    @model_validator(mode="after")
    def _check_max_ratio(self) -> "ClippedLoss":
        if self.max_ratio is not None and self.max_ratio <= 1 + self.clip_high:
            raise ValueError(
                f"max_ratio is {self.max_ratio:g}; it bounds ratios that clip_high leaves: write "
                f"more than 1 + clip_high = {1 + self.clip_high:g}"
            )
        return self

    def log_ratio(self, terms: Terms) -> torch.Tensor:
        """The ratio that is clipped: each token's own."""
        return terms.log_ratio

    def objective(self, terms: Terms) -> Objective:
        ratio, advantages = torch.exp(self.log_ratio(terms)), terms.advantages
        low, high = 1 - self.clip_low, 1 + self.clip_high
        bounded = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
        shares = {
            "clip_low": ((ratio < low) & (advantages < 0)).float(),
            "clip_high": ((ratio > high) & (advantages > 0)).float(),
        }
        values = torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
        return Objective(values=values, ratio=ratio, shares=shares)
