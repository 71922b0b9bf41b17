"""One adapter in training: its weights, gradients, AdamW moments and step count.

Weights, gradients and moments are float32 whatever the model's dtype.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from pathlib import Path

import torch
from torch import nn

from rookery.errors import TrainError, boundary
from rookery.train.state import read_state, write_state
from rookery.types import Adapter, Json, LoraFactors, OptimStep
from rookery.weights import make_adapter

__all__ = ["Trainee"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per parameter, by torch's names, besides the step count."""


class Trainee:
    """Starts from an adapter, whose ranks, scales and layers it keeps. Not for several threads."""

    def __init__(self, start: Adapter, *, name: str, device: torch.device) -> None:
        self.num_steps = 0
        """Optimizer steps taken."""
        self.gradients: list[torch.Tensor] | None = None
        """Since the last step, of A then B, layer after layer; None: no batch came."""
        self._name, self._base = name, start.base
        self._device = device
        self.factors = {
            layer: LoraFactors(a=_leaf(lora.a, device), b=_leaf(lora.b, device), scale=lora.scale)
            for layer, lora in sorted(start.factors.items())
        }
        self.parameters = [t for lora in self.factors.values() for t in (lora.a, lora.b)]
        self._optimizer = torch.optim.AdamW(self.parameters)

    def adapter(self) -> Adapter:
        """The current weights, copied: float32, on the CPU."""
        factors = {
            layer: LoraFactors(a=_copy(lora.a), b=_copy(lora.b), scale=lora.scale)
            for layer, lora in self.factors.items()
        }
        return make_adapter(self._name, base=self._base, factors=factors)

    def add_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        before = self.gradients or [torch.zeros_like(p) for p in self.parameters]
        self.gradients = [old + new for old, new in zip(before, gradients, strict=True)]

    def step(self, step: OptimStep) -> float:
        """AdamW over the gradients, clipped by their common norm, which is returned.

        Without gradients they are zeros. Gradients that are not finite are dropped.
        """
        _check_step(step)
        gradients = self.gradients or [torch.zeros_like(p) for p in self.parameters]
        self.gradients = None
        norm = nn.utils.get_total_norm(gradients)
        self.require_finite("gradient", norm)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if step.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, step.max_grad_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"], group["eps"] = step.learning_rate, step.epsilon
            group["betas"] = (step.beta1, step.beta2)
            group["weight_decay"] = step.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return norm.item()

    def require_finite(self, what: str, value: torch.Tensor) -> None:
        if not torch.isfinite(value):
            raise TrainError(
                f"Step {self.num_steps + 1}: the {what} is {value.item():g}. The training has "
                "diverged: lower the learning rate."
            )

    def save(self, path: Path) -> None:
        """Weights, moments, step count and gradients not yet applied, as one file."""
        tensors = dict(self._named("weights", self.parameters))
        for moment in _MOMENTS if self.num_steps else ():
            found = [self._optimizer.state[p][moment] for p in self.parameters]
            tensors |= self._named(moment, found)
        if self.gradients is not None:
            tensors |= self._named("gradients", self.gradients)
        scales: dict[str, Json] = {name: lora.scale for name, lora in self.factors.items()}
        document: dict[str, Json] = {"num_steps": self.num_steps, "scales": scales}
        write_state(path, tensors=tensors, document=document)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, exactly; nothing changes when it does not fit."""
        tensors, document = read_state(path)
        num_steps = self._check_fits(path, tensors, document)

        def saved(kind: str) -> list[torch.Tensor]:
            return [tensors[name].to(self._device) for name in self._named(kind, self.parameters)]

        with torch.no_grad():
            for parameter, weights in zip(self.parameters, saved("weights"), strict=True):
                parameter.copy_(weights)
        self._optimizer.state.clear()
        if num_steps:
            moments = [saved(moment) for moment in _MOMENTS]
            for parameter, *found in zip(self.parameters, *moments, strict=True):
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(num_steps)),
                    **dict(zip(_MOMENTS, found, strict=True)),
                }
        has_gradients = any(name.startswith("gradients/") for name in tensors)
        self.gradients = saved("gradients") if has_gradients else None
        self.num_steps = num_steps

    def _named(self, kind: str, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of all parameters by their names in a state file."""
        names = [f"{kind}/{layer}/{factor}" for layer in self.factors for factor in ("a", "b")]
        return dict(zip(names, values, strict=True))

    def _check_fits(
        self, path: Path, tensors: Mapping[str, torch.Tensor], document: Mapping[str, Json]
    ) -> int:
        """Raise TrainError unless the state is complete and of this shape; its step count."""
        num_steps = document.get("num_steps")
        kinds = {name.partition("/")[0] for name in tensors}
        if not isinstance(num_steps, int) or kinds - {"gradients"} != {
            "weights",
            *(_MOMENTS if num_steps else ()),
        }:
            raise TrainError(f"{path} is not a whole trainer state: give a file that `save` wrote.")
        need = {k: t.shape for kind in kinds for k, t in self._named(kind, self.parameters).items()}
        have = {name: tensor.shape for name, tensor in tensors.items()}
        scales = {layer: lora.scale for layer, lora in self.factors.items()}
        if have != need or document.get("scales") != scales:
            raise TrainError(
                f"{path} is the state of a trainer with other layers, ranks or scales: make the "
                "trainer from an adapter of the same shape as the one that was saved."
            )
        return num_steps


def _check_step(step: OptimStep) -> None:
    for name in ("learning_rate", "weight_decay", "max_grad_norm"):
        value = _number(step, name)
        if not (isfinite(value) and value >= 0):
            raise TrainError(f"The {name} is {value:g}; it must be 0 or more.")
    for name in ("beta1", "beta2"):
        value = _number(step, name)
        if not 0 <= value < 1:
            raise TrainError(f"The {name} is {value:g}; it must be at least 0 and below 1.")
    epsilon = _number(step, "epsilon")
    if not (isfinite(epsilon) and epsilon > 0):
        raise TrainError(f"The epsilon is {epsilon:g}; it must be above 0.")


def _number(step: OptimStep, name: str) -> float:
    value: object = getattr(step, name)
    what = f"The {name} is not a number that a float can hold"
    if not isinstance(value, Real):
        raise TrainError(f"{what}: {value!r}.")
    with boundary(TrainError, what, foreign=(OverflowError,)):
        return float(value)


def _leaf(tensor: torch.Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(tensor.detach().to(device=device, dtype=torch.float32, copy=True))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True)
