"""The factors of several trainees as the slots of one pass, and the gradients that come back.

    stacks = Stacks([ada, bob], model)
    ... model.layers(..., rows=stacks.rows([range(0, 9), range(9, 14)], 14))
    stacks.add_gradients(loss, [gradients of ada, gradients of bob])

They belong to the pass alone: the model's own slots stay what they are, and other threads may run
the same model meanwhile.

A trainee's numbers do not depend on its neighbours: ranks and rows are padded by rules that look at
it alone, and only factors of one padded rank, and blocks of one size, share a batched product. On
the CPU its bits are those that it gets alone; on a GPU the kernels may differ.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.slots.rows import SlotFactors
from rookery.train.lora_trainee import FlatTensors, LoraTrainee
from rookery.types import LoraFactors

__all__ = ["Stacks", "padding_rows"]

LEAST_RANK = 8
"""Smaller ranks are padded to it: products with fewer columns go through other kernels."""
LEAST_ROWS = 16
"""On the CPU products of fewer rows go through other kernels: 9 rows were seen to be enough."""
BLOCKS = (LEAST_ROWS, 32, 64, 128, 256)
"""Rows of a trainee are padded to one of these. Padding costs rank / width of the layer per row."""


def padding_rows(num_rows: int, *, device: torch.device) -> int:
    """How many rows to add to so many, so that their bits do not depend on their number."""
    return max(0, LEAST_ROWS - num_rows) if device.type == "cpu" else 0


class Stacks:
    """Of the given trainees, in their order; one may come twice."""

    def __init__(self, members: Sequence[LoraTrainee], model: SlottedModel) -> None:
        self._device = model.device
        self._members = members
        self._banks: dict[tuple[tuple[int, ...], ...], dict[str, list[SlotFactors]]]
        """By the members of each bank, the banks of the layers that have such."""
        self._banks = defaultdict(dict)
        self._scales: dict[tuple[float, ...], torch.Tensor] = {}
        self._stacks: list[_Stack] = []
        for layer, by_rank in _by_layer(members, is_exact=model.is_exact).items():
            stacks = [
                self._stack(layer, slots, rank=rank, model=model) for rank, slots in by_rank.items()
            ]
            for stack in stacks:
                for factor in stack.factors:
                    factor.requires_grad_(torch.is_grad_enabled())
            alike = tuple(tuple(stack.slots) for stack in stacks)
            self._banks[alike][layer] = [stack.factors for stack in stacks]
            self._stacks.extend(stacks)

    def rows(
        self, own_rows: Sequence[Sequence[int]], num_rows: int, *, layer: str | None = None
    ) -> list[SlotRows]:
        """The slots of a packed batch in which each member has its rows; of one layer alone if it
        is named."""
        plans = []
        for banks, factors in self._banks.items():
            segments = [
                self._segment(own_rows[slot], slot=place, bank=bank)
                for bank, slots in enumerate(banks)
                for place, slot in enumerate(slots)
                if len(own_rows[slot])
            ]
            if segments and (layer is None or layer in factors):
                plans.append(
                    SlotRows(segments, num_rows=num_rows, device=self._device, factors=factors)
                )
        return plans

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gradients are taken of."""
        return [factor for stack in self._stacks for factor in stack.factors]

    def add_gradients(
        self, found: Sequence[torch.Tensor | None], totals: Sequence[list[torch.Tensor] | None]
    ) -> None:
        """Gradients of the leaves -> those of each member; where there is None they are dropped.

        What is done to each layer is done to all its members at once, and the sum of a member to
        all its layers: on a GPU many small operations would take longer than the pass."""
        wanted = {slot: total for slot, total in enumerate(totals) if total is not None}
        parts: dict[int, dict[int, torch.Tensor]] = {slot: {} for slot in wanted}
        for place, stack in enumerate(self._stacks):
            a, b = found[2 * place : 2 * place + 2]
            if a is None or b is None:
                continue
            a, b = a.float().contiguous(), b.float().contiguous() * stack.scales
            for row, slot in enumerate(stack.slots):
                if slot in parts:
                    member = self._members[slot]
                    first, rank = 2 * member.layers[stack.layer], len(member.factors[stack.layer].a)
                    parts[slot][first] = a[row, :rank]
                    parts[slot][first + 1] = b[row, :, :rank]
        for slot, total in wanted.items():
            assert isinstance(total, FlatTensors)
            own = parts[slot]
            for place, part in enumerate(total):
                if place not in own:  # no token of it went through that layer
                    own[place] = torch.zeros_like(part)
            total.whole += torch.cat([own[place].reshape(-1) for place in range(len(total))])

    def _stack(self, layer: str, slots: list[int], *, rank: int, model: SlottedModel) -> "_Stack":
        own = [self._members[slot].factors[layer] for slot in slots]
        key = tuple(lora.scale for lora in own)
        if key not in self._scales:
            self._scales[key] = torch.tensor(key, device=model.device)[:, None, None]
        scales = self._scales[key]
        return _Stack(layer, slots, scales, _stacked(own, scales, rank=rank, model=model))

    def _segment(self, rows: Sequence[int], *, slot: int, bank: int) -> Segment:
        block = next((size for size in BLOCKS if len(rows) <= size), None)
        # A long one by itself is one plain product.
        block = block or (len(rows) if self._device.type == "cpu" else BLOCKS[-1])
        return Segment(slot=slot, rows=rows, block=block, bank=bank)


@dataclass(frozen=True, slots=True)
class _Stack:
    """One layer of the members in `slots`, which have the same padded rank."""

    layer: str
    slots: list[int]
    scales: torch.Tensor
    """[S, 1, 1]"""
    factors: SlotFactors


def _by_layer(members: Sequence[LoraTrainee], *, is_exact: bool) -> dict[str, dict[int, list[int]]]:
    """Layer -> padded rank -> members."""
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for slot, member in enumerate(members):
        for layer, lora in member.factors.items():
            found[layer][_padded_rank(len(lora.a), is_exact=is_exact)].append(slot)
    return found


def _padded_rank(rank: int, *, is_exact: bool) -> int:
    """The next power of two; in an exact model that of the engine, see `SlottedLinear.reserve`."""
    if is_exact:
        return max(rank, 2)
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


@torch.no_grad()
def _stacked(
    own: Sequence[LoraFactors], scales: torch.Tensor, *, rank: int, model: SlottedModel
) -> SlotFactors:
    """A [S, rank, in] and scale * B [S, out, rank], stored transposed as in `SlottedLinear`."""
    a = torch.stack([_padded(lora.a, (0, 0, 0, rank - len(lora.a))) for lora in own])
    b = torch.stack([_padded(lora.b, (0, rank - len(lora.a))) for lora in own]) * scales
    return _transposed(a, model.dtype), _transposed(b, model.dtype)


def _padded(factor: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    return functional.pad(factor, padding) if any(padding) else factor


def _transposed(factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    stored = factors.to(dtype).transpose(1, 2).contiguous()
    return stored.transpose(1, 2)
