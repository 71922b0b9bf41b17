"""Attention of whole sequences: every way of computing it gives the same."""

import torch

from rookery.slots import attention
from rookery.slots.attention import CausalAttend, Heads

CPU = torch.device("cpu")
HEADS = Heads(layer=0, scale=0.3, softcap=None, window=None)
LENGTHS = (3, 5, 5, 9, 16)


def attended(attend: attention.Attend) -> list[torch.Tensor]:
    """What comes out, and the gradients of its squares."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(sum(LENGTHS), 6, 8, generator=random, requires_grad=True)
    kv = torch.randn(sum(LENGTHS), 2, 3, 8, generator=random, requires_grad=True)
    out = attend(q, kv, HEADS)
    torch.autograd.backward(out.pow(2).sum())
    assert q.grad is not None and kv.grad is not None
    return [out.detach(), q.grad, kv.grad]


def test_sequences_padded_to_one_length_attend_as_each_by_itself() -> None:
    padded = attention._Padded.of(LENGTHS, CPU)
    assert padded is None, "padding would more than double the rows"
    together = attended(attention._Padded(LENGTHS, CPU).attend)
    for one, other in zip(together, attended(CausalAttend(LENGTHS, device=CPU)), strict=True):
        torch.testing.assert_close(one, other)


def test_sequences_are_padded_where_that_adds_little() -> None:
    assert attention._Padded.of((8, 9), CPU) is not None
    assert attention._Padded.of((9, 9), CPU) is None
