"""Puts trainable factors into a model's layers for one forward and backward pass.

    with mounted(model, factors) as parameters:
        loss = ...                                    # rows of slot 0 see the factors
        gradients(loss, parameters, factors)          # with respect to A and to B without scale

The model is as it was afterwards: trainers of one model take turns and leave nothing behind.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.types import LoraFactors

__all__ = ["Mounted", "gradients", "mounted", "one_slot"]

Mounted = dict[str, tuple[nn.Parameter, nn.Parameter]]
"""By layer, the stacks [1, rank, in] and [1, out, rank] that hold A and scale * B."""

_LOCKS: WeakKeyDictionary[SlottedModel, threading.Lock] = WeakKeyDictionary()
"""A pass owns its model: the layers hold its factors and its rows. Held by the thread of the pass;
other trainers of the same model wait for it."""
_LOCKS_GUARD = threading.Lock()


@contextmanager
def mounted(model: SlottedModel, factors: Mapping[str, LoraFactors]) -> Iterator[Mounted]:
    """Give every layer these factors alone, in the model's dtype; then put back what was there."""
    with _lock_of(model):
        before = {name: (linear.a, linear.b) for name, linear in model.linears.items()}
        parameters: Mounted = {}
        try:
            for name, linear in model.linears.items():
                linear.a = linear.b = None
                if name in factors:
                    linear.a, linear.b = parameters[name] = _stack(model, factors[name])
            yield parameters
        finally:
            for name, (a, b) in before.items():
                model.linears[name].a, model.linears[name].b = a, b


def gradients(
    loss: torch.Tensor, parameters: Mounted, factors: Mapping[str, LoraFactors]
) -> list[torch.Tensor]:
    """float32 gradients of A, then of B, layer after layer in the order of `factors`."""
    flat = [parameter for name in factors for parameter in parameters[name]]
    found = iter(torch.autograd.grad(loss, flat))
    result = []
    for lora in factors.values():
        # The layer holds scale * B, and d(scale * B) / dB = scale.
        result += [next(found)[0].float(), next(found)[0].float() * lora.scale]
    return result


def one_slot(num_rows: int, *, device: torch.device) -> SlotRows:
    """All rows in slot 0, as one block: one plain product per factor."""
    segment = Segment(slot=0, rows=range(num_rows), block=num_rows)
    return SlotRows([segment], num_rows=num_rows, device=device)


def _stack(model: SlottedModel, lora: LoraFactors) -> tuple[nn.Parameter, nn.Parameter]:
    a = lora.a.detach().to(device=model.device, dtype=model.dtype, copy=True)
    b = (lora.b.detach() * lora.scale).to(device=model.device, dtype=model.dtype)
    return nn.Parameter(a[None]), nn.Parameter(b[None])


def _lock_of(model: SlottedModel) -> threading.Lock:
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(model, threading.Lock())
