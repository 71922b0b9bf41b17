"""The losses that training from rewards can name, each a few lines over the policy's terms."""

from typing import Literal

import torch
from pydantic import Field, model_validator

from rookery.train.averaging import Average
from rookery.train.losses.policy import Objective, PolicyLoss, Terms, sequence_means
from rookery.types import Datum

__all__ = [
    "Bnpo",
    "Cispo",
    "ClippedLoss",
    "Dapo",
    "DrGrpo",
    "Dro",
    "Grpo",
    "Gspo",
    "ImportanceSampling",
    "Ppo",
    "Reinforce",
]


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


class Grpo(ClippedLoss):
    """Averaged over the tokens of each sequence, then over sequences: each counts alike, however
    long it is. Shao et al. 2024."""

    type: Literal["grpo"] = "grpo"
    average: Average = "sequence"
    """How the tokens of a step are averaged."""


class Bnpo(ClippedLoss):
    """DAPO's average, by call, as TRL has it: tokens of short calls count more."""

    type: Literal["bnpo"] = "bnpo"
    average: Average = "call"
    """How the tokens of a step are averaged."""


class Cispo(PolicyLoss):
    """The ratio within bounds * A * log p, the ratio without gradient: no token loses its own.
    MiniMax 2025."""

    type: Literal["cispo"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0.0)
    """Larger ratios count as this one; TRL's epsilon_high, which is the bound itself."""

    min_ratio: float = Field(default=0.0, ge=0.0)
    """Smaller ratios count as this one."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Cispo":
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                f"min_ratio is {self.min_ratio:g} and max_ratio {self.max_ratio:g}; write a "
                "min_ratio that is not above"
            )
        return self

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.exp(terms.log_ratio.detach())
        values = ratio.clamp(self.min_ratio, self.max_ratio) * terms.advantages * terms.logprobs
        shares = {"clip_high": (ratio > self.max_ratio).float()}
        if self.min_ratio:
            shares["clip_low"] = (ratio < self.min_ratio).float()
        return Objective(values=values, ratio=ratio, shares=shares)


class Dapo(ClippedLoss):
    """Yu et al. 2025. Every token counts alike; unlikely tokens have room to become likely."""

    type: Literal["dapo"] = "dapo"
    average: Average = "token"
    """How the tokens of a step are averaged."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """How far a ratio counts above 1."""


class DrGrpo(ClippedLoss):
    """Liu et al. 2025. Long wrong answers are not excused by their length; its advantages are not
    divided by the standard deviation of their group."""

    type: Literal["dr_grpo"] = "dr_grpo"
    average: Average = "constant"
    """How the tokens of a step are averaged."""


class Dro(PolicyLoss):
    """A * log p - beta / 2 * (log p - log p when drawn)^2. Richemond et al. 2024, without a value
    network: whoever has one gives its advantages.

    log p -1, when drawn -2, advantage 3, beta 0.5: loss 3.25.
    """

    type: Literal["dro"] = "dro"
    ratio_to: Literal["sampled", "old"] = "sampled"
    """Which log-probabilities it is held to."""
    beta: float = Field(default=0.05, ge=0.0)
    """How strongly."""

    def learns_from(self, datum: Datum) -> bool:
        return any(datum.weights)

    def objective(self, terms: Terms) -> Objective:
        values = terms.advantages * terms.logprobs - self.beta / 2 * terms.log_ratio.square()
        return Objective(values=values, ratio=torch.exp(terms.log_ratio))


class Gspo(ClippedLoss):
    """Zheng et al. 2025. Token ratios 2 and 0.5: the sequence's is 1. Its clips are as small as
    such means are."""

    type: Literal["gspo"] = "gspo"
    average: Average = "sequence"
    """How the tokens of a step are averaged."""
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """How far a ratio counts below 1."""
    clip_high: float = Field(default=4e-4, ge=0.0)
    """How far a ratio counts above 1."""

    def log_ratio(self, terms: Terms) -> torch.Tensor:
        return sequence_means(terms.log_ratio, terms.datum, is_learned=terms.is_learned)


class ImportanceSampling(PolicyLoss):
    """ratio * A, without any clip.

    Drawn with p 0.25, now 0.5, advantage 3, weight 1: loss -6. `train/ratio` is the mean ratio; at
    the weights that drew the tokens it is 1.
    """

    type: Literal["importance_sampling"] = "importance_sampling"

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.exp(terms.log_ratio)
        return Objective(values=ratio * terms.advantages, ratio=ratio)


class Ppo(ClippedLoss):
    """Schulman et al. 2017, without a value network: whoever has one gives its advantages."""

    type: Literal["ppo"] = "ppo"


class Reinforce(PolicyLoss):
    """A * log p. Right for tokens drawn by the current weights; `correction` mends small gaps."""

    type: Literal["reinforce"] = "reinforce"
    ratio_to: Literal["current"] = "current"
    """There is no ratio."""

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.ones_like(terms.logprobs)
        return Objective(values=terms.advantages * terms.logprobs, ratio=ratio)
