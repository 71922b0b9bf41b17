"""The slots that vLLM keeps for adapters on the device, written whole from a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .buffer import AdapterBuffer

__all__ = ["SlotWriter", "find_parts"]


@dataclass(frozen=True)
class _Plan:
    """How a slot is written from buffers of one layout. Factors by their place in `SlotWriter`."""

    sizes: list[int]
    """The buffer cut in pieces: factors, and the gaps between them."""
    places: list[tuple[int, int, tuple[int, int] | None]]
    """Of every factor its piece, its place, and its shape where it does not fill its slot."""
    unfilled: list[int]
    """Places that no factor fills."""


class SlotWriter:
    """Writes whole slots from buffers, as `set_lora` and `reset_lora` of all layers would."""

    def __init__(self, inner: Any, device: Any) -> None:
        self._device = device
        self._places: dict[str, tuple[int, int]] = {}
        """Of a layer's A and B."""
        self._slots: list[tuple[torch.Tensor, ...]] = []
        """Of every place: the factor's memory in every slot. vLLM never moves it, and a view of
        each would take longer to make than all of them to fill."""
        self._flat: list[tuple[torch.Tensor, ...]] = []
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        plain: set[int] = set()
        for name, (module, i) in find_parts(inner).items():
            if _is_plain(module):
                plain.add(id(module))
                self._places[name] = len(self._slots), len(self._slots) + 1
                for stacked in (module.lora_a_stacked[i], module.lora_b_stacked[i]):
                    self._slots.append(stacked[:, 0].unbind(0))
                    self._flat.append(stacked.view(len(stacked), -1).unbind(0))
        self._others = [m for m in inner.modules.values() if id(m) not in plain]

    def fits(self, layers: tuple[Any, ...]) -> bool:
        """Whether every layer is a whole linear one that can be written directly."""
        return all(layer[0] in self._places for layer in layers)

    def set_lora(self, index: int, buffer: AdapterBuffer, _: AdapterBuffer) -> None:
        """Called by vLLM as if this were a layer."""
        import torch

        plan = self._plans.get(buffer.layers)
        if plan is None:
            plan = self._plans[buffer.layers] = self._plan(buffer.layers, buffer.itemsize)
        targets, sources = [], []
        memory = buffer.on(self._device)
        pieces = torch.split(memory[: sum(plan.sizes)], plan.sizes)
        for piece, place, shape in plan.places:
            if shape is None:
                targets.append(self._flat[place][index])
                sources.append(pieces[piece])
            else:
                targets.append(self._slots[place][index][: shape[0], : shape[1]])
                sources.append(pieces[piece].view(shape))
        for module in self._others:
            module.reset_lora(index)
        if plan.unfilled:
            torch._foreach_zero_([self._flat[place][index] for place in plan.unfilled])
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def _plan(self, layers: tuple[Any, ...], itemsize: int) -> _Plan:
        copies: list[tuple[int, int, tuple[int, int]]] = []
        for name, rank, size_in, size_out, offset_a, offset_b in layers:
            place_a, place_b = self._places[name]
            copies.append((offset_a // itemsize, place_a, (rank, size_in)))
            copies.append((offset_b // itemsize, place_b, (size_out, rank)))
        copies.sort()
        sizes: list[int] = []
        places: list[tuple[int, int, tuple[int, int] | None]] = []
        end = 0
        for begin, place, shape in copies:
            if begin > end:
                sizes.append(begin - end)
            is_whole = tuple(self._slots[place][0].shape) == shape
            places.append((len(sizes), place, None if is_whole else shape))
            sizes.append(shape[0] * shape[1])
            end = begin + sizes[-1]
        filled = {place for _, place, shape in places if shape is None}
        unfilled = [place for place in range(len(self._slots)) if place not in filled]
        return _Plan(sizes=sizes, places=places, unfilled=unfilled)


def find_parts(inner: Any) -> dict[str, tuple[Any, int]]:
    """Every layer that takes adapters, such as `model.layers.0.self_attn.q_proj`, as the part of
    vLLM's layer that it is."""
    places: dict[str, tuple[Any, int]] = {}
    for name, module in inner.modules.items():
        stacked = getattr(module, "lora_a_stacked", None)
        parent, _, leaf = name.rpartition(".")
        parts = inner.packed_modules_mapping.get(leaf, [leaf])
        if isinstance(stacked, tuple) and len(parts) == len(stacked):
            places.update({f"{parent}.{part}": (module, i) for i, part in enumerate(parts)})
    return places


def _is_plain(module: Any) -> bool:
    """A linear layer, whole on this GPU, that vLLM writes factor by factor."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    kind = type(module)
    known = (BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora)
    return (
        isinstance(module, BaseLinearLayerWithLoRA)
        and kind.reset_lora is BaseLinearLayerWithLoRA.reset_lora
        and kind.set_lora in known
        and module.tp_size == 1
    )
