"""The learning rate of every step, and the other values of AdamW, as parts of configs."""

import math
from typing import Literal

from pydantic import Field

from rookery.config import Config

__all__ = ["AdamWConfig", "ScheduleConfig", "learning_rate_at"]


class AdamWConfig(Config):
    """The optimizer."""

    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """How much of the mean gradient is kept from step to step."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """The same of the mean squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Per step the factors shrink by learning rate * this."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Longer gradients are scaled down to this norm; 0 leaves them as they are."""


class ScheduleConfig(Config):
    """How the learning rate changes over the steps of a training."""

    learning_rate: float = Field(default=1e-3, gt=0.0)
    """The highest: reached after the warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After the warm-up: down to 0 along a half cosine or a line, or unchanged."""
    warmup: float = Field(default=0.05, ge=0.0, le=1.0)
    """The part of all steps in which the learning rate rises from 0."""


def learning_rate_at(step: int, *, config: ScheduleConfig, num_steps: int) -> float:
    """Of step 0, 1, ..., num_steps - 1; no step has rate 0.

    4 steps, half of them warm-up, rate 1: 0.5, 1, 1, 0.5 by cosine and by line.
    """
    num_warmup = round(config.warmup * num_steps)
    if step < num_warmup:
        return config.learning_rate * (step + 1) / num_warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - num_warmup) / (num_steps - num_warmup)
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate * (1 + math.cos(math.pi * done)) / 2
