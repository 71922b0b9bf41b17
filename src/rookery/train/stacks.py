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

from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.slots.rows import SlotFactors
from rookery.train.lora_trainee import LoraTrainee
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
        self._groups: dict[tuple[int, tuple[int, ...]], dict[str, SlotFactors]] = defaultdict(dict)
        """By padded rank and the members that share the products, the factors of each layer."""
        self._stacks: list[_Stack] = []
        for layer, by_rank in _by_layer(members, is_exact=model.is_exact).items():
            for rank, slots in by_rank.items():
                own = [members[slot].factors[layer] for slot in slots]
                factors = _stacked(own, rank=rank, model=model)
                self._groups[rank, tuple(slots)][layer] = factors
                self._stacks.append(_Stack(layer, slots, factors))

    def rows(
        self, own_rows: Sequence[Sequence[int]], num_rows: int, *, layer: str | None = None
    ) -> list[SlotRows]:
        """The slots of a packed batch in which each member has its rows; of one layer alone if it
        is named."""
        plans = []
        for (_, slots), factors in self._groups.items():
            segments = [
                Segment(slot=place, rows=own_rows[slot], block=self._block(len(own_rows[slot])))
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
        """Gradients of the leaves -> those of each member; where there is None they are dropped."""
        for place, stack in enumerate(self._stacks):
            a, b = found[2 * place : 2 * place + 2]
            for row, slot in enumerate(stack.slots):
                total = totals[slot]
                if total is None or a is None or b is None:
                    continue
                member = self._members[slot]
                lora, first = member.factors[stack.layer], 2 * member.layers[stack.layer]
                rank = len(lora.a)
                total[first] += a[row, :rank]
                total[first + 1] += lora.scale * b[row, :, :rank].float()

    def _block(self, num_rows: int) -> int:
        fitting = next((size for size in BLOCKS if num_rows <= size), None)
        # A long one by itself is one plain product.
        return fitting or (num_rows if self._device.type == "cpu" else BLOCKS[-1])


@dataclass(frozen=True, slots=True)
class _Stack:
    """One layer of the members in `slots`, which have the same padded rank."""

    layer: str
    slots: list[int]
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


def _stacked(own: Sequence[LoraFactors], *, rank: int, model: SlottedModel) -> SlotFactors:
    """A [S, rank, in] and scale * B [S, out, rank], stored transposed as in `SlottedLinear`."""
    like = {"dtype": model.dtype, "device": model.device}
    a = torch.zeros(len(own), own[0].a.shape[1], rank, **like).transpose(1, 2)
    b = torch.zeros(len(own), rank, len(own[0].b), **like).transpose(1, 2)
    with torch.no_grad():
        for slot, lora in enumerate(own):
            a[slot, : len(lora.a)] = lora.a
            b[slot, :, : len(lora.a)] = lora.b * lora.scale
    needs_grad = torch.is_grad_enabled()
    return a.requires_grad_(needs_grad), b.requires_grad_(needs_grad)
