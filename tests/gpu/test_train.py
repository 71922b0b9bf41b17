"""The trainer's attention on a GPU: sequences of unequal lengths in one call."""

import pytest
import torch

from rookery.slots.attention import CausalAttend, Heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

LENGTHS = [5, 5, 9, 17, 64]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_unequal_lengths_attend_as_each_alone(window: int | None, kv_heads: int) -> None:
    """In 16 bit, where the kernel for unequal lengths is used, against float32 one by one."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    rows = sum(LENGTHS)
    q = torch.randn(rows, 4, 64, generator=generator).to(device, torch.bfloat16)
    kv = torch.randn(rows, 2, kv_heads, 64, generator=generator).to(device, torch.bfloat16)
    seed = torch.randn(rows, 4, 64, generator=generator).to(device)
    heads = Heads(layer=0, scale=64**-0.5, softcap=None, window=window)

    together = [q.clone().requires_grad_(), kv.clone().requires_grad_()]
    mixed = CausalAttend(LENGTHS, device=device)(together[0], together[1], heads)
    torch.autograd.backward((mixed.float() * seed).sum())

    alone = [q.float().requires_grad_(), kv.float().requires_grad_()]
    parts = [
        CausalAttend([length], device=device)(q_part, kv_part, heads)
        for length, q_part, kv_part in zip(
            LENGTHS,
            torch.split(alone[0], LENGTHS),
            torch.split(alone[1], LENGTHS),
            strict=True,
        )
    ]
    expected = torch.cat(parts)
    torch.autograd.backward((expected * seed).sum())

    torch.testing.assert_close(mixed.float(), expected, atol=0.02, rtol=0.02)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        similarity = torch.cosine_similarity(ours.grad.float().flatten(), theirs.grad.flatten(), 0)
        assert similarity > 0.999
