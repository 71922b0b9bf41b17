"""The schedule of a training: learning rates, the order of the data, AdamW."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor

from rookery.config import Config
from rookery.errors import TrainError, install_extra
from rookery.seeding import bulk_stream
from rookery.types import OptimStep

__all__ = [
    "AdamWConfig",
    "OptimizerKind",
    "ScheduleConfig",
    "learning_rate_at",
    "make_optimizer",
    "make_state",
    "order_batches",
    "order_rows",
    "plain_moments",
    "set_values",
]


class AdamWConfig(Config):
    """Values of AdamW."""

    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the running mean of gradients, per step."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the running mean of squared gradients, per step."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weights shrink by learning rate * this per step."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Gradients with a larger norm are scaled down to it; 0 turns clipping off."""


class ScheduleConfig(Config):
    """How the learning rate changes over the steps of a training."""

    learning_rate: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate, reached after the warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After the warm-up: down to 0 along a half cosine or a line, or constant."""
    warmup: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of all steps in which the learning rate rises from 0."""


def learning_rate_at(step: int, *, config: ScheduleConfig, num_steps: int) -> float:
    """Return the learning rate of step 0, 1, ..., num_steps - 1; no step has rate 0. 4 steps, half
    of them warm-up, rate 1: 0.5, 1, 1, 0.5 by cosine and by line."""
    num_warmup = round(config.warmup * num_steps)
    if step < num_warmup:
        return config.learning_rate * (step + 1) / num_warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - num_warmup) / (num_steps - num_warmup)
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate * (1 + math.cos(math.pi * done)) / 2


# The data of each step: epochs of shuffled data, cut into batches, by the seed alone.
#
# Data of 5 rows, batches of 2: step 0 takes two rows of the first epoch's order, step 1 two more,
# step 2 the last one and the first of the second epoch's order, and so on.


def order_batches(
    sizes: Sequence[int], *, rows: Iterator[int], batch_size: int, batch_tokens: int | None
) -> Iterator[list[int]]:
    """Yield batches of `batch_size` rows, or of the rows that fit `batch_tokens`. A row over
    `batch_tokens` is its own batch. `sizes` are the rows' tokens."""
    batch: list[int] = []
    num_tokens = 0
    for row in rows:
        is_full = len(batch) == batch_size
        if batch_tokens is not None:
            is_full = bool(batch) and num_tokens + sizes[row] > batch_tokens
        if is_full:
            yield batch
            batch, num_tokens = [], 0
        batch.append(row)
        num_tokens += sizes[row]
    if batch:
        yield batch


def order_rows(num_rows: int, *, seed: int, epochs: int | None) -> Iterator[int]:
    """Yield every row once per epoch, in a new order each epoch; None runs forever."""
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from bulk_stream("order", seed, epoch).permutation(num_rows).tolist()
        epoch += 1


# AdamW with 32-bit or 8-bit moments: its values set per step, its moments as plain tensors.
#
#   optimizer = make_optimizer("adamw_8bit", parameters)
#   set_values(optimizer, step)
#   plain_moments(optimizer, parameter)        # {"exp_avg": ...}, or its parts in 8 bit


OptimizerKind = Literal["adamw", "adamw_8bit"]
"""`adamw_8bit` is torchao's: 2 bytes of moments per weight instead of 8."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors per parameter, by torch's names, besides the step count."""
_PARTS = ("codes", "scale")
"""Parts of an 8-bit moment, by torchao's names; its code book is constant."""


def make_optimizer(
    kind: OptimizerKind, parameters: Sequence[nn.Parameter], *, is_flat: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer. If `is_flat`, it updates each parameter in one operation."""
    if kind == "adamw":
        return torch.optim.AdamW(parameters, fused=is_flat or None)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise TrainError(
            f"The optimizer adamw_8bit needs torchao: {install_extra('optim')}, or write adamw."
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(parameters)
    return optimizer


def set_values(optimizer: torch.optim.Optimizer, step: OptimStep) -> None:
    """Set learning rate, betas, epsilon and weight decay for the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao compiles the step around it
            group["lr"].fill_(step.learning_rate)
        else:
            group["lr"] = step.learning_rate
        group["eps"] = step.epsilon
        group["betas"] = (step.beta1, step.beta2)
        group["weight_decay"] = step.weight_decay


def plain_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, torch.Tensor]:
    """Return the moments, not copies; 8-bit moments come in parts: `exp_avg.codes`, ..."""
    state: Mapping[str, Any] = optimizer.state[parameter]
    plain = {}
    for name in _MOMENTS:
        if type(state[name]) in (torch.Tensor, DTensor):
            plain[name] = state[name]
        else:
            plain |= {f"{name}.{part}": getattr(state[name], part) for part in _PARTS}
    return plain


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, *, num_steps: int) -> None:
    """Make zero moments at this step count, to be overwritten. Weights keep their bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    set_values(optimizer, OptimStep(trainee="", learning_rate=0.0))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in parameters:
        count = optimizer.state[parameter]["step"]
        optimizer.state[parameter]["step"] = torch.full_like(count, num_steps)
