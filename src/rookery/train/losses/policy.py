"""What all losses of drawn tokens share: the ratio, the correction, the KL term and the metrics.

    loss = sum over targets of weight * (-factor * objective + kl.weight * kl)

A loss of this kind gives the objective of each target; `ImportanceSampling` in `variants.py` is
the shortest one. Advantages are given, per target: how they come from rewards is not a loss's
matter.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.train.averaging import Average
from rookery.train.losses.loss import Column, LossOutput, Targets
from rookery.types import Datum

__all__ = [
    "CorrectionConfig",
    "KlConfig",
    "Objective",
    "PolicyLoss",
    "Terms",
    "sequence_means",
    "sequence_sums",
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
