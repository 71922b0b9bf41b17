"""The embedded engine against transformers + peft, and against itself in other batches."""

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from marks import needs_int4
from peft import PeftModel
from tiny import tiny_adapter, write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, run_engine
from rookery.errors import AdapterError, ConfigError, EngineError
from rookery.slots import SlottedModel
from rookery.types import Adapter, ModelRef, SampleRequest, SamplingParams, ScoreRequest
from rookery.weights import write_adapter

PROMPTS = [(1, 5, 6, 7), (1, 5, 6, 8, 9, 10), (1, 20), (1, *range(30, 60))]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
async def engine(tiny_folder: Path) -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(
        EngineConfig(model=str(tiny_folder), max_rows=6, prefill_tokens=16)
    ) as e:
        yield e


def _reference(folder: Path, adapter: Adapter | None, tmp_path: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if adapter is not None:
        write_adapter(adapter, tmp_path / adapter.name)
        model = PeftModel.from_pretrained(model, tmp_path / adapter.name).eval()
    assert isinstance(model, torch.nn.Module)
    return model


def _greedy(model: torch.nn.Module, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    tokens, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            row = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return tokens[len(prompt) :], logprobs


async def test_greedy_equals_transformers_and_peft_for_base_and_mixed_adapters(
    engine: EmbeddedEngine, tiny_folder: Path, tmp_path: Path
) -> None:
    adapters = [
        tiny_adapter("wide", rank=8, seed=1),
        tiny_adapter("high", rank=2, seed=2, layers=range(2, 4)),
        tiny_adapter("mlp", rank=3, seed=3, targets=("mlp.down_proj",)),
    ]
    refs = [engine.base, *[await engine.load(adapter) for adapter in adapters]]
    requests = [
        SampleRequest(model=ref, prompt=prompt, params=GREEDY) for prompt in PROMPTS for ref in refs
    ]
    answers = iter(await engine.sample(requests))
    models = [_reference(tiny_folder, adapter, tmp_path) for adapter in (None, *adapters)]
    seen = set()
    for prompt in PROMPTS:
        for model, ref in zip(models, refs, strict=True):
            [completion] = next(answers)
            tokens, logprobs = _greedy(model, prompt)
            assert completion.tokens == tuple(tokens)
            assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert completion.model == ref and completion.finish_reason == "length"
            seen.add(completion.tokens)
    assert len(seen) > len(PROMPTS) * 2, "the adapters must make a difference"


async def test_scores_equal_transformers(
    engine: EmbeddedEngine, tiny_folder: Path, tmp_path: Path
) -> None:
    adapter = tiny_adapter("high", seed=2, layers=range(2, 4))
    ref = await engine.load(adapter)
    tokens = PROMPTS[3]
    request = ScoreRequest(model=ref, tokens=tokens, start=3, labels=(7, 8), top_logprobs=2)
    [score] = await engine.score([request])
    with torch.inference_mode():
        model = _reference(tiny_folder, adapter, tmp_path)
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    expected = [float(rows[i - 1, tokens[i]]) for i in range(3, len(tokens))]
    assert score.logprobs == pytest.approx(expected, abs=1e-4)
    assert score.label_logprobs == pytest.approx([float(rows[-1, 7]), float(rows[-1, 8])], abs=1e-4)
    best = rows[2:].topk(2)
    assert [[t for t, _ in top] for top in score.top_logprobs] == best.indices.tolist()


@pytest.mark.parametrize("weights", ["auto", pytest.param("int4", marks=needs_int4)])
async def test_results_do_not_depend_on_the_company(
    tiny_folder: Path, weights: Literal["auto", "int4"]
) -> None:
    """Every request alone, in a fresh engine, gives the very bits it gives in a crowd."""
    params = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    adapters = [tiny_adapter(f"a{i}", rank=4, seed=i) for i in range(3)]
    prompts = [(1, 5, *range(6, 6 + n)) for n in (1, 2, 7, 15, 40)]

    async def run(indices: list[int], max_rows: int, prefill: int) -> list[object]:
        config = EngineConfig(
            model=str(tiny_folder), max_rows=max_rows, prefill_tokens=prefill, weights=weights
        )
        async with open_engine(config) as engine:
            refs = [engine.base, *[await engine.load(a) for a in adapters]]
            requests = [
                SampleRequest(model=refs[i % 4], prompt=prompts[i // 4], params=params)
                for i in indices
            ]
            scores = [
                ScoreRequest(model=refs[i % 4], tokens=prompts[i // 4], start=1, labels=(3,))
                for i in indices
            ]
            return [*await engine.sample(requests), *await engine.score(scores)]

    everything = list(range(4 * len(prompts)))
    crowd = await run(everything, max_rows=32, prefill=512)
    small = await run(everything[::-1], max_rows=3, prefill=5)
    size = len(everything)
    assert small[:size][::-1] == crowd[:size] and small[size:][::-1] == crowd[size:]
    for i in (0, 5, 19):
        assert await run([i], max_rows=1, prefill=7) == [crowd[i], crowd[size + i]]


async def test_a_model_that_is_trained_refuses_weights_of_four_bits(
    tiny_model: SlottedModel,
) -> None:
    config = EngineConfig(model="tiny", weights="int4")
    opened = run_engine(tiny_model, config=config, detokenize=str, name="tiny")
    with pytest.raises(ConfigError, match="in float32: leave weights out"):
        await opened.__aenter__()


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"device": "cuda"}])
def test_weights_of_four_bits_are_for_float32_on_the_cpu(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="computes in float32 on the CPU"):
        EngineConfig(weights="int4", **other)


@pytest.mark.parametrize(
    "neighbour",
    [
        tiny_adapter("of-another-rank", rank=7, seed=9, layers=range(1, 4)),
        tiny_adapter("of-other-layers", rank=2, seed=9, targets=("self_attn.k_proj",)),
    ],
    ids=lambda adapter: adapter.name,
)
async def test_results_do_not_depend_on_what_else_is_loaded(
    tiny_folder: Path, neighbour: Adapter
) -> None:
    targets = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
    mine = tiny_adapter("mine", rank=4, seed=1, layers=range(1, 4), targets=targets)
    params = SamplingParams(max_tokens=10, temperature=0.9, seed=11, ignore_eos=True)

    async def run(*others: Adapter) -> list[object]:
        async with open_engine(EngineConfig(model=str(tiny_folder))) as engine:
            models = [engine.base, await engine.load(mine)]
            for other in others:
                await engine.load(other)
            prompt = tuple(range(10, 45))
            samples = [SampleRequest(model=m, prompt=prompt, params=params) for m in models]
            scores = [ScoreRequest(model=m, tokens=prompt, labels=(3,)) for m in models]
            return [*await engine.sample(samples), *await engine.score(scores)]

    assert await run(neighbour) == await run()


async def test_shared_prefixes_are_computed_once(engine: EmbeddedEngine) -> None:
    shared = tuple(range(10, 40))
    requests = [ScoreRequest(model=engine.base, tokens=(*shared, 50 + i, 60)) for i in range(5)]
    await engine.score(requests)
    assert engine.stats.requested_tokens == 5 * 32
    assert engine.stats.prompt_tokens == 30 + 5 * 2
    await engine.score(requests)
    assert engine.stats.prompt_tokens == 40, "a second asking computes nothing"
    await engine.reset_prefix_cache()
    await engine.score(requests)
    assert engine.stats.prompt_tokens == 80


async def test_layers_below_the_adapters_are_computed_once_for_all_of_them(
    engine: EmbeddedEngine,
) -> None:
    refs = [await engine.load(tiny_adapter(f"a{i}", seed=i, layers=range(2, 4))) for i in range(5)]
    prompts = [(1, *range(10 + i, 30 + i)) for i in range(3)]
    scores = await engine.score([ScoreRequest(model=r, tokens=p) for p in prompts for r in refs])
    distinct = 1 + 3 * 20
    assert engine.stats.trunk_tokens == distinct
    assert engine.stats.prompt_tokens == distinct * len(refs)
    assert len({score.logprobs for score in scores}) == len(scores)


async def test_sampled_logprobs_are_those_of_the_distribution_drawn_from(
    engine: EmbeddedEngine,
) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=5, top_logprobs=8, seed=1)
    request = SampleRequest(model=engine.base, prompt=PROMPTS[1], params=params)
    [[completion]] = await engine.sample([request])
    [top] = completion.top_logprobs
    kept = [logprob for _, logprob in top if logprob > float("-inf")]
    assert len(kept) == 5 and sum(map(pow, [2.718281828] * 5, kept)) == pytest.approx(1, abs=1e-4)
    assert dict(top)[completion.tokens[0]] == pytest.approx(completion.logprobs[0])


async def test_stops(engine: EmbeddedEngine) -> None:
    request = SampleRequest(model=engine.base, prompt=PROMPTS[0], params=GREEDY)
    [[free]] = await engine.sample([request])
    third = free.tokens[2]
    first_at = free.tokens.index(third)
    by_token = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_tokens=(third,))
    by_text = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=(f"w{third}",))
    for params in (by_token, by_text):
        request = SampleRequest(model=engine.base, prompt=PROMPTS[0], params=params)
        [[stopped]] = await engine.sample([request])
        assert stopped.finish_reason == "stop"
        assert stopped.tokens == free.tokens[: first_at + 1]
        assert f"w{third}" not in stopped.text


async def test_a_long_prompt_leaves_less_room_and_a_too_long_one_is_refused(
    engine: EmbeddedEngine,
) -> None:
    prompt = tuple([5] * 120)
    [[completion]] = await engine.sample(
        [SampleRequest(model=engine.base, prompt=prompt,
                       params=SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))]
    )  # fmt: skip
    assert len(completion.tokens) == 8 and completion.finish_reason == "length"
    for tokens in ((5,) * 128, (5,) * 500):
        with pytest.raises(
            EngineError, match=f"has {len(tokens)} tokens; this model reads at most 127"
        ):
            await engine.sample([SampleRequest(model=engine.base, prompt=tokens)])


async def test_tokens_outside_the_vocabulary_and_empty_prompts_are_refused(
    engine: EmbeddedEngine,
) -> None:
    with pytest.raises(EngineError, match="Token 97 is not in the vocabulary 0 to 96"):
        await engine.sample([SampleRequest(model=engine.base, prompt=(1, 97))])
    with pytest.raises(EngineError, match="no prompt tokens"):
        await engine.sample([SampleRequest(model=engine.base, prompt=())])
    with pytest.raises(EngineError, match="starts at 0"):
        await engine.score([ScoreRequest(model=engine.base, tokens=(1, 2), start=0)])


async def test_nan_logits_are_an_error_of_that_request_alone(engine: EmbeddedEngine) -> None:
    ref = await engine.load(tiny_adapter("huge", seed=1, scale=1e38))

    def score(model: ModelRef, *tokens: int) -> Awaitable[object]:
        return engine.score([ScoreRequest(model=model, tokens=tokens)])

    def sample(model: ModelRef, *tokens: int) -> Awaitable[object]:
        return engine.sample([SampleRequest(model=model, prompt=tokens, params=GREEDY)])

    for call in (score, sample):
        expected = await call(engine.base, 1, 2, 3)
        with pytest.raises(EngineError, match=r"huge@.* gives NaN logits"):
            await call(ref, 1, 2, 3)
        assert await call(engine.base, 1, 2, 3) == expected
        fresh = await call(engine.base, 9, 8, 7)
        assert fresh == await call(engine.base, 9, 8, 7), "no NaN may linger in the cache"


async def test_an_adapter_that_does_not_fit_changes_nothing(engine: EmbeddedEngine) -> None:
    with pytest.raises(AdapterError, match="was made for 'other'"):
        await engine.load(tiny_adapter("a", base="other"))
    with pytest.raises(AdapterError, match="rank 65, at most 64"):
        await engine.load(tiny_adapter("a", rank=65))
    assert engine.loaded == ()


async def test_eviction_keeps_the_cache_small_and_the_answers_right(tiny_folder: Path) -> None:
    prompts = [(1, *range(4 + i, 64 + i)) for i in range(30)]
    answers = []
    for gib in (1.0, 2e-5):
        config = EngineConfig(model=str(tiny_folder), cache_gib=gib, prefill_tokens=64)
        async with open_engine(config) as engine:
            await engine.load(tiny_adapter("a", seed=1, layers=range(2, 4)))
            ref = engine.loaded[0]
            requests = [ScoreRequest(model=ref, tokens=p) for p in prompts]
            answers.append([*await engine.score(requests), *await engine.score(requests)])
            # Trunk and branch together.
            kept = engine.stats.cached_tokens
            assert kept <= 600 if gib < 1 else kept > 2 * 30 * 60
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["Gemma2", "Phi3"])
async def test_other_architectures_decode_like_transformers(kind: str, tmp_path: Path) -> None:
    extra = {"sliding_window": 6} | ({"head_dim": 8} if kind == "Gemma2" else {})
    folder = write_tiny_model(tmp_path / kind, kind, **extra)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    async with open_engine(EngineConfig(model=str(folder))) as engine:
        requests = [SampleRequest(model=engine.base, prompt=p, params=GREEDY) for p in PROMPTS]
        for prompt, [completion] in zip(PROMPTS, await engine.sample(requests), strict=True):
            assert list(completion.tokens) == _greedy(model, prompt)[0]
