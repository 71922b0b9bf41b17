"""A linear layer that holds adapter slots, and packs its base weights for the CPU.

On the CPU oneDNN's packed product is up to twice as fast at the few rows of a decoding step, and
each row's bits do not depend on how many rows are computed with it.
"""

import torch
from torch import nn

from rookery.slots.rows import SlotRows

__all__ = ["ActiveRows", "SlottedLinear", "can_pack"]

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
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACK_ROWS)
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
        out = self._base(flat)
        rows = self._active.rows
        if rows is not None and self.a is not None and self.b is not None:
            out = rows.add(out, flat, self.a, self.b)
        return out.view(*x.shape[:-1], self.out_features)

    def _base(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self.weight is not None
            return nn.functional.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return product
