"""Position encodings that change on the way through the context: computed right, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from tiny import VOCAB, write_tiny_model
from tiny_training import make_trainer, next_tokens, train
from transformers import AutoModelForCausalLM

from rookery.embedded import EngineConfig, open_engine
from rookery.errors import EngineError, ModelError
from rookery.slots import load_model
from rookery.train import LoraConfig, initial_adapter
from rookery.types import SampleRequest, SamplingParams, ScoreRequest, TrainRequest

ORIGINAL = 32
"""The context these models were first trained with, of 128 tokens now."""

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-3 longrope": (
        "Phi3",
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0},
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "Llama longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "Llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0,
                                                    "rope_theta": 10_000.0}}),
    "Llama yarn": ("Llama", {"rope_parameters": YARN}),
    "Ministral-3": (
        "Ministral3",
        {
            "head_dim": 8,
            "rope_parameters": YARN
            | {"llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0,
               "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}  # fmt: skip
CHANGES = ("Phi-3 longrope", "Llama longrope")
"""Those whose encoding depends on the length of the sequence."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in ("Llama longrope", "Ministral-3") else [long])
        for name in MODELS
    ]
)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, extra = MODELS[request.param]
    return write_tiny_model(tmp_path / request.param, kind, **extra)


def _tokens(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, VOCAB, (length,), generator=generator).tolist())


def _expected(folder: Path, tokens: tuple[int, ...]) -> list[float]:
    """By transformers, in a fresh model: some encodings remember what they have seen."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    return [float(rows[i - 1, tokens[i]]) for i in range(1, len(tokens))]


def _context(folder: Path) -> int:
    return ORIGINAL if folder.name in CHANGES else 128


async def test_scores_equal_transformers_in_any_company(folder: Path) -> None:
    """Short prompts beside long ones, prefixes of each other, computed in chunks."""
    longest = _tokens(_context(folder), seed=1)
    prompts = [longest, longest[:20], _tokens(7, seed=2), _tokens(len(longest) - 3, seed=3)]
    config = EngineConfig(model=str(folder), prefill_tokens=24)
    async with open_engine(config) as engine:
        requests = [ScoreRequest(model=engine.base, tokens=prompt) for prompt in prompts]
        for prompt, score in zip(prompts, await engine.score(requests), strict=True):
            assert score.logprobs == pytest.approx(_expected(folder, prompt), abs=2e-4)


async def test_samples_up_to_the_end_of_the_context_equal_transformers(folder: Path) -> None:
    context = _context(folder)
    params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
    async with open_engine(EngineConfig(model=str(folder))) as engine:
        prompts = [_tokens(context - 20, seed=1), _tokens(5, seed=2)]
        requests = [SampleRequest(model=engine.base, prompt=p, params=params) for p in prompts]
        for prompt, [completion] in zip(prompts, await engine.sample(requests), strict=True):
            whole = prompt + completion.tokens
            assert len(whole) == context and completion.finish_reason == "length"
            expected = _expected(folder, whole)[-len(completion.tokens) :]
            assert completion.logprobs == pytest.approx(expected, abs=2e-4)


async def test_packed_training_equals_transformers(folder: Path) -> None:
    model = load_model(folder)
    rows = [_tokens(_context(folder), seed=1), _tokens(9, seed=2), _tokens(14, seed=3)]
    batch = [next_tokens(row, [1.0] * len(row)) for row in rows]
    lora = LoraConfig(targets=("o_proj",), layers=2)
    start = initial_adapter(model, lora, name="new", base=folder.name, seed=0)
    output = await train(make_trainer(model, start), batch)
    expected = [_expected(folder, row) for row in rows]
    assert output.metrics["train/loss_sum"] == pytest.approx(-sum(map(sum, expected)), rel=1e-4)
    for got, wanted in zip(output.logprobs, expected, strict=True):
        assert got == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("name", CHANGES)
async def test_lengths_that_change_the_encoding_are_refused(name: str, tmp_path: Path) -> None:
    kind, extra = MODELS[name]
    folder = write_tiny_model(tmp_path / name, kind, **extra)
    long = _tokens(ORIGINAL + 1, seed=1)
    message = f"at most {ORIGINAL}: shorten it, or serve .* position encoding changes"
    async with open_engine(EngineConfig(model=str(folder))) as engine:
        with pytest.raises(EngineError, match=message):
            await engine.score([ScoreRequest(model=engine.base, tokens=long)])
    model = load_model(folder)
    start = initial_adapter(
        model, LoraConfig(targets=("o_proj",)), name="new", base=folder.name, seed=0
    )
    datum = next_tokens((*long, 5), [1.0] * (len(long) + 1))
    request = TrainRequest(trainee="policy", data=(datum,))
    [output] = await make_trainer(model, start).forward_backward([request])
    assert re.search(message, output.error)


def test_layers_that_scale_late_positions_are_not_fused(tmp_path: Path) -> None:
    kind, extra = MODELS["Ministral-3"]
    model = load_model(write_tiny_model(tmp_path / "m", kind, **extra))
    model.pack()
    assert not model.is_fused, "fused layers know no scale by position"


def test_layers_that_cannot_be_driven_are_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "stable", "StableLm")
    with pytest.raises(ModelError, match=r"layers of StableLm.* keyword arguments.*vLLM"):
        load_model(folder)


def test_a_window_that_the_attention_is_not_told_of_is_refused(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    sizes |= {"shared_expert_intermediate_size": 16}
    folder = write_tiny_model(tmp_path / "moe", "Qwen2Moe", **window, **sizes)
    with pytest.raises(ModelError, match=r"sliding_attention.*window of None.*vLLM"):
        load_model(folder)
