"""Weights of four bits on the CPU: a linear product that reads a seventh of the memory.

A weight is d q + m with q from 0 to 15; each group of 32 along a row of weights has its own d and
m. KleidiAI's kernel, which torch has on Arm, knows d (q - 8) alone. The rest of a weight, m + 8 d,
is one number per group: times the sum of the group's inputs it is a product of a 32nd of the size,
in float32. Symmetric groups would need none, and cost SmolLM2 18 times the KL divergence.

    weights    0.3  0.5  0.2 ... 1.7       d = 0.1, m = 0.2
    q            1    3    0 ...  15       d (q - 8) to the kernel, m + 8 d = 1.0 beside it

Numbers that lie on such a grid, as those of a Q4_1 file do, are taken as they are. The kernel
rounds d to bfloat16, by 0.2 % at most, and each row of inputs to 8 bit.
"""

import platform

import torch

from rookery.errors import ModelError
from rookery.slots.linear import PackedProduct, Product

__all__ = ["Int4Product", "int4_product", "require_int4"]

_GROUP = 32
_CHUNK_ROWS = 4096
"""Rows of weights that are quantised at a time: a head is 30 times the size of a layer."""

_pack = torch.ops.aten._dyn_quant_pack_4bit_weight
_multiply = torch.ops.aten._dyn_quant_matmul_4bit


def require_int4() -> None:
    """ModelError unless the kernel is here, and gives a row the same bits among any number."""
    has_kernel: bool = torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
    if not has_kernel:
        raise ModelError(
            f"weights is int4, whose kernel torch {torch.__version__} has for Arm on Linux; here "
            f"({platform.machine()}) it would be slower than float32: leave weights out."
        )
    random = torch.Generator().manual_seed(0)
    product = Int4Product(torch.randn(192, 576, generator=random), None)
    rows = torch.randn(37, 576, generator=random)
    together = product(rows)
    if any(not torch.equal(product(rows[:n]), together[:n]) for n in (1, 2, 3, 4, 8, 16, 36)):
        raise ModelError(
            "weights is int4, and on this CPU the bits of its 4-bit products depend on the number "
            "of rows, so that results would depend on the batch: leave weights out."
        )


def int4_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """In four bits, or in float32 where rows are not whole groups."""
    is_whole = weight.shape[1] % _GROUP == 0
    return Int4Product(weight, bias) if is_whole else PackedProduct(weight, bias)


class Int4Product:
    """A product with weights of four bits: [rows, in] -> [rows, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._sizes = (weight.shape[1], weight.shape[0])
        numbers, scales, rests = _quantise(weight.detach())
        # A group that is a whole row goes through a kernel with float32 scales.
        kind = torch.float32 if weight.shape[1] == _GROUP else torch.bfloat16
        self._packed = _pack(numbers, scales.to(kind), bias, _GROUP, *self._sizes)
        self._rests = rests.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        product: torch.Tensor = _multiply(x, self._packed, _GROUP, *self._sizes)
        sums = x.view(len(x), -1, _GROUP).sum(dim=2)
        if len(x) > 1:
            return product.addmm_(sums, self._rests)
        # Alone it goes through another kernel, with other bits.
        return torch.addmm(product.expand(2, -1), sums.expand(2, -1), self._rests)[:1]


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two q in each byte [out, in / 2], d and m + 8 d [out, groups]."""
    parts = [_quantise_rows(rows) for rows in torch.split(weight, _CHUNK_ROWS)]
    numbers, scales, rests = (torch.cat(part) for part in zip(*parts, strict=True))
    return numbers, scales, rests


def _quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.reshape(len(weight), -1, _GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = (high - low) / 15
    whole = torch.where(scale > 0, scale, 1.0)  # a group of equal numbers is m alone
    numbers = ((groups - low) / whole).round_().to(torch.uint8).view(len(weight), -1)
    pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
    return pairs, scale[..., 0], (low + 8 * scale)[..., 0]
