"""The trainer on a GPU: attention in one call, prompts once, layers in larger operations."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model

from rookery.slots import load_model
from rookery.slots.attention import CausalAttend, Heads
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.types import Datum, LoraFactors, TrainRequest

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


@pytest.mark.parametrize("follows", [None, 0])
def test_sequences_that_follow_others_attend_as_written_out(follows: int | None) -> None:
    device, lengths = torch.device("cuda"), [40, 7, 30]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 4, 64, generator=generator).to(device, torch.bfloat16)
    kv = torch.randn(sum(lengths), 2, 2, 64, generator=generator).to(device, torch.bfloat16)
    heads = Heads(layer=0, scale=64**-0.5, softcap=None, window=None)
    places = [None, follows, follows]
    got = CausalAttend(lengths, device=device, follows=places)(q, kv, heads)
    expected = CausalAttend(lengths, device=torch.device("cpu"), follows=places)(
        q.float().cpu(), kv.float().cpu(), heads
    )
    torch.testing.assert_close(got.float().cpu(), expected, atol=0.02, rtol=0.02)


def test_gradients_of_a_group_are_those_of_the_cpu(tmp_path: Path) -> None:
    """In 16 bit, with a prompt computed once, norms, activations and adapters fused."""
    folder = tmp_path / "model"
    write_tiny_model(
        folder, hidden_size=64, intermediate_size=256, num_hidden_layers=2, head_dim=16
    )
    config = LoraConfig(rank=4, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 60, (20,), generator=generator).tolist()
    data = []
    for length in (5, 9, 30):
        answer = torch.randint(5, 60, (length,), generator=generator).tolist()
        tokens = (*prompt, *answer)
        positions = tuple(range(len(prompt) - 1, len(tokens) - 1))
        weights = (1.0,) * length
        data.append(
            Datum(tokens=tokens, positions=positions, targets=tuple(answer), weights=weights)
        )
    gradients = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        model = load_model(folder, device=device, dtype=dtype)
        start = initial_adapter(model, config, name="poet", base="", seed=1)
        factors = {
            name: LoraFactors(a=lora.a, b=torch.full_like(lora.b, 0.01), scale=lora.scale)
            for name, lora in start.factors.items()
        }
        trainer = LoraTrainer(model, config=TrainerConfig())
        trainer.add("poet", replace(start, factors=factors))
        assert trainer.shares_prompts(trainer.trainee("poet")) == (device == "cuda")
        request = TrainRequest(trainee="poet", data=tuple(data))
        [output] = asyncio.run(trainer.forward_backward([request]))
        assert not output.error
        flat = [x.float().cpu().flatten() for x in trainer.trainee("poet").gradients or ()]
        gradients.append(torch.cat(flat))
    assert gradients[0].any()
    assert torch.cosine_similarity(gradients[0], gradients[1], 0) > 0.999
    assert gradients[1].norm().item() == pytest.approx(gradients[0].norm().item(), rel=0.02)
