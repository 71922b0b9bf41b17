"""The factors of one trainee as the slot of a pass, and the gradients that come back.

    factors = slot_factors(lora_by_layer, model)
    ... model.layers(..., rows=one_slot(num_rows, factors, device=model.device))

They belong to the pass alone: the model's own slots stay what they are, and other threads may run
the same model meanwhile.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.slots.rows import SlotFactors
from rookery.types import LoraFactors

__all__ = ["one_slot", "slot_factors"]


def slot_factors(factors: Mapping[str, LoraFactors], model: SlottedModel) -> dict[str, SlotFactors]:
    """A [1, rank, in] and scale * B [1, out, rank] of each layer; gradients flow back through."""
    slots = {
        name: (lora.a.to(model.dtype)[None], (lora.b * lora.scale).to(model.dtype)[None])
        for name, lora in factors.items()
    }
    return {n: _as_loaded(*own) for n, own in slots.items()} if model.is_exact else slots


def _as_loaded(a: torch.Tensor, b: torch.Tensor) -> SlotFactors:
    """With a rank of 2 at least, as the slots of an engine: see `SlottedLinear.reserve`."""
    room = max(0, 2 - a.shape[1])
    return functional.pad(a, (0, 0, 0, room)), functional.pad(b, (0, room))


def one_slot(
    num_rows: int, factors: Mapping[str, SlotFactors], *, device: torch.device
) -> SlotRows:
    """All rows in slot 0 of the factors, as one block: one plain product per factor."""
    segment = Segment(slot=0, rows=range(num_rows), block=num_rows)
    return SlotRows([segment], num_rows=num_rows, device=device, factors=factors)
