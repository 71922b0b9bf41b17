"""The kernels of adapters beside the products written out; TRITON_INTERPRET=1 needs no GPU."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or IS_INTERPRETED), reason="torch sees no GPU"
)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def addresses(stacks: list[torch.Tensor]) -> torch.Tensor:
    if len(stacks) == 1:
        return stacks[0]
    return torch.tensor([s.data_ptr() for s in stacks], dtype=torch.uint64, device=DEVICE)


@pytest.mark.parametrize("rank", [1, 3, 16])
@pytest.mark.parametrize("sizes", [(200,), (96, 96), (256, 64, 64)])
@pytest.mark.parametrize("is_added", [True, False])
def test_each_token_gets_its_slots_product(
    rank: int, sizes: tuple[int, ...], is_added: bool
) -> None:
    from rookery.fleet.vllm_plugin.kernels import expand, shrink

    torch.manual_seed(0)
    num_slots, num_in, num_tokens, num_mapped = 5, 1100, 9, 7
    # Of 5 slots: none, the last, one that there is not, and behind them those of another batch.
    slots = torch.tensor([0, 4, -1, 2, 2, 7, 4, 0, 4], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 2, 4, num_mapped, 0, 0], dtype=torch.int32, device=DEVICE)
    kind = torch.bfloat16
    x = torch.randn(num_tokens, num_in, device=DEVICE).to(kind)
    a = [torch.randn(num_slots, 1, rank, num_in, device=DEVICE).to(kind) / 33 for _ in sizes]
    b = [torch.randn(num_slots, 1, size, rank, device=DEVICE).to(kind) for size in sizes]
    out = torch.randn(num_tokens, sum(sizes), device=DEVICE).to(kind)
    before = out.clone()
    hidden = torch.full((len(sizes), num_tokens, rank), torch.nan, device=DEVICE)

    shrink(x, (a[0], addresses(a)), hidden, slots, starts, parts=len(sizes), scaling=0.5)
    ends = torch.tensor(sizes).cumsum(0)
    is_one = len(sizes) == 1
    gathered = hidden.movedim(0, 2).contiguous().movedim(2, 0)  # as layers cut over GPUs have it
    expand(
        gathered,
        (b[0], addresses(b)),
        out,
        slots,
        starts,
        begins=0 if is_one else (ends - torch.tensor(sizes)).to(DEVICE),
        sizes=sizes[0] if len(set(sizes)) == 1 else torch.tensor(sizes).to(DEVICE),
        largest=max(sizes),
        are_equal=len(set(sizes)) == 1,
        is_added=is_added,
    )

    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < num_slots or token >= num_mapped:
            assert torch.equal(out[token], before[token])
            continue
        parts = [
            (b_part[slot, 0].float() @ (0.5 * a_part[slot, 0].float() @ x[token].float()))
            for a_part, b_part in zip(a, b, strict=True)
        ]
        moved = torch.cat(parts)
        wanted = moved + before[token].float() if is_added else moved
        torch.testing.assert_close(out[token].float(), wanted, atol=0.06, rtol=0.02)


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from rookery.fleet.vllm_plugin import kernels

    kernels.agree.cache_clear()
    assert kernels.agree(torch.device(DEVICE))
    for wrong in (lambda *_, **__: None, lambda *_, **__: 1 / 0):
        kernels.agree.cache_clear()
        monkeypatch.setattr(kernels, "expand", wrong)
        assert not kernels.agree(torch.device(DEVICE))
    kernels.agree.cache_clear()
