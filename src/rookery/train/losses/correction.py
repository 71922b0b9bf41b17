"""Correction for an engine that draws by slightly other probabilities than the trainer computes.

The same weights give other log-probabilities in another engine, precision or batch. A token's
mismatch is p / p when drawn, where p is the trainer's; a sequence's is the product over its tokens.
"""

from typing import Literal

import torch
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.train.losses.sequences import sequence_sums

__all__ = ["CorrectionConfig"]


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
    maximum: float = Field(default=3.0, gt=0.0)

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
