"""The embedded engine on a GPU: the answers of the CPU, to rounding.

PYTHONPATH=src:tests/unit python -m pytest tests/gpu/test_embedded.py
"""

from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny import tiny_adapter, write_tiny_model

from rookery.embedded import EngineConfig, open_engine
from rookery.types import SampleRequest, SamplingParams, ScoreRequest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

PROMPTS = [(1, 5, 6, 7), (1, 5, 6, 8, 9, 10), (1, 20), (1, *range(30, 60))]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Qwen3"])
def test_cuda_answers_as_the_cpu_does(kind: str, tmp_path: Path) -> None:
    import asyncio

    extra = {"head_dim": 8} if kind != "Llama" else {}
    folder = write_tiny_model(tmp_path / "tiny", kind, **extra)

    async def answers(device: Literal["cpu", "cuda"]) -> tuple[list[object], list[object]]:
        config = EngineConfig(model=str(folder), device=device, dtype="float32")
        async with open_engine(config) as engine:
            refs = [engine.base]
            for seed in range(3):
                adapter = tiny_adapter(f"a{seed}", seed=seed, rank=2 + seed, layers=range(2, 4))
                refs.append(await engine.load(adapter))
            sampled = await engine.sample(
                [SampleRequest(model=r, prompt=p, params=GREEDY) for p in PROMPTS for r in refs]
            )
            scored = await engine.score(
                [ScoreRequest(model=r, tokens=PROMPTS[3], labels=(7,)) for r in refs]
            )
            return [c.tokens for (c,) in sampled], [s.logprobs + s.label_logprobs for s in scored]

    cpu, gpu = asyncio.run(answers("cpu")), asyncio.run(answers("cuda"))
    assert cpu[0] == gpu[0]
    for ours, theirs in zip(gpu[1], cpu[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


async def test_one_call_for_all_paths_attends_as_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree has prompts that begin alike, and one that goes on where another was cut."""
    folder = write_tiny_model(tmp_path / "tiny", "Qwen2")
    config = EngineConfig(model=str(folder), device="cuda", dtype="bfloat16", prefill_tokens=24)

    async def logprobs() -> list[tuple[float, ...]]:
        async with open_engine(config) as engine:
            ref = await engine.load(tiny_adapter("a", rank=4, layers=range(2, 4)))
            found = []
            for _ in range(2):
                asked = [
                    ScoreRequest(model=model, tokens=prompt, start=1)
                    for prompt in (*PROMPTS, (1, *range(30, 75)), (1, *range(30, 40), 3))
                    for model in (engine.base, ref)
                ]
                found += [score.logprobs for score in await engine.score(asked)]
        return found

    together = await logprobs()
    monkeypatch.setattr("rookery.embedded.prefill.has_varlen", lambda *_: False)
    for one, other in zip(together, await logprobs(), strict=True):
        assert one == pytest.approx(other, abs=0.05)


def test_gradients_flow_on_the_gpu(tmp_path: Path) -> None:
    from rookery.slots import CausalAttend, Segment, SlotRows, load_model

    folder = write_tiny_model(tmp_path / "tiny")
    model = load_model(folder, device="cuda", dtype="float32")
    model.bank.put(0, tiny_adapter("a"))
    layer = model.linears["model.layers.1.mlp.up_proj"]
    assert layer.a is not None
    layer.a.requires_grad_(True)
    device = torch.device("cuda")
    rows = SlotRows([Segment(slot=0, rows=range(4), block=4)], num_rows=4, device=device)
    hidden = model.layers(
        model.embed(torch.arange(4, device=device)),
        torch.arange(4, device=device),
        attend=CausalAttend([4], device=device),
        rows=rows,
    )
    torch.autograd.backward(model.logits(hidden, rows=rows).logsumexp(-1).sum())
    assert layer.a.grad is not None and layer.a.grad.abs().max() > 0
