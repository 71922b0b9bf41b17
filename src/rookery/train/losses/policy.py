"""Losses of sampled tokens, which share the ratio, the correction, the KL term and the metrics.

    loss = sum over targets of weight * (-factor * objective + kl.weight * kl)

A subclass of `PolicyLoss` computes the objective of each target; `ImportanceSampling` is the
shortest. Advantages are part of the data, one per target.
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


# Sums over the targets of each datum, repeated for each of its targets.
#
# Values (1, 2, 5) of data (0, 0, 1): sums (3, 3, 5).


def sequence_sums(values: torch.Tensor, datum: torch.Tensor) -> torch.Tensor:
    """Return [T]: for each target the sum over its datum."""
    num_data = int(datum.max()) + 1
    return values.new_zeros(num_data).index_add(0, datum, values)[datum]


def sequence_means(
    values: torch.Tensor, datum: torch.Tensor, *, is_learned: torch.Tensor
) -> torch.Tensor:
    """Return [T]: for each target the mean over its datum's learned targets; 0 if it has none."""
    counts = sequence_sums(is_learned.to(values.dtype), datum)
    return sequence_sums(values * is_learned, datum) / counts.clamp_min(1)


# Correction for differences between the engine's and the trainer's probabilities.
#
# Equal weights give other log-probabilities in another engine, precision or batch. A token's
# mismatch is the trainer's p divided by the p it was drawn with; a sequence's is the product over
# its tokens.


class CorrectionConfig(Config):
    """Multiplies the objective of every token, but not its KL term, by the bounded mismatch. With
    maximum 3, mismatches 0.5, 1.2 and 8 become 0.5, 1.2 and 3 (truncate) or 0 (mask)."""

    level: Literal["token", "sequence"] = "token"
    """Mismatch of each token, or the product over its sequence."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Replace a mismatch outside the bounds by the bound (`truncate`) or by 0 (`mask`)."""
    minimum: float = Field(default=0.0, ge=0.0)
    """Lower bound of a correction."""
    maximum: float = Field(default=3.0, gt=0.0)
    """Upper bound of a correction."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "CorrectionConfig":
        if self.minimum >= self.maximum:
            raise ValueError(
                f"minimum is {self.minimum:g} and maximum {self.maximum:g}; write a minimum below "
                "the maximum"
            )
        return self

    def mismatch(self, log_mismatch: torch.Tensor, datum: torch.Tensor) -> torch.Tensor:
        """Return [T] mismatches at the chosen level, unbounded."""
        if self.level == "sequence":
            log_mismatch = sequence_sums(log_mismatch, datum)
        return torch.exp(log_mismatch)

    def is_outside(self, mismatch: torch.Tensor) -> torch.Tensor:
        return (mismatch < self.minimum) | (mismatch > self.maximum)

    def factor(self, mismatch: torch.Tensor) -> torch.Tensor:
        """Return the factor on each token's objective."""
        if self.mode == "mask":
            return mismatch.masked_fill(self.is_outside(mismatch), 0.0)
        return mismatch.clamp(self.minimum, self.maximum)


class KlConfig(Config):
    """Adds weight * estimate to the loss of every token; d = log p - log p under the reference.

    k1 = d. Unbiased, but its gradient is 0 in expectation: use it to monitor, not to constrain.
    k2 = d^2 / 2. Biased; its gradient is that of the KL divergence.
    k3 = exp(-d) + d - 1. Unbiased and never negative; GRPO and TRL add it.
    d = 0.5: 0.5, 0.125, 0.107.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""
    weight: float = Field(default=0.04, ge=0.0)
    """Weight of the KL term; TRL's beta."""

    def __call__(self, difference: torch.Tensor) -> torch.Tensor:
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference.square() / 2
        return torch.exp(-difference) + difference - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs of an objective, [T] each."""

    logprobs: torch.Tensor
    log_ratio: torch.Tensor
    """log p - log p of the model that `ratio_to` names; 0 for targets without weight."""
    advantages: torch.Tensor
    datum: torch.Tensor
    is_learned: torch.Tensor
    """Whether the target has a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective to maximise, [T] each."""

    values: torch.Tensor
    ratio: torch.Tensor
    """The ratio in `values`, for the metrics."""
    shares: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """1 for affected targets by kind, such as `clip_low`; reported as fractions."""


class PolicyLoss(Config, ABC):
    """A loss of sampled tokens with advantages."""

    average: Average = "token"
    """How `averaged` divides the weights of a step's data; the loss itself is a sum."""
    ratio_to: Literal["sampled", "old", "current"] = "sampled"
    """Denominator of the ratio. `sampled`: p when the engine drew the token. `old`: p by this
    trainer before the first step on these data (`old_logprobs`). `current`: p itself, for data that
    are trained on once; the ratio is 1 and has the gradient of log p."""
    kl: KlConfig | None = None
    """A KL term to `reference_logprobs`; none by default."""
    correction: CorrectionConfig | None = None
    """Correction of the mismatch between engine and trainer; none by default."""

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
        wanted: dict[Column, bool] = {
            "advantages": True,
            "sampled_logprobs": self.ratio_to == "sampled" or self.correction is not None,
            "old_logprobs": self.ratio_to == "old",
            "reference_logprobs": self.kl is not None,
        }
        return tuple(column for column, is_wanted in wanted.items() if is_wanted)

    def learns_from(self, datum: Datum) -> bool:
        """Whether it has weights, and a KL term or advantages other than 0."""
        is_held = self.kl is not None and self.kl.weight > 0
        return any(datum.weights) and (is_held or any(datum.advantages))

    @abstractmethod
    def objective(self, terms: Terms) -> Objective:
        """Return the objective of each target, which training maximises."""

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        is_learned = targets.weights != 0
        current = logprobs.detach()
        # The trainer's p for the weights that drew the tokens, or its closest known value.
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
            # The ratio contains the mismatch already: only drop mismatches outside the bounds.
            return (~correction.is_outside(mismatch)).float()
        return correction.factor(mismatch)


def _difference(one: torch.Tensor, other: torch.Tensor, is_learned: torch.Tensor) -> torch.Tensor:
    """Return one - other, 0 for targets without weight: their exp may be infinite."""
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

    The gradient is 0 once a token has moved far enough in its advantage's direction: with clips of
    0.2 at ratio 1.5 and A 1, and at ratio 0.5 and A -1; not at ratio 1.5 and A -1.
    """

    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """Ratios above 1 + clip_high are clipped."""
    max_ratio: float | None = Field(default=None)
    """Bound of the ratio if the advantage is negative, which clip_high leaves; none by default."""

    @model_validator(mode="after")
    def _check_max_ratio(self) -> "ClippedLoss":
        if self.max_ratio is not None and self.max_ratio <= 1 + self.clip_high:
            raise ValueError(
                f"max_ratio is {self.max_ratio:g}; it bounds ratios that clip_high leaves: write "
                f"more than 1 + clip_high = {1 + self.clip_high:g}"
            )
        return self

    def log_ratio(self, terms: Terms) -> torch.Tensor:
        """Log of the clipped ratio: per token."""
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
    """Averages within sequences, then over them: length does not matter. Shao et al. 2024."""

    type: Literal["grpo"] = "grpo"
    average: Average = "sequence"
    """How the tokens of a step are averaged."""


class Bnpo(ClippedLoss):
    """DAPO averaged per call, as TRL does: tokens of short calls count more."""

    type: Literal["bnpo"] = "bnpo"
    average: Average = "call"
    """How the tokens of a step are averaged."""


class Cispo(PolicyLoss):
    """Clamped, constant ratio * A * log p: no token loses its gradient. MiniMax 2025."""

    type: Literal["cispo"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0.0)
    """Upper bound of the ratio; TRL's epsilon_high, which is also the bound itself."""

    min_ratio: float = Field(default=0.0, ge=0.0)
    """Lower bound of the ratio."""

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
    """Every token counts alike, and unlikely tokens may become likely faster. Yu et al. 2025."""

    type: Literal["dapo"] = "dapo"
    average: Average = "token"
    """How the tokens of a step are averaged."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """Ratios above 1 + clip_high are clipped."""


class DrGrpo(ClippedLoss):
    """Length does not excuse long wrong answers. Its advantages are not divided by their group's
    standard deviation. Liu et al. 2025."""

    type: Literal["dr_grpo"] = "dr_grpo"
    average: Average = "constant"
    """How the tokens of a step are averaged."""


class Dro(PolicyLoss):
    """A * log p - beta / 2 * (log p - log p when drawn)^2. Richemond et al. 2024, without a value
    network; advantages may come from one.

    log p -1, when drawn -2, advantage 3, beta 0.5: loss 3.25.
    """

    type: Literal["dro"] = "dro"
    ratio_to: Literal["sampled", "old"] = "sampled"
    """Log-probabilities in the quadratic penalty: the engine's, or this trainer's from before."""
    beta: float = Field(default=0.05, ge=0.0)
    """Strength of the quadratic penalty."""

    def learns_from(self, datum: Datum) -> bool:
        return any(datum.weights)

    def objective(self, terms: Terms) -> Objective:
        values = terms.advantages * terms.logprobs - self.beta / 2 * terms.log_ratio.square()
        return Objective(values=values, ratio=torch.exp(terms.log_ratio))


class Gspo(ClippedLoss):
    """Clips the ratio per sequence: token ratios 2 and 0.5 give 1. Such means vary little, so its
    clips are small. Zheng et al. 2025."""

    type: Literal["gspo"] = "gspo"
    average: Average = "sequence"
    """How the tokens of a step are averaged."""
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(default=4e-4, ge=0.0)
    """Ratios above 1 + clip_high are clipped."""

    def log_ratio(self, terms: Terms) -> torch.Tensor:
        return sequence_means(terms.log_ratio, terms.datum, is_learned=terms.is_learned)


class ImportanceSampling(PolicyLoss):
    """ratio * A, without clipping.

    Drawn with p 0.25, now 0.5, advantage 3, weight 1: loss -6. `train/ratio` is the mean ratio, 1
    at the weights that drew the tokens.
    """

    type: Literal["importance_sampling"] = "importance_sampling"

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.exp(terms.log_ratio)
        return Objective(values=ratio * terms.advantages, ratio=ratio)


class Ppo(ClippedLoss):
    """PPO without a value network; advantages may come from one. Schulman et al. 2017."""

    type: Literal["ppo"] = "ppo"


class Reinforce(PolicyLoss):
    """A * log p. Unbiased for tokens of the current weights; `correction` corrects small gaps."""

    type: Literal["reinforce"] = "reinforce"
    ratio_to: Literal["current"] = "current"
    """Only `current`: there is no ratio."""

    def objective(self, terms: Terms) -> Objective:
        ratio = torch.ones_like(terms.logprobs)
        return Objective(values=terms.advantages * terms.logprobs, ratio=ratio)
