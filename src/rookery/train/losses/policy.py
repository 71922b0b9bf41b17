"""Losses of drawn tokens; they share the ratio, the correction, the KL term and the metrics.

    loss = sum over targets of weight * (-factor * objective + kl.weight * kl)

A loss of this kind gives the objective of each target; `ImportanceSampling` is the shortest one.
Advantages are given, per target: how they come from rewards is not a loss's matter.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.train.losses.loss import Average, Column, LossOutput, Targets
from rookery.types import Datum

__all__ = [
    "Bnpo",
    "Cispo",
    "CorrectionConfig",
    "Dapo",
    "DrGrpo",
    "Dro",
    "Grpo",
    "Gspo",
    "ImportanceSampling",
    "KlConfig",
    "PolicyLoss",
    "Ppo",
    "Reinforce",
]


# Sums over the targets of each datum, given back to each of those targets.
#
# Values (1, 2, 5) of data (0, 0, 1): sums (3, 3, 5).


def sequence_sums(values: torch.Tensor, datum: torch.Tensor) -> torch.Tensor:
    """[T]: for each target the sum over its datum."""
    num_data = int(datum.max()) + 1
    return values.new_zeros(num_data).index_add(0, datum, values)[datum]


def sequence_means(
    values: torch.Tensor, datum: torch.Tensor, *, is_learned: torch.Tensor
) -> torch.Tensor:
    """[T]: for each target the mean over the learned targets of its datum; 0 if there are none."""
    counts = sequence_sums(is_learned.to(values.dtype), datum)
    return sequence_sums(values * is_learned, datum) / counts.clamp_min(1)


# Correction for an engine that draws by slightly other probabilities than the trainer computes.
#
# The same weights give other log-probabilities in another engine, precision or batch. A token's
# mismatch is p / p when drawn, where p is the trainer's; a sequence's is the product over its
# tokens.


class CorrectionConfig(Config):
    """Multiplies the objective of every token, not its KL term, by the mismatch, bounded.

    Mismatches 0.5, 1.2 and 8 with maximum 3 become 0.5, 1.2 and 3 by truncating, 0.5, 1.2 and 0 by
    masking.
    """

    level: Literal["token", "sequence"] = "token"
    """Whose mismatch: each token's own, or the product over its sequence."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of one outside the bounds: the bound, or 0."""
    minimum: float = Field(default=0.0, ge=0.0)
    """The least value of a correction."""
    maximum: float = Field(default=3.0, gt=0.0)
    """The largest value of a correction."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "CorrectionConfig":
        if self.minimum >= self.maximum:
            raise ValueError(
                f"minimum is {self.minimum:g} and maximum {self.maximum:g}; write a minimum below "
                "the maximum"
            )
        return self

    def mismatch(self, log_mismatch: torch.Tensor, datum: torch.Tensor) -> torch.Tensor:
        """[T], at the level chosen, before any bound."""
        if self.level == "sequence":
            log_mismatch = sequence_sums(log_mismatch, datum)
        return torch.exp(log_mismatch)

    def is_outside(self, mismatch: torch.Tensor) -> torch.Tensor:
        return (mismatch < self.minimum) | (mismatch > self.maximum)

    def factor(self, mismatch: torch.Tensor) -> torch.Tensor:
        """What the objective of each token is multiplied by."""
        if self.mode == "mask":
            return mismatch.masked_fill(self.is_outside(mismatch), 0.0)
        return mismatch.clamp(self.minimum, self.maximum)


class KlConfig(Config):
    """Adds weight * estimate to the loss of every token; d = log p - log p under the reference.

    k1 = d. Unbiased; its gradient is 0 in expectation, so that it is for watching, not for holding.
    k2 = d^2 / 2. Biased; its gradient is that of the KL divergence.
    k3 = exp(-d) + d - 1. Unbiased and never negative; what GRPO and TRL add.
    d = 0.5: 0.5, 0.125, 0.107.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Which estimate."""
    weight: float = Field(default=0.04, ge=0.0)
    """TRL's beta."""

    def __call__(self, difference: torch.Tensor) -> torch.Tensor:
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference.square() / 2
        return torch.exp(-difference) + difference - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an objective is made of, [T] each."""

    logprobs: torch.Tensor
    log_ratio: torch.Tensor
    """log p - log p of what `ratio_to` names; 0 where there is no weight."""
    advantages: torch.Tensor
    datum: torch.Tensor
    is_learned: torch.Tensor
    """Whether the target has a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is to rise, [T] each."""

    values: torch.Tensor
    ratio: torch.Tensor
    """The one the values were made with, for the metrics."""
    shares: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Which targets were treated so, such as `clip_low`; reported as fractions."""


class PolicyLoss(Config, ABC):
    """A loss of drawn tokens with advantages."""

    average: Average = "token"
    """What `averaged` divides the weights of a step's data by; the loss itself is a sum."""
    ratio_to: Literal["sampled", "old", "current"] = "sampled"
    """What the ratio divides p by: p when the engine drew the token; p by this trainer before the
    first step on these data (`old_logprobs`); or p itself, for data that are trained once: the
    ratio is 1 and has the gradient of log p."""
    kl: KlConfig | None = None
    """A KL term to `reference_logprobs`; none by default."""
    correction: CorrectionConfig | None = None
    """For mismatch between engine and trainer; none by default."""

    @model_validator(mode="after")
    def _check_correction(self) -> "PolicyLoss":
        truncates = self.correction is not None and self.correction.mode == "truncate"
        if truncates and self.ratio_to == "sampled":
            raise ValueError(
                "correction truncates the mismatch, and with ratio_to sampled the ratio has that "
                "mismatch already: write ratio_to current or old, or correction mode mask"
            )
        return self

    @property
    def needs(self) -> tuple[Column, ...]:
        """Columns that its data must have, by the options."""
        wanted: dict[Column, bool] = {
            "advantages": True,
            "sampled_logprobs": self.ratio_to == "sampled" or self.correction is not None,
            "old_logprobs": self.ratio_to == "old",
            "reference_logprobs": self.kl is not None,
        }
        return tuple(column for column, is_wanted in wanted.items() if is_wanted)

    def learns_from(self, datum: Datum) -> bool:
        """A group whose answers are all equally good has advantages of 0."""
        is_held = self.kl is not None and self.kl.weight > 0
        return any(datum.weights) and (is_held or any(datum.advantages))

    @abstractmethod
    def objective(self, terms: Terms) -> Objective:
        """What is to rise, of each target."""

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        is_learned = targets.weights != 0
        current = logprobs.detach()
        # By the trainer, at the weights that drew the tokens or as near to them as is known.
        trainer = targets.old_logprobs if self.ratio_to == "old" else current
        compared = targets.sampled_logprobs if self.ratio_to == "sampled" else trainer
        terms = Terms(
            logprobs=logprobs,
            log_ratio=_difference(logprobs, compared, is_learned),
            advantages=targets.advantages,
            datum=targets.datum,
            is_learned=is_learned,
        )
        objective = self.objective(terms)
        values = objective.values
        means = {"ratio": objective.ratio, "entropy": -current, **objective.shares}
        maxima = {"ratio": objective.ratio}
        if len(targets.sampled_logprobs):
            log_mismatch = _difference(trainer, targets.sampled_logprobs, is_learned)
            means["mismatch"] = maxima["mismatch"] = log_mismatch.abs()
            if self.correction is not None:
                mismatch = self.correction.mismatch(log_mismatch, targets.datum)
                means["corrected"] = self.correction.is_outside(mismatch).float()
                values = values * self._factor(self.correction, mismatch)
        losses = -values
        if len(targets.reference_logprobs):
            kl = self.kl or KlConfig(weight=0.0)
            means["kl"] = kl(_difference(logprobs, targets.reference_logprobs, is_learned))
            losses = losses + kl.weight * means["kl"] if kl.weight else losses
        return _output(losses, targets.weights, means=means, maxima=maxima)

    def _factor(self, correction: CorrectionConfig, mismatch: torch.Tensor) -> torch.Tensor:
        if self.ratio_to == "sampled":
            # The ratio has the mismatch already: only what is outside the bounds is dropped.
            return (~correction.is_outside(mismatch)).float()
        return correction.factor(mismatch)


def _difference(one: torch.Tensor, other: torch.Tensor, is_learned: torch.Tensor) -> torch.Tensor:
    """One - other, 0 where there is no weight: exp of what a prompt has there may be infinite."""
    return (one - other).masked_fill(~is_learned, 0.0)


def _output(
    losses: torch.Tensor,
    weights: torch.Tensor,
    *,
    means: Mapping[str, torch.Tensor],
    maxima: Mapping[str, torch.Tensor],
) -> LossOutput:
    loss = (weights * losses).sum()
    sums = {key: (weights * values).sum().detach() for key, values in means.items()}
    learned = weights != 0
    largest = (
        {key: values.detach()[learned].max() for key, values in maxima.items()}
        if learned.any()
        else {}
    )
    return LossOutput(loss=loss, sums={"loss": loss.detach(), **sums}, maxima=largest)


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
