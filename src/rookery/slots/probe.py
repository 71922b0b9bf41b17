"""A short pass that two ways of running a model must agree on.

It reads the first positions of the context and its last ones: layers that treat positions in
another way from some point on differ there.
"""

import torch

from rookery.slots.attention import Attend, Heads

__all__ = ["HeadsSeen", "Probe", "agree", "gap"]

_NUM_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""How far results may differ: other kernels sum in another order, a wrong pass is far off."""


class Probe:
    """Two sequences of the same tokens, [2, tokens]: at the start of the context and at its end."""

    def __init__(self, vocab_size: int, context_tokens: int, *, device: torch.device) -> None:
        first = torch.arange(_NUM_TOKENS, device=device)
        last = first + max(0, context_tokens - _NUM_TOKENS)
        self.tokens = (first % vocab_size).expand(2, -1)
        self.positions = torch.stack((first, last))
        self.lengths = [_NUM_TOKENS, _NUM_TOKENS]


def gap(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got - expected).abs().max().item()


def agree(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> bool:
    """Whether two passes of a model of this type computed the same; NaN agrees with nothing."""
    allowed = _TOLERANCE.get(dtype, 1e-3) * max(1.0, expected.abs().max().item())
    return gap(got, expected) <= allowed


class HeadsSeen:
    """An attend that keeps what each layer asked of it, in order."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.heads: list[Heads] = []

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        self.heads.append(heads)
        return self._attend(q, kv, heads)
