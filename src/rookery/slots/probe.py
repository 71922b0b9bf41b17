"""A short pass that two ways of running a model must agree on.

It reads the first positions of the context and its last ones: layers that treat positions in
another way from some point on differ there.
"""

import torch

from rookery.slots.attention import Attend, Heads

__all__ = ["HeadsSeen", "Probe", "agree", "gap"]

_NUM_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""How far results may differ, as parts of the largest logit: other kernels sum in another order, a
wrong pass is far off."""


class Probe:
    """Two sequences of the same tokens, [2, tokens]: at the start of the context and at its end.

    Tokens are spread over the vocabulary: its first ones are special in most models, and half
    precision rounds what follows them by ten times more.
    """

    def __init__(self, vocab_size: int, context_tokens: int, *, device: torch.device) -> None:
        first = torch.arange(_NUM_TOKENS, device=device)
        last = first + max(0, context_tokens - _NUM_TOKENS)
        self.tokens = ((first * first * 7919 + first * 104729) % vocab_size).expand(2, -1)
        self.positions = torch.stack((first, last))
        self.lengths = [_NUM_TOKENS, _NUM_TOKENS]


def gap(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> float:
    """The largest difference of logits [2 * tokens, vocabulary]. In half precision that of a
    sequence is the median of its positions': single ones are rounded by a lot."""
    differences = (got - expected).abs().amax(dim=-1).view(2, -1)
    if dtype != torch.float32:
        differences = differences.median(dim=-1).values
    return differences.max().item()


def agree(got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> bool:
    """Whether two passes of a model of this type computed the same; NaN agrees with nothing."""
    allowed = _TOLERANCE.get(dtype, 1e-3) * max(1.0, expected.abs().max().item())
    return gap(got, expected, dtype=dtype) <= allowed


class HeadsSeen:
    """An attend that keeps what each layer asked of it, in order."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.heads: list[Heads] = []

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        self.heads.append(heads)
        return self._attend(q, kv, heads)
