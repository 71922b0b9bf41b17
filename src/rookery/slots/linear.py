"""A linear layer that holds adapter slots, and packs its base weights for the CPU.

On the CPU oneDNN's packed product is up to twice as fast at the few rows of a decoding step, and
each row's bits do not depend on how many rows are computed with it.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from rookery.slots.rows import SlotRows

__all__ = ["ActiveRows", "LinearGroup", "SlottedLinear", "can_pack"]

_PACK_ROWS = 32
"""The number of rows oneDNN is told to expect; measured: the hint changes nothing."""


class ActiveRows:
    """The rows of the forward pass in progress, shared by every slotted layer of one model."""

    def __init__(self) -> None:
        self.rows: SlotRows | None = None


def can_pack(*, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch build has the packed product for such weights."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and device.type == "cpu" and dtype == torch.float32


class SlottedLinear(nn.Module):
    """y = W x + bias + scale * B[slot] A[slot] x, the slot chosen per packed row."""

    def __init__(self, linear: nn.Linear, *, active: ActiveRows) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight: torch.Tensor | None = linear.weight
        self.bias = linear.bias
        self.a: nn.Parameter | None = None
        self.b: nn.Parameter | None = None
        self._active = active
        self._packed: torch.Tensor | None = None

    def pack(self, *, keep_weight: bool) -> None:
        """Trade the plain weights for oneDNN's layout: inference only, no gradients after."""
        assert self.weight is not None
        self._packed = _reorder(self.weight)
        if not keep_weight:
            self.weight = None

    def reserve(self, *, num_slots: int, rank: int) -> None:
        """Make room for `num_slots` slots of `rank`; what is loaded stays where it is."""
        have_slots, have_rank = (0, 0) if self.a is None else tuple(self.a.shape[:2])
        if num_slots <= have_slots and rank <= have_rank:
            return
        num_slots, rank = max(num_slots, have_slots), max(rank, have_rank)
        like = self.bias if self.weight is None else self.weight
        dtype, device = (
            (torch.float32, torch.device("cpu"))
            if like is None
            else (
                like.dtype,
                like.device,
            )
        )
        a = torch.zeros(num_slots, rank, self.in_features, dtype=dtype, device=device)
        b = torch.zeros(num_slots, self.out_features, rank, dtype=dtype, device=device)
        if self.a is not None and self.b is not None:
            a[:have_slots, :have_rank] = self.a.detach()
            b[:have_slots, :, :have_rank] = self.b.detach()
        self.a = nn.Parameter(a, requires_grad=False)
        self.b = nn.Parameter(b, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        out = self.base(flat)
        rows = self._active.rows
        if rows is not None and self.a is not None and self.b is not None:
            rows.add(out, rows.take(flat), self.a, self.b)
        return out.view(*x.shape[:-1], self.out_features)

    def base(self, x: torch.Tensor) -> torch.Tensor:
        """The product without adapters: [rows, in] -> [rows, out]."""
        if self._packed is not None:
            return _multiply(x, self._packed, self.bias)
        assert self.weight is not None
        return nn.functional.linear(x, self.weight, self.bias)


class LinearGroup:
    """Linear layers that read the same input, as one product; their outputs lie side by side."""

    def __init__(self, members: Sequence[SlottedLinear], *, active: ActiveRows) -> None:
        self._members = members
        ends = list(accumulate(member.out_features for member in members))
        self._columns = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
        self._bias = self._joined_bias()
        self._active = active
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Trade the members' plain weights for one in oneDNN's layout: inference only."""
        weights = [member.weight for member in self._members if member.weight is not None]
        self._packed = _reorder(weights[0] if len(weights) == 1 else torch.cat(weights))
        for member in self._members:
            member.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, the members' outputs]"""
        if self._packed is None:
            out = torch.cat([member.base(x) for member in self._members], dim=-1)
        else:
            out = _multiply(x, self._packed, self._bias)
        rows = self._active.rows
        adapted = [member.a is not None for member in self._members]
        if rows is not None and any(adapted):
            taken = rows.take(x)
            for member, columns in zip(self._members, self._columns, strict=True):
                if member.a is not None and member.b is not None:
                    rows.add(out[:, columns], taken, member.a, member.b)
        return out

    def _joined_bias(self) -> torch.Tensor | None:
        if all(member.bias is None for member in self._members):
            return None
        parts = [
            torch.zeros(member.out_features) if member.bias is None else member.bias.detach()
            for member in self._members
        ]
        return torch.cat(parts)


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)
    return packed


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
