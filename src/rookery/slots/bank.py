"""The adapter slots of one model: checks an adapter against the model, then puts it in a slot."""

import difflib
from collections.abc import Mapping

import torch

from rookery.errors import AdapterError
from rookery.model_names import is_named
from rookery.slots.linear import SlottedLinear
from rookery.types import Adapter, LoraFactors

__all__ = ["SlotBank"]


class SlotBank:
    """Slots 0, 1, 2, ... across all slotted layers of a model.

    Every adapted layer holds the same number of slots, a power of two: loading many adapters
    copies few times, and any slot number is valid in any adapted layer.
    """

    def __init__(self, layers: Mapping[str, SlottedLinear], *, base_names: frozenset[str]) -> None:
        self._layers = layers
        self._base_names = base_names
        self._num_slots = 1

    def check(self, adapter: Adapter, *, max_rank: int) -> None:
        """Raise AdapterError unless the adapter fits: base, rank, targets, shapes, values."""
        who = f"adapter {adapter.name!r}"
        if adapter.base and not is_named(adapter.base, self._base_names):
            raise AdapterError(
                f"{who} was made for {adapter.base!r}, this model is "
                f"{' or '.join(sorted(self._base_names))}: load it on its own base model, or "
                "correct base_model_name_or_path in its adapter_config.json if they are the same."
            )
        if adapter.rank > max_rank:
            raise AdapterError(
                f"{who} has rank {adapter.rank}, at most {max_rank} is allowed: raise max_rank or "
                "reduce its rank."
            )
        if not adapter.factors:
            raise AdapterError(f"{who} adapts no layer.")
        for name, factors in adapter.factors.items():
            self._check_layer(who, name, factors)

    def _check_layer(self, who: str, name: str, factors: LoraFactors) -> None:
        layer = self._layers.get(name)
        if layer is None:
            near = difflib.get_close_matches(name, self._layers, n=1)
            hint = f" The nearest is {near[0]}." if near else ""
            raise AdapterError(f"{who} adapts {name}, which is not a linear layer here.{hint}")
        expected = (layer.in_features, layer.out_features)
        got = (factors.a.shape[1], factors.b.shape[0])
        if got != expected or factors.a.shape[0] != factors.b.shape[1]:
            raise AdapterError(
                f"{who}: {name} has A {tuple(factors.a.shape)} and B {tuple(factors.b.shape)}; "
                f"this model needs [r, {expected[0]}] and [{expected[1]}, r]."
            )
        for factor, tensor in (("lora_A", factors.a), ("lora_B", factors.b)):
            if not torch.isfinite(tensor).all():
                raise AdapterError(f"{who}: {name}.{factor} holds NaN or infinity.")

    def put(self, slot: int, adapter: Adapter) -> None:
        """Write a checked adapter into a slot. The scale is folded into B."""
        self.clear(slot)
        self._num_slots = max(self._num_slots, 1 << slot.bit_length())
        for name, layer in self._layers.items():
            if name in adapter.factors or layer.a is not None:
                rank = adapter.factors[name].a.shape[0] if name in adapter.factors else 0
                layer.reserve(num_slots=self._num_slots, rank=rank)
        for name, factors in adapter.factors.items():
            self._layers[name].put(slot, factors)

    def clear(self, slot: int) -> None:
        """Zero a slot: rows that still name it compute the base model."""
        for layer in self._layers.values():
            layer.clear(slot)
