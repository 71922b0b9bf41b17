"""Writes vLLM's adapter slots on the device as a whole, from a buffer or from seeds of a
population. Members that arrived since the last step are computed together."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .population import PopulationMember

__all__ = ["SlotWriter", "find_parts", "install_token_index"]


if TYPE_CHECKING:
    import torch

    from .shared_memory import AdapterBuffer


@dataclass(frozen=True)
class _Plan:
    """How to write a slot from buffers of one layout; places index `SlotWriter._slots`."""

    sizes: list[int]
    """Sizes of the pieces of the buffer: factors, and the gaps between them."""
    places: list[tuple[int, int, tuple[int, int] | None]]
    """Piece and place of every factor, and its shape if it does not fill its slot."""
    unfilled: list[int]
    """Places that no factor fills."""


class SlotWriter:
    """Writes whole slots from buffers, like `set_lora` and `reset_lora` of all layers."""

    def __init__(self, inner: Any, device: Any) -> None:
        self._device = device
        self._places: dict[str, tuple[int, int]] = {}
        """Places of the A and B of a layer."""
        self._slots: list[tuple[torch.Tensor, ...]] = []
        """Per place, the factor's memory in every slot. vLLM never moves it, and making the views
        anew would take longer than filling them."""
        self._flat: list[tuple[torch.Tensor, ...]] = []
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._waiting: dict[int, PopulationMember] = {}
        """Members that are not computed yet, by slot."""
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
        """True if every layer is a whole linear one that can be written directly."""
        return all(layer[0] in self._places for layer in layers)

    def set_lora(self, index: int, source: AdapterBuffer | PopulationMember, _: Any) -> None:
        """Called by vLLM as if this were a layer. A member's slot waits for `fill`."""
        if isinstance(source, PopulationMember):
            self._waiting[index] = source
        else:
            self._waiting.pop(index, None)
            memory = source.on(self._device)
            self._write(index, source.layers, memory, itemsize=source.itemsize)

    def fill(self) -> None:
        """Compute the waiting members and write their slots. Call it before the next step, and
        before anything else is written to a slot of theirs."""
        while self._waiting:
            first = next(iter(self._waiting.values()))
            alike = [i for i, m in self._waiting.items() if m.centre is first.centre]
            members = [self._waiting.pop(index) for index in alike]
            self._fill(alike, members, first)

    def _fill(
        self, indices: list[int], members: list[PopulationMember], first: PopulationMember
    ) -> None:
        seeds, amounts = [m.seed for m in members], [m.amount for m in members]
        dtype = self._flat[0][0].dtype
        for part, lines in first.centre.members(seeds, amounts, dtype):
            for index, line in zip(indices[part], lines, strict=True):
                self._write(index, first.layers, line, itemsize=1)

    def _write(
        self, index: int, layers: tuple[Any, ...], memory: torch.Tensor, *, itemsize: int
    ) -> None:
        """Fill a slot with the factors in `memory`, which begin where `layers` says."""
        import torch

        plan = self._plans.get(layers)
        if plan is None:
            plan = self._plans[layers] = self._plan(layers, itemsize)
        targets, sources = [], []
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
    """Return, for every layer that takes adapters, such as `model.layers.0.self_attn.q_proj`,
    vLLM's layer and the part of it."""
    places: dict[str, tuple[Any, int]] = {}
    for name, module in inner.modules.items():
        stacked = getattr(module, "lora_a_stacked", None)
        parent, _, leaf = name.rpartition(".")
        parts = inner.packed_modules_mapping.get(leaf, [leaf])
        if isinstance(stacked, tuple) and len(parts) == len(stacked):
            places.update({f"{parent}.{part}": (module, i) for i, part in enumerate(parts)})
    return places


def _is_plain(module: Any) -> bool:
    """True for a linear layer, whole on this GPU, that vLLM writes factor by factor."""
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


if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


# The slot of each token's adapter, computed on the CPU and sent to the device in one piece.
#
# vLLM computes it whenever the batch changes, in some forty small kernels and several waits for the
# device, which end all overlap between steps. `TokenIndex` has vLLM's own code do so on a twin of
# its tables in host memory, then copies the twin to the device.


logger = logging.getLogger(__name__)
_ALIGNED = 16


def install_token_index(inner: Any, device: Any) -> bool:
    """Have a TokenIndex keep every table of this worker's adapter manager; True if it worked. Not
    used if a twin differs from vLLM's own result in any number."""
    if device.type != "cuda":
        return False
    try:
        tables = list(inner.punica_wrapper_mapping.values())
        indexes = [TokenIndex(table, device) for table in tables]
        is_equal = all(index.agrees(inner) for index in indexes)
    except Exception:  # on any difference of another version, its own code stays
        logger.warning("adapters' tables stay on the device", exc_info=True)
        return False
    finally:
        # The tables hold a test now, which vLLM must not take for its last batch.
        inner._last_mapping = None
    if is_equal:
        for table, index in zip(tables, indexes, strict=True):
            table.update_metadata = index.update
    return is_equal


class TokenIndex:
    """Twin of one `PunicaWrapper`, in one stretch of memory."""

    def __init__(self, table: Any, device: Any) -> None:
        import torch

        self._table, self._device = table, device
        self._stock = table.update_metadata
        on_device = [t for _, _, t in _tensors(table) if t.device.type == device.type]
        self._targets = [tensor.view(-1).view(torch.uint8) for tensor in on_device]
        self._sizes = []
        """Sizes of every tensor and of the gap behind it, in bytes."""
        for target in self._targets:
            self._sizes += [len(target), -len(target) % _ALIGNED]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.uint8)
        self._twin = self._make_twin()

    def _make_twin(self) -> Any:
        """Copy the table, with its tensors on the device replaced by parts of `_flat`."""
        import torch

        parts = iter(torch.split(self._flat, self._sizes)[::2])
        twin = copy.copy(self._table)
        for name, value in vars(twin).items():
            if _holds_tensors(value):
                setattr(twin, name, copy.copy(value))
        for owner, name, tensor in list(_tensors(twin)):
            if tensor.device.type == self._device.type:
                setattr(owner, name, next(parts).view(tensor.dtype).view(tensor.shape))
        twin.device = torch.device("cpu")
        return twin

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Replaces `update_metadata`."""
        import torch

        self._twin.update_metadata(*args, **kwargs)
        # A new page-locked copy each time, as the device may not have read the last one yet.
        flat = self._flat.pin_memory() if self._device.type == "cuda" else self._flat.clone()
        sent = flat.to(self._device, non_blocking=True)
        sources = torch.split(sent, self._sizes)[::2]
        torch._foreach_copy_(self._targets, list(sources), non_blocking=True)
        for name, value in vars(self._twin).items():
            if isinstance(value, (bool, int)):
                setattr(self._table, name, value)

    def agrees(self, inner: Any) -> bool:
        """True if both ways give equal numbers, for a batch with adapters and one without."""
        import torch

        slots = [1, *[None] * (inner.lora_slots - 1)]
        for ids in ((1, 1, 0, 1), (0, 0)):
            mapping = SimpleNamespace(index_mapping=ids, prompt_mapping=ids[:2], is_prefill=True)
            results = []
            for update in (self._stock, self.update):
                for tensor in self._targets:
                    tensor.zero_()
                self._flat.zero_()
                update(mapping, slots, inner.lora_slots + 1, inner.vocab_size)
                tensors = [tensor.clone() for _, _, tensor in _tensors(self._table)]
                plain = [v for v in vars(self._table).values() if isinstance(v, (bool, int, list))]
                results.append((tensors, copy.deepcopy(plain)))
            (stock, stock_plain), (ours, own_plain) = results
            equal = [torch.equal(a, b) for a, b in zip(stock, ours, strict=True)]
            if not all(equal) or stock_plain != own_plain:
                return False
        return True


def _holds_tensors(value: Any) -> bool:
    """True for one of the table's own parts, such as LoRAKernelMeta."""
    import torch

    parts = getattr(value, "__dict__", {})
    return not isinstance(value, torch.Tensor) and any(
        isinstance(part, torch.Tensor) for part in parts.values()
    )


def _tensors(table: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yield every tensor of a table and its parts, with owner and name, in a fixed order."""
    import torch

    for name, value in vars(table).items():
        if isinstance(value, torch.Tensor):
            yield table, name, value
        elif _holds_tensors(value):
            for field, part in vars(value).items():
                if isinstance(part, torch.Tensor):
                    yield value, field, part
