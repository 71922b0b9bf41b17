"""An adapter in training. All its factors lie in one tensor, and so do their gradients and moments:
a step is a few long operations, and moving a trainee is moving four tensors.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from rookery.train.optimizers import plain_moments
from rookery.train.trainee import Trainee
from rookery.types import Adapter, Json, LoraFactors
from rookery.weights import make_adapter

__all__ = ["FlatTensors", "LoraTrainee"]


class FlatTensors(list[torch.Tensor]):
    """Views of one tensor, `whole`, one after another."""

    def __init__(self, whole: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        parts = torch.split(whole, [shape.numel() for shape in shapes])
        super().__init__(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        self.whole = whole


class LoraTrainee(Trainee):
    """It keeps the ranks, scales and layers of the adapter it starts from."""

    def __init__(self, start: Adapter, *, name: str, device: torch.device) -> None:
        self._name, self._base = name, start.base
        own = dict(sorted(start.factors.items()))
        tensors = [tensor for lora in own.values() for tensor in (lora.a, lora.b)]
        self.layers = {layer: place for place, layer in enumerate(own)}
        """The place of each layer: its factors are parameters 2 * place and 2 * place + 1."""
        self._scales = {layer: lora.scale for layer, lora in own.items()}
        self._shapes = [tensor.shape for tensor in tensors]
        flat = torch.cat([tensor.detach().to(torch.float32).reshape(-1) for tensor in tensors])
        self._flat = nn.Parameter(flat.to(device=device, copy=True))
        scales: Json = dict(self._scales)
        names = [f"{layer}/{letter}" for layer in own for letter in "ab"]
        super().__init__(
            dict(zip(names, self._views(), strict=True)),
            fixed={"scales": scales},
            optimized=[self._flat],
        )
        self._set_views()

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._flat.device

    @property
    def nbytes(self) -> int:
        """What all its tensors take, gradients and moments too, wherever they are."""
        return 4 * 4 * sum(shape.numel() for shape in self._shapes)

    def adapter(self) -> Adapter:
        """The current weights, copied: float32, on the CPU."""
        factors = {
            layer: LoraFactors(a=_copy(lora.a), b=_copy(lora.b), scale=lora.scale)
            for layer, lora in self.factors.items()
        }
        return make_adapter(self._name, base=self._base, factors=factors)

    def snapshot(self) -> Adapter:
        """The current weights, copied where they are, with the step as their version: a hash would
        read all of them."""
        views = FlatTensors(self._flat.detach().clone(), self._shapes)
        factors = {
            layer: LoraFactors(
                a=views[2 * place], b=views[2 * place + 1], scale=self._scales[layer]
            )
            for layer, place in self.layers.items()
        }
        version = f"step-{self.num_steps}"
        return Adapter(name=self._name, base=self._base, factors=factors, version=version)

    def zeros(self) -> list[torch.Tensor]:
        return FlatTensors(torch.zeros_like(self._flat.detach()), self._shapes)

    def add_gradients(self, gradients: list[torch.Tensor]) -> None:
        if isinstance(self.gradients, FlatTensors) and isinstance(gradients, FlatTensors):
            self.gradients.whole += gradients.whole
        else:
            super().add_gradients(gradients)

    def move(self, device: torch.device) -> None:
        """Its tensors to another device."""
        self._flat.data = self._flat.data.to(device)
        state = self._optimizer.state[self._flat] if self.num_steps else {}
        state.update({name: tensor.to(device) for name, tensor in state.items()})
        if self.gradients is not None:
            whole = self._for_optimizer(self.gradients)[0].to(device)
            self.gradients = FlatTensors(whole, self._shapes)
        self._set_views()

    def park(self, path: Path) -> None:
        """Its tensors to a file."""
        self.save(path)
        self.gradients = None
        self._optimizer.state.clear()
        self._flat.data = torch.empty(0)

    def unpark(self, path: Path, *, device: torch.device) -> None:
        """What `park` wrote, back again."""
        num_weights = sum(shape.numel() for shape in self._shapes)
        self._flat.data = torch.empty(num_weights, device=device)
        self._set_views()
        self.load(path)

    def _for_optimizer(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(gradients, FlatTensors):
            return [gradients.whole]
        return [torch.cat([gradient.reshape(-1) for gradient in gradients])]

    def _moments(self) -> dict[str, torch.Tensor]:
        moments = plain_moments(self._optimizer, self._flat)
        return {
            name: tensor
            for moment, whole in moments.items()
            for name, tensor in self._named(moment, FlatTensors(whole, self._shapes)).items()
        }

    def _views(self) -> FlatTensors:
        return FlatTensors(self._flat.detach(), self._shapes)

    def _set_views(self) -> None:
        self.parameters = self._views()
        self.factors = {
            layer: LoraFactors(
                a=self.parameters[2 * place],
                b=self.parameters[2 * place + 1],
                scale=self._scales[layer],
            )
            for layer, place in self.layers.items()
        }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True)
