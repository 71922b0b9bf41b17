"""The learning rate of every step, and the other values of AdamW, as parts of configs."""

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


# Which data each step takes: epochs of shuffled data, cut into batches, by the seed alone.
#
# Data of 5 rows, batches of 2: step 0 takes two rows of the first epoch's order, step 1 two more,
# step 2 the last one and the first of the second epoch's order, and so on.


def order_batches(
    sizes: Sequence[int], *, rows: Iterator[int], batch_size: int, batch_tokens: int | None
) -> Iterator[list[int]]:
    """Batches of `batch_size` rows, or with `batch_tokens` of as many as fit in that many tokens.

    A row over `batch_tokens` is a batch of its own. `sizes` are the rows' tokens.
    """
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
    """Every row once per epoch, each epoch in an order of its own; None does not end."""
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from bulk_stream("order", seed, epoch).permutation(num_rows).tolist()
        epoch += 1


# AdamW with moments of 32 or 8 bit: its values set per step, its moments as plain tensors.
#
# optimizer = make_optimizer("adamw_8bit", parameters)
# set_values(optimizer, step)
# plain_moments(optimizer, parameter)        # {"exp_avg": ...}, or its parts in 8 bit


OptimizerKind = Literal["adamw", "adamw_8bit"]
"""`adamw_8bit` is torchao's: 2 bytes of moments per weight in place of 8."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per parameter, by torch's names, besides the step count."""
_PARTS = ("codes", "scale")
"""What an 8-bit moment is made of, by torchao's names; its code book is a constant."""


def make_optimizer(
    kind: OptimizerKind, parameters: Sequence[nn.Parameter], *, is_flat: bool = False
) -> torch.optim.Optimizer:
    """With `is_flat` there are few and long parameters, which are updated in one operation each."""
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
    """Learning rate and the rest, for the next step."""
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
    """The moments themselves, not copies; those of 8 bit in parts: `exp_avg.codes`, ..."""
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
    """Moments of zero after so many steps, to be written over; weights keep their bits."""
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
