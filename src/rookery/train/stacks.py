"""The factors of several trainees as the slots of one pass, and the gradients that come back.

    stacks = Stacks([ada, bob], model, num_rows=[9, 5])
    ... model.layers(..., rows=stacks.rows([range(0, 9), range(9, 14)], 14))
    stacks.add_gradients(loss, [gradients of ada, gradients of bob])

Stacks belong to one pass: the model's own slots do not change, and other threads may run the same
model meanwhile.

On the CPU a trainee's bits do not depend on its neighbours: ranks and rows are padded by rules that
look at it alone, and only factors of one padded rank, and blocks of one size, share a batched
product. On a GPU the number of operations limits a pass of few tokens: all ranks are padded to the
largest, a decoder layer that a trainee lacks is filled with zeros, and all blocks have one size.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from rookery.slots import CausalAttend, Segment, SlotRows, SlottedModel
from rookery.slots.model import decoder_layer
from rookery.slots.rows import SlotFactors
from rookery.train.lora_trainee import FlatTensors, LoraTrainee
from rookery.types import TokenIds

__all__ = ["Stacks", "Trunk", "padding_rows", "pads_alone"]

# The layers below the first adapted one never change, so each sequence runs through them once.
#
#     trunk = Trunk(model, cache_bytes=2**30)
#     hidden = trunk.hidden(sequences, cut=26)      # [rows, hidden], the input of layer 26
#
# Every sequence is computed alone, so its hidden states depend only on its tokens, not on packing
# or on the cache. An interrupted training, or one with less memory, therefore gives the same bits.


class Trunk:
    """Hidden states at cuts; if `cache_bytes` are full, the least recently used are dropped.

    They do not depend on adapters: trainees that start at the same layer share them. For hidden
    size 576, 4,096 float32 tokens take 9.4 MB.
    """

    def __init__(self, model: SlottedModel, *, cache_bytes: int) -> None:
        self._model = model
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, TokenIds], torch.Tensor] = OrderedDict()
        self.used_bytes = 0
        self.num_computed_tokens = 0
        """Tokens computed since the start because the cache lacked them."""

    def hidden(self, sequences: Sequence[TokenIds], *, cut: int) -> torch.Tensor:
        """Return the input of layer `cut`, sequences end to end, without gradient."""
        with torch.no_grad():
            if cut == 0:
                tokens = [token for sequence in sequences for token in sequence]
                return self._model.embed(torch.tensor(tokens, device=self._model.device))
            return torch.cat([self._hidden(sequence, cut) for sequence in sequences])

    def _hidden(self, sequence: TokenIds, cut: int) -> torch.Tensor:
        hidden = self._cache.get((cut, sequence))
        if hidden is None:
            hidden = self._compute(sequence, cut)
            self._keep((cut, sequence), hidden)
        else:
            self._cache.move_to_end((cut, sequence))
        return hidden

    def _compute(self, sequence: TokenIds, cut: int) -> torch.Tensor:
        device = self._model.device
        self.num_computed_tokens += len(sequence)
        return self._model.layers(
            self._model.embed(torch.tensor(sequence, device=device)),
            torch.arange(len(sequence), device=device),
            attend=CausalAttend([len(sequence)], device=device, is_exact=self._model.is_exact),
            span=range(cut),
        )

    def _keep(self, key: tuple[int, TokenIds], hidden: torch.Tensor) -> None:
        if hidden.nbytes > self._cache_bytes:
            return
        self._cache[key] = hidden
        self.used_bytes += hidden.nbytes
        while self.used_bytes > self._cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self.used_bytes -= dropped.nbytes


LEAST_RANK = 8
"""Smaller ranks are padded to this: products with fewer columns use other kernels."""
LEAST_ROWS = 16
"""On the CPU, products of fewer rows use other kernels; 9 rows were measured to suffice."""
BLOCKS = (LEAST_ROWS, 32, 64, 128, 256)
"""A trainee's rows are padded to one of these. Padding costs rank / layer width per row."""


def pads_alone(device: torch.device) -> bool:
    """Whether padding depends on each trainee alone."""
    return device.type == "cpu"


def padding_rows(num_rows: int, *, device: torch.device) -> int:
    """Return the rows to add so that the bits do not depend on the number of rows."""
    return max(0, LEAST_ROWS - num_rows) if pads_alone(device) else 0


class Stacks:
    """The given trainees' factors, in order, for `num_rows` rows each; a trainee may come twice."""

    def __init__(
        self, members: Sequence[LoraTrainee], model: SlottedModel, *, num_rows: Sequence[int]
    ) -> None:
        self._device = model.device
        self._banks: dict[tuple[tuple[int, ...], ...], dict[str, list[SlotFactors]]]
        """Member slots of a layer's banks -> layer -> factors of these banks."""
        self._banks = defaultdict(dict)
        self._stacks: list[_Stack] = []
        for banks, layers in _alike_layers(members, model, num_rows):
            stacks = [_stack(bank, layers, members, model) for bank in banks]
            self._stacks.extend(stacks)
            slots = tuple(bank.slots for bank in banks)
            factors = zip(*(stack.factors for stack in stacks), strict=True)
            self._banks[slots].update(zip(layers, map(list, factors), strict=True))
        for leaf in self.leaves:
            leaf.requires_grad_(torch.is_grad_enabled())

    def rows(
        self,
        member_rows: Sequence[Sequence[int]],
        num_rows: int,
        *,
        layer: str | None = None,
        block: int | None = None,
    ) -> list[SlotRows]:
        """Return the slots of a packed batch in which each member has its rows, perhaps as whole
        blocks. If `layer` is set, only that layer's."""
        plans = []
        for banks, factors in self._banks.items():
            if layer is not None and layer not in factors:
                continue
            counts = [
                len(member_rows[slot]) for slots in banks for slot in slots if member_rows[slot]
            ]
            segments = [
                Segment(
                    slot=place,
                    rows=member_rows[slot],
                    block=block or self._block(len(member_rows[slot]), counts),
                    bank=bank,
                )
                for bank, slots in enumerate(banks)
                for place, slot in enumerate(slots)
                if len(member_rows[slot])
            ]
            if segments:
                plans.append(
                    SlotRows(segments, num_rows=num_rows, device=self._device, factors=factors)
                )
        return plans

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Tensors to differentiate by."""
        return [factor for stack in self._stacks for pair in stack.factors for factor in pair]

    def add_gradients(
        self, gradients: Sequence[torch.Tensor | None], totals: Sequence[list[torch.Tensor] | None]
    ) -> None:
        """Add the gradients of the leaves to each member's total; a total of None drops them."""
        first = 0
        for stack in self._stacks:
            end = first + 2 * len(stack.factors)
            stack_gradients, first = gradients[first:end], end
            if all(
                gradient is None for gradient in stack_gradients
            ):  # no token went through these layers
                continue
            a, b = stack.joined(stack_gradients)
            for row, slot in enumerate(stack.bank.slots):
                total = totals[slot]
                if total is not None:
                    assert isinstance(total, FlatTensors)
                    stack.add(total, row, a[:, row], b[:, row])

    def _block(self, num_rows: int, counts: Sequence[int]) -> int:
        """Return the block size of a member with `num_rows`, if the members have `counts` rows."""
        if pads_alone(self._device) or len(counts) == 1:
            return _block_of(num_rows)
        return next((size for size in BLOCKS if max(counts) <= size), BLOCKS[-1])


def _block_of(num_rows: int) -> int:
    """Return the smallest block that fits; more rows than any block has are one plain product."""
    return next((size for size in BLOCKS if num_rows <= size), num_rows)


@dataclass(frozen=True, slots=True)
class _Bank:
    """Members whose factors of a layer share a batched product."""

    rank: int
    """Rank after padding."""
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    """Rank of each slot before padding; 0 if it lacks the layer."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that are consecutive both in the stack (`here`) and in a member's group (`there`)."""

    here: slice
    there: slice
    group: int


@dataclass(frozen=True, slots=True)
class _Stack:
    """The factors of a bank, over all layers that have this bank and one shape."""

    bank: _Bank
    scales: torch.Tensor
    """[layers, slots, 1, 1]"""
    factors: list[SlotFactors]
    """One per layer."""
    runs: list[list[_Run]]
    """One list per slot."""

    def joined(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the factors' gradients as A [layers, slots, rank, in] and B, out before rank."""
        leaves = [factor for pair in self.factors for factor in pair]
        filled = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]
        return torch.stack(filled[0::2]).float(), torch.stack(filled[1::2]).float() * self.scales

    def add(self, total: FlatTensors, row: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a slot's gradients, A [layers, rank, in] and B [layers, out, rank], to its total."""
        rank = self.bank.ranks[row]
        for run in self.runs[row]:
            total_a, total_b = total.groups[run.group]
            total_a[run.there] += a[run.here, :rank]
            total_b[run.there] += b[run.here, :, :rank]


def _alike_layers(
    members: Sequence[LoraTrainee], model: SlottedModel, num_rows: Sequence[int]
) -> Iterator[tuple[list[_Bank], list[str]]]:
    """Yield groups of layers with one shape and the same banks, in name order."""
    ranks: dict[str, dict[int, int]] = defaultdict(dict)
    for slot, member in enumerate(members):
        for layer, lora in member.factors.items():
            ranks[layer][slot] = len(lora.a)
    alike: dict[tuple[object, ...], tuple[list[_Bank], list[str]]] = {}
    for layer in sorted(ranks):
        linear = model.linears[layer]
        banks = _banks(layer, ranks[layer], model=model, num_rows=num_rows)
        key = (linear.in_features, linear.out_features, *banks)
        alike.setdefault(key, (banks, []))[1].append(layer)
    yield from alike.values()


def _banks(
    layer: str, ranks: dict[int, int], *, model: SlottedModel, num_rows: Sequence[int]
) -> list[_Bank]:
    """Return the banks of one layer; `ranks` is by slot. On the CPU, members of a bank share a
    block size: a product takes the whole bank, as selecting members costs backward operations."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    if pads_alone(model.device):
        for slot, rank in ranks.items():
            alike[_padded_rank(rank, model), _block_of(num_rows[slot])].append(slot)
    else:
        # The head is large and rarely trained.
        is_head = decoder_layer(layer, default=-1) < 0
        alike[max(ranks.values()), 0] = list(ranks if is_head else range(len(num_rows)))
    return [
        _Bank(rank, tuple(slots), tuple(ranks.get(slot, 0) for slot in slots))
        for (rank, _), slots in alike.items()
    ]


def _padded_rank(rank: int, model: SlottedModel) -> int:
    """Pad to a power of two; exact models pad as the engine does, see `SlottedLinear.reserve`."""
    if model.is_exact:
        return max(rank, 2)
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


@torch.no_grad()
def _stack(
    bank: _Bank, layers: Sequence[str], members: Sequence[LoraTrainee], model: SlottedModel
) -> _Stack:
    """Stack A [slots, rank, in] and scale * B [slots, out, rank] per layer, transposed."""
    bank_members = [members[slot] for slot in bank.slots]
    linear, shape = model.linears[layers[0]], (len(layers), len(bank_members))
    a = torch.zeros(*shape, linear.in_features, bank.rank, device=model.device)
    b = torch.zeros(*shape, bank.rank, linear.out_features, device=model.device)
    scales = torch.ones(*shape, 1, 1)
    runs: list[list[_Run]] = []
    for row, (member, rank) in enumerate(zip(bank_members, bank.ranks, strict=True)):
        runs.append(list(_runs(member, layers)) if rank else [])
        for run in runs[row]:
            member_a, member_b = member.views.groups[run.group]
            a[run.here, row, :, :rank] = member_a[run.there].transpose(1, 2)
            b[run.here, row, :rank] = member_b[run.there].transpose(1, 2)
        if rank:
            scales[:, row, 0, 0] = torch.tensor([member.factors[x].scale for x in layers])
    scales = scales.to(model.device)
    a, b = (x.to(model.dtype).transpose(2, 3) for x in (a, b * scales))
    return _Stack(bank, scales, list(zip(a.unbind(), b.unbind(), strict=True)), runs)


def _runs(member: LoraTrainee, layers: Sequence[str]) -> Iterator[_Run]:
    places = [(here, *member.places[layer]) for here, layer in enumerate(layers)]
    for (group, _), run in groupby(places, key=lambda one: (one[1], one[2] - one[0])):
        follow = list(run)
        num, (here, _, there) = len(follow), follow[0]
        yield _Run(slice(here, here + num), slice(there, there + num), group)
