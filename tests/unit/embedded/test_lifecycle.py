"""What ends, ends for all: close, cancel, unload, memory and errors leave nobody waiting.

Every wait of these tests has a limit: a caller that is never told would hang.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault
from marks import long
from tiny import tiny_adapter, write_tiny_model

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, run_engine
from rookery.errors import EngineDownError, EngineError, ModelError
from rookery.slots import CausalAttend, SlottedModel, load_model
from rookery.types import (
    CompletionDelta,
    ModelRef,
    ModelWeights,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=110, n=4, ignore_eos=True)
LIMIT_S = 90.0


@asynccontextmanager
async def running(
    model: SlottedModel, *, cache_tokens: int = 64, max_rows: int = 6
) -> AsyncIterator[EmbeddedEngine]:
    """An engine whose cache holds so many tokens before it has to grow."""
    token_bytes = model.shape.token_bytes(model.dtype)
    config = EngineConfig(
        max_rows=max_rows, prefill_tokens=16, cache_gib=(cache_tokens + 0.5) * token_bytes / 2**30
    )
    async with run_engine(model, config=config, detokenize=str, name="tiny") as engine:
        yield engine


def sample(model: ModelRef, *prompt: int, params: SamplingParams = GREEDY) -> SampleRequest:
    return SampleRequest(model=model, prompt=prompt, params=params)


async def until_decoding(engine: EmbeddedEngine, num_tokens: int = 20) -> None:
    goal = engine.stats.decoded_tokens + num_tokens
    async with asyncio.timeout(LIMIT_S):
        while engine.stats.decoded_tokens < goal:  # noqa: ASYNC110 (no event per token)
            await asyncio.sleep(0.001)  # the engine's thread needs the interpreter too


async def settled(engine: EmbeddedEngine) -> None:
    """Wait until nothing is in flight: what was cancelled leaves with the next step."""
    async with asyncio.timeout(LIMIT_S):
        while engine.stats.num_in_flight:  # noqa: ASYNC110 (no event per request)
            await asyncio.sleep(0.001)


async def test_a_prompt_longer_than_the_cache_is_answered_and_breaks_nothing(
    tiny_model: SlottedModel,
) -> None:
    long = tuple(range(4, 94)) + tuple(range(4, 34))
    async with running(tiny_model) as engine, asyncio.timeout(LIMIT_S):
        [score] = await engine.score([ScoreRequest(model=engine.base, tokens=long)])
        positions = torch.arange(len(long))
        with torch.inference_mode():
            hidden = tiny_model.layers(
                tiny_model.embed(torch.tensor(long)),
                positions,
                attend=CausalAttend([len(long)], device=positions.device),
            )
            logprobs = torch.log_softmax(tiny_model.logits(hidden), -1)
        expected = [float(logprobs[i - 1, t]) for i, t in enumerate(long) if i]
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        ref = await engine.load(tiny_adapter("a"))
        await engine.sample([sample(ref, *long)])
        await engine.unload(ref)
        ref = await engine.load(tiny_adapter("b", seed=1))
        waiting = asyncio.create_task(engine.sample([sample(ref, 1, 5, params=LONG)]))
        await until_decoding(engine)
        await engine.unload(ref)
        await engine.reset_prefix_cache()
        assert len((await waiting)[0]) == LONG.n
        await engine.reset_prefix_cache()
        assert engine.stats.cached_tokens == 0


async def test_cancelling_after_the_decoding_memory_grew(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "tiny", max_position_embeddings=512))
    model.pack()
    async with running(model) as engine, asyncio.timeout(LIMIT_S):
        expected = await engine.sample([sample(engine.base, 1, 5)])
        long = sample(engine.base, *([5, 6, 7, 8] * 60), params=LONG)
        tasks = [asyncio.create_task(engine.sample([long])) for _ in range(2)]
        await until_decoding(engine)
        tasks[0].cancel()
        assert await engine.sample([sample(engine.base, 1, 5)]) == expected
        tasks[1].cancel()
        await settled(engine)


async def test_a_prompt_that_no_memory_can_hold_is_refused(
    tiny_model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SC_PAGE_SIZE": tiny_model.shape.token_bytes(tiny_model.dtype), "SC_PHYS_PAGES": 100}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    async with running(tiny_model) as engine, asyncio.timeout(LIMIT_S):
        for call in (
            engine.sample([sample(engine.base, *([5] * 101))]),
            engine.score([ScoreRequest(model=engine.base, tokens=(5,) * 101)]),
        ):
            with pytest.raises(EngineError, match=r"101 tokens, whose .* GiB; this device has"):
                await call
        assert await engine.sample([sample(engine.base, *([5] * 100))])


async def test_cancelled_calls_give_their_memory_back_when_their_adapter_is_unloaded(
    tiny_model: SlottedModel,
) -> None:
    async with running(tiny_model) as engine, asyncio.timeout(LIMIT_S):
        for seed in range(4):
            ref = await engine.load(tiny_adapter("a", seed=seed))
            tasks = [
                asyncio.create_task(engine.sample([sample(ref, 1, *range(4, 80), params=LONG)]))
                for _ in range(3)
            ]
            while not engine.stats.cached_tokens:  # noqa: ASYNC110 (no event per pass)
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            await engine.unload(ref)
            await asyncio.gather(*tasks, return_exceptions=True)
            await settled(engine)
            await engine.reset_prefix_cache()
            assert engine.stats.cached_tokens == 0


async def test_closing_tells_everyone_who_waits(tiny_model: SlottedModel) -> None:
    async with running(tiny_model) as engine:
        requests = [sample(engine.base, 1, i, params=LONG) for i in range(4, 30)]
        tasks = [asyncio.create_task(engine.sample([request])) for request in requests]
        await until_decoding(engine)
        late = asyncio.create_task(engine.load(tiny_adapter("late")))
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(late, return_exceptions=True)
    ended = [a for a in answers if isinstance(a, EngineError)]
    assert len(ended) > 20 and all("closed" in str(error) for error in ended)
    assert all(isinstance(a, EngineError | list) for a in answers)


async def refuses_everything(engine: EmbeddedEngine, ref: ModelRef, *, match: str) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: engine.sample([sample(engine.base, 1, 5)]),
        lambda: engine.score([ScoreRequest(model=ref, tokens=(1, 2))]),
        lambda: engine.load(tiny_adapter("b", seed=1)),
        lambda: engine.unload(ref),
        lambda: engine.reset_prefix_cache(),
    ]
    for call in calls:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineError, match=match):
                await call()


@pytest.mark.parametrize("error", [KeyError("place 7"), RuntimeError("a kernel failed")])
async def test_an_unexpected_error_ends_every_wait_and_refuses_what_comes_later(
    tiny_model: SlottedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fault = Fault(tiny_model, monkeypatch)
    async with running(tiny_model) as engine:
        ref = await engine.load(tiny_adapter("a"))
        tasks = [
            asyncio.create_task(engine.sample([sample(m, 1, i, params=LONG)]))
            for i in range(4, 12)
            for m in (engine.base, ref)
        ]
        await until_decoding(engine)
        fault.error = error
        async with asyncio.timeout(LIMIT_S):
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        ended = [a for a in answers if isinstance(a, EngineError)]
        assert ended and all(str(error) in str(e) and "open" in str(e) for e in ended)
        assert all(isinstance(a, EngineError | list) for a in answers)
        await refuses_everything(engine, ref, match="unexpected error")


async def test_short_memory_once_costs_what_is_in_flight_time_alone(
    tiny_model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(tiny_model, monkeypatch)
    params = SamplingParams(max_tokens=30, n=2, ignore_eos=True)
    async with running(tiny_model) as engine:
        requests = [sample(engine.base, 1, i, params=params) for i in range(4, 10)]
        scores = [ScoreRequest(model=engine.base, tokens=(1, i, 5)) for i in range(4, 10)]
        expected = await engine.sample(requests), await engine.score(scores)
        await engine.reset_prefix_cache()
        fault.error, fault.num_good = MemoryError("Unable to allocate 120 GiB"), 20
        deltas: list[CompletionDelta] = []
        requests[0] = replace(requests[0], on_delta=deltas.append)
        async with asyncio.timeout(LIMIT_S):
            again = await asyncio.gather(engine.sample(requests), engine.score(scores))
        assert tuple(again) == expected
        for index, one in enumerate(expected[0][0]):
            own = [delta for delta in deltas if delta.sample == index]
            assert tuple(token for delta in own for token in delta.tokens) == one.tokens
        assert fault.error is None and engine.stats.num_in_flight == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 120 GiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
async def test_short_memory_twice_fails_what_is_in_flight_and_the_engine_goes_on(
    tiny_model: SlottedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fault = Fault(tiny_model, monkeypatch)
    async with running(tiny_model) as engine:
        expected = await engine.sample([sample(engine.base, 1, 5)])
        fault.error, fault.num, fault.num_good = error, 2, 20
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineError, match=r"engine is out of memory.*lower max_rows"):
                await engine.sample([sample(engine.base, 1, 9, params=LONG)])
            assert engine.stats.cached_tokens == engine.stats.num_in_flight == 0
            assert await engine.sample([sample(engine.base, 1, 5)]) == expected


async def test_a_request_that_fails_leaves_no_sequence_behind(tiny_model: SlottedModel) -> None:
    """The samples of a broken adapter all end with the first, and its slot is free again."""
    many = SamplingParams(max_tokens=50, n=40, ignore_eos=True)
    async with running(tiny_model) as engine, asyncio.timeout(LIMIT_S):
        ref = await engine.load(tiny_adapter("huge", scale=1e38))
        with pytest.raises(EngineError, match="gives NaN logits"):
            await engine.sample([sample(ref, 1, 2, params=many)])
        await engine.unload(ref)
        assert engine.stats.num_in_flight == 0
        await engine.reset_prefix_cache()
        assert engine.stats.cached_tokens == 0


async def test_an_error_of_who_is_told_ends_that_call_alone(tiny_model: SlottedModel) -> None:
    def fail(_: CompletionDelta) -> None:
        raise ValueError("full")

    async with running(tiny_model) as engine, asyncio.timeout(LIMIT_S):
        other = asyncio.create_task(engine.sample([sample(engine.base, 5, 6, params=LONG)]))
        await until_decoding(engine, 2)
        with pytest.raises(EngineError, match="on_delta of a request failed: full"):
            await engine.sample([replace(sample(engine.base, 1, 2), on_delta=fail)])
        assert len((await other)[0]) == LONG.n
        await settled(engine)


# New base weights in a running engine.


PROMPT = (1, *range(30, 60))
LONG_ANSWER = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
KINDS: dict[str, Any] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
}


@pytest.fixture(params=["tied", pytest.param("untied", marks=long)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", **KINDS[request.param])


@pytest.fixture(params=["packed", "plain"])
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[EmbeddedEngine]:
    config = EngineConfig(model=str(folder))
    if request.param == "packed":
        async with open_engine(config) as packed:
            yield packed
    else:
        model = load_model(folder)
        async with run_engine(model, config=config, detokenize=str, name="tiny") as plain:
            yield plain


def other_weights(folder: Path, version: str = "2") -> ModelWeights:
    """Every weight moved, norms and embeddings too."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: weight.detach() + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_model(folder).weights.items()
    }
    return ModelWeights(name="policy", tensors=tensors, version=version)


async def expected(folder: Path, weights: ModelWeights) -> tuple[float, ...]:
    model = load_model(folder)
    with torch.no_grad():
        for name, parameter in model.weights.items():
            parameter.copy_(weights.tensors[name])
    config = EngineConfig(model=str(folder))
    async with run_engine(model, config=config, detokenize=str, name="x") as engine:
        return await scores(engine)


async def scores(engine: EmbeddedEngine) -> tuple[float, ...]:
    [score] = await engine.score([ScoreRequest(model=engine.base, tokens=PROMPT, start=1)])
    return score.logprobs


async def test_answers_are_those_of_the_new_weights(engine: EmbeddedEngine, folder: Path) -> None:
    """Nothing of the old ones is left in a cache, a packed layer or a fused norm."""
    weights = other_weights(folder)
    wanted = await expected(folder, weights)
    before, old = await scores(engine), engine.base
    ref = await engine.replace_base(weights)
    assert (ref.name, ref.version) == ("policy", "2") and engine.base == ref
    assert await scores(engine) == pytest.approx(wanted, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(before, wanted, strict=True)) > 0.1
    with pytest.raises(EngineError, match=r"is not loaded. Loaded: policy@2"):
        await engine.score([ScoreRequest(model=old, tokens=PROMPT, start=1)])
    start = load_model(folder).weights
    await engine.replace_base(ModelWeights(name="policy", tensors=start, version="1"))
    assert await scores(engine) == pytest.approx(before, abs=1e-5)


async def test_requests_in_flight_end_on_the_old_weights(
    engine: EmbeddedEngine, folder: Path
) -> None:
    request = SampleRequest(model=engine.base, prompt=PROMPT, params=LONG_ANSWER)
    [[alone]] = await engine.sample([request])
    await engine.reset_prefix_cache()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.sample([request]))
        await asyncio.sleep(0)  # the call is in flight now
        assert engine.stats.num_in_flight == 1
        replacing = group.create_task(engine.replace_base(other_weights(folder)))
        await asyncio.sleep(0)
        late = group.create_task(refused(engine, request))
    [[completion]] = running.result()
    assert completion.tokens == alone.tokens and completion.logprobs == alone.logprobs
    assert replacing.result() == engine.base
    assert "is not loaded" in late.result()


async def refused(engine: EmbeddedEngine, request: SampleRequest) -> str:
    """What a call is told that came while the weights were being replaced."""
    with pytest.raises(EngineError) as told:
        await engine.sample([request])
    return str(told.value)


async def test_weights_that_do_not_fit_change_nothing(engine: EmbeddedEngine, folder: Path) -> None:
    before, base = await scores(engine), engine.base
    weights = other_weights(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    for tensors, sentence in (
        ({**weights.tensors, name: torch.zeros(3, 3)}, r"up_proj.weight is \(3, 3\) and here"),
        ({**weights.tensors, "model.extra": torch.zeros(3)}, r"model.extra is \(3,\)"),
        ({n: t for n, t in weights.tensors.items() if n != name}, "up_proj.weight is None"),
    ):
        wrong = ModelWeights(name="policy", tensors=tensors, version="3")
        with pytest.raises(ModelError, match=sentence):
            await engine.replace_base(wrong)
    assert engine.base == base and await scores(engine) == before


async def test_adapters_must_go_first(engine: EmbeddedEngine, folder: Path) -> None:
    ref = await engine.load(tiny_adapter("poet", base=""))
    with pytest.raises(EngineError, match=r"poet@.* unload them first"):
        await engine.replace_base(other_weights(folder))
    await engine.unload(ref)
    await engine.replace_base(other_weights(folder))


async def test_an_adapter_that_was_unloaded_is_waited_for(
    engine: EmbeddedEngine, folder: Path
) -> None:
    """Its last request is in flight: that ends on the old weights, and nobody is refused."""
    ref = await engine.load(tiny_adapter("poet", base=""))
    request = SampleRequest(model=ref, prompt=PROMPT, params=LONG_ANSWER)
    [[alone]] = await engine.sample([request])
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.sample([request]))
        await asyncio.sleep(0)  # the call is in flight now
        await engine.unload(ref)
        assert engine.stats.num_in_flight == 1
        group.create_task(engine.replace_base(other_weights(folder)))
    [[completion]] = running.result()
    assert completion.tokens == alone.tokens
    assert engine.base.version == "2" and engine.loaded == ()


async def test_who_waits_for_new_weights_is_told_when_the_engine_closes(folder: Path) -> None:
    async with open_engine(EngineConfig(model=str(folder))) as engine:
        request = SampleRequest(model=engine.base, prompt=PROMPT, params=LONG_ANSWER)
        waiting = [
            asyncio.create_task(engine.sample([request])),
            asyncio.create_task(engine.replace_base(other_weights(folder))),
            asyncio.create_task(engine.sample([request])),
        ]
        await asyncio.sleep(0)
    told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
    assert all(isinstance(error, EngineDownError) for error in told)


async def test_a_cancelled_replacement_leaves_no_wrong_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was being computed and runs to its end: the new weights have the new name only."""
    model, weights = load_model(folder), other_weights(folder)
    wanted = await expected(folder, weights)
    begun, may_end = threading.Event(), threading.Event()
    set_weights = model.set_weights

    def slow(tensors: Mapping[str, torch.Tensor]) -> None:
        begun.set()
        assert may_end.wait(20)
        set_weights(tensors)

    monkeypatch.setattr(model, "set_weights", slow)
    config = EngineConfig(model=str(folder))
    async with run_engine(model, config=config, detokenize=str, name="tiny") as engine:
        old = engine.base
        replacing = asyncio.create_task(engine.replace_base(weights))
        assert await asyncio.to_thread(begun.wait, 20)
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
        may_end.set()
        with pytest.raises(EngineError, match="is not loaded"):
            await engine.score([ScoreRequest(model=old, tokens=PROMPT, start=1)])
        assert await scores(engine) == pytest.approx(wanted, abs=1e-4)
