"""What all losses of drawn tokens share: the ratio, the correction, the KL term and the metrics.

    loss = sum over targets of weight * (-factor * objective + kl.weight * kl)

A loss of this kind gives the objective of each target; see `importance_sampling.py` for the
shortest one. Advantages are given, per target: how they come from rewards is not a loss's matter.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import model_validator

from rookery.config import Config
from rookery.train.averaging import Average
from rookery.train.losses.correction import CorrectionConfig
from rookery.train.losses.kl import KlConfig
from rookery.train.losses.loss import Column, LossOutput, Targets
from rookery.types import Datum

__all__ = ["Objective", "PolicyLoss", "Terms"]


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
