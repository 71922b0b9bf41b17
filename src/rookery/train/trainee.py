"""Weights in training with their gradients, AdamW moments and step count.

Weights and gradients are float32 whatever the model's dtype; so are moments but for `adamw_8bit`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rookery.errors import TrainError, boundary
from rookery.runs.disk import disk_boundary, new_scratch, sync_file, sync_folder
from rookery.train.processes import fill, whole
from rookery.train.schedule import (
    OptimizerKind,
    make_optimizer,
    make_state,
    plain_moments,
    set_values,
)
from rookery.types import Json, OptimStep

__all__ = ["Trainee", "read_state"]

# A trainee's state as one safetensors file: tensors, and a JSON object in its header.
#
#     write_state(path, tensors={"weights/model.layers.0.mlp.up_proj/a": ...}, document={...})
#     tensors, document = read_state(path)
#
# The file is written aside and renamed into place: a reader sees the old state or the new one.


_HEADER = "rookery_trainer"
"""Metadata key of the JSON object; a file without it is not a trainer's state."""


def write_state(
    path: Path, *, tensors: Mapping[str, torch.Tensor], document: dict[str, Json]
) -> None:
    """Replace `path` durably, making its parent folders."""
    if path.is_dir():
        raise TrainError(f"{path} is a folder; a trainer's state is a file: name one in it.")
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with boundary(TrainError, f"making the folder {path.parent}", foreign=(OSError,)):
        path.parent.mkdir(parents=True, exist_ok=True)
    aside = new_scratch(path.parent)
    foreign = (SafetensorError,)
    with disk_boundary(f"Writing {path}"), boundary(TrainError, f"writing {path}", foreign=foreign):
        try:
            # Writes straight to the file: serialising first would hold a second copy in memory.
            save_file(plain, aside, metadata={_HEADER: json.dumps(document)})
            sync_file(aside)
            os.replace(aside, path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """Read a file of `write_state`, tensors on the CPU; TrainError if it is any other file."""
    if not path.is_file():
        raise TrainError(f"There is no trainer state {path}: give a file that `save` wrote.")
    with (
        boundary(TrainError, f"reading {path}", foreign=(OSError, SafetensorError, ValueError)),
        safe_open(str(path), framework="pt") as file,
    ):
        header = (file.metadata() or {}).get(_HEADER)
        if header is None:
            raise TrainError(
                f"{path} is not a trainer state but another safetensors file; an adapter "
                "folder is a start (init_from), a trainer state is what `save` wrote."
            )
        document: dict[str, Json] = json.loads(header)
        return {name: file.get_tensor(name) for name in file.keys()}, document  # noqa: SIM118


class Trainee:
    """Named float32 parameters. Not thread-safe.

    A saved state is restored only if its `fixed` equals this one's. `optimized` are the tensors
    that the optimizer updates if the parameters are views of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        fixed: Mapping[str, Json],
        optimizer: OptimizerKind = "adamw",
        optimized: Sequence[nn.Parameter] = (),
    ) -> None:
        self.num_steps = 0
        self.gradients: list[torch.Tensor] | None = None
        """Sum since the last step, in the order of the parameters; None if no batch came."""
        self.parameters: Sequence[torch.Tensor] = list(parameters.values())
        self.names = list(parameters)
        self._is_8_bit = optimizer == "adamw_8bit"
        self._fixed = {**fixed, "optimizer": optimizer} if self._is_8_bit else dict(fixed)
        leaves = [p for p in self.parameters if isinstance(p, nn.Parameter)]
        self._optimized = list(optimized) or leaves
        self._optimizer = make_optimizer(optimizer, self._optimized, is_flat=bool(optimized))

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The tensors that passes compute with and differentiate by, one per parameter."""
        return self.parameters

    def refresh_leaves(self) -> None:
        """Update the leaves after the parameters changed; here they are the same tensors."""

    def zeros(self) -> list[torch.Tensor]:
        """Return zero gradients to add to, in the order of the parameters."""
        return [torch.zeros_like(p) for p in self.parameters]

    def add_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Add to the gradients. The first call takes ownership of the tensors."""
        if self.gradients is None:
            self.gradients = gradients
            return
        for total, gradient in zip(self.gradients, gradients, strict=True):
            total += gradient

    def step(self, step: OptimStep) -> float:
        """Step AdamW with gradients clipped by their total norm. Return the norm before clipping.

        If there are no gradients, they are zeros. Gradients that are not finite are dropped and
        raise TrainError.
        """
        _check_step(step)
        gradients = self._for_optimizer(self.gradients or self.zeros())
        self.gradients = None
        norm = nn.utils.get_total_norm(gradients)
        self.require_finite("gradient", whole(norm))
        for parameter, gradient in zip(self._optimized, gradients, strict=True):
            parameter.grad = gradient
        if step.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self._optimized, step.max_grad_norm, norm)
        set_values(self._optimizer, step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.refresh_leaves()
        self.num_steps += 1
        return whole(norm).item()

    def require_finite(self, what: str, value: torch.Tensor) -> None:
        if not torch.isfinite(value):
            raise TrainError(
                f"Step {self.num_steps + 1}: the {what} is {value.item():g}. The training has "
                "diverged: lower the learning rate."
            )

    def save(self, path: Path, *, is_writer: bool = True) -> None:
        """Write weights, moments, step count and unapplied gradients as one file. If they are
        spread over processes, all processes call this and only the writer writes."""
        tensors = dict(self._named("weights", self.parameters))
        tensors |= self._moments() if self.num_steps else {}
        if self.gradients is not None:
            tensors |= self._named("gradients", self.gradients)
        tensors = {name: whole(tensor) for name, tensor in tensors.items()}
        document: dict[str, Json] = {"num_steps": self.num_steps, **self._fixed}
        if is_writer:
            write_state(path, tensors=tensors, document=document)

    def load(self, path: Path) -> None:
        """Restore a file of `save`, exactly; nothing changes if it does not fit."""
        tensors, document = read_state(path)
        num_steps = self._check_fits(path, tensors, document)
        has_gradients = any(name.startswith("gradients/") for name in tensors)
        self.gradients = self.zeros() if has_gradients else None
        self._optimizer.state.clear()
        current = self._named("weights", self.parameters)
        if num_steps:
            make_state(self._optimizer, num_steps=num_steps)
            current |= self._moments()
        if self.gradients is not None:
            current |= self._named("gradients", self.gradients)
        with torch.no_grad():
            for name, tensor in current.items():
                fill(tensor, tensors[name])
        self.num_steps = num_steps
        self.refresh_leaves()

    def _for_optimizer(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the tensors that the optimizer updates."""
        return gradients

    def _moments(self) -> dict[str, torch.Tensor]:
        """Return the moments by their names in a state file."""
        return {
            f"{moment}/{name}": tensor
            for name, parameter in zip(self.names, self._optimized, strict=True)
            for moment, tensor in plain_moments(self._optimizer, parameter).items()
        }

    def _named(self, kind: str, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values of all parameters by their names in a state file."""
        return {f"{kind}/{name}": x for name, x in zip(self.names, values, strict=True)}

    def _check_fits(
        self, path: Path, tensors: Mapping[str, torch.Tensor], document: Mapping[str, Json]
    ) -> int:
        """Raise TrainError unless the state is complete and fits; return its step count."""
        num_steps = document.get("num_steps")
        kinds = {name.partition("/")[0].partition(".")[0] for name in tensors}
        moments = {"exp_avg", "exp_avg_sq"} if num_steps else set()
        if not isinstance(num_steps, int) or kinds - {"gradients"} != {"weights", *moments}:
            raise TrainError(f"{path} is not a whole trainer state: give a file that `save` wrote.")
        plain = [kind for kind in kinds if kind in ("weights", "gradients") or not self._is_8_bit]
        need = {k: t.shape for kind in plain for k, t in self._named(kind, self.parameters).items()}
        have = {n: t.shape for n, t in tensors.items() if n.partition("/")[0] in plain}
        is_complete = self._is_8_bit or len(have) == len(tensors)
        is_same = all(document.get(key) == value for key, value in self._fixed.items())
        if have != need or not (is_complete and is_same):
            raise TrainError(
                f"{path} is the state of a trainer with other layers, ranks or scales: make the "
                "trainer from weights of the same shape as those that were saved."
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
