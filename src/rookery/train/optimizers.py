"""AdamW with moments of 32 or 8 bit: its values set per step, its moments as plain tensors.

optimizer = make_optimizer("adamw_8bit", parameters)
set_values(optimizer, step)
plain_moments(optimizer, parameter)        # {"exp_avg": ...}, or its parts in 8 bit
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rookery.errors import TrainError
from rookery.types import OptimStep

__all__ = ["OptimizerKind", "make_optimizer", "make_state", "plain_moments", "set_values"]

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
            "The optimizer adamw_8bit needs torchao: pip install 'rookery[optim]', or write adamw."
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
