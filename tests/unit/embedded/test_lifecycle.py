"""What ends, ends for all: close, cancel, unload, memory and errors leave nobody waiting.

Every wait of these tests has a limit: a caller that is never told would hang.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import Fault
from tiny import tiny_adapter, write_tiny_model

from rookery.embedded import EmbeddedEngine, EngineConfig, run_engine
from rookery.errors import EngineError
from rookery.slots import CausalAttend, SlottedModel, load_model
from rookery.types import CompletionDelta, ModelRef, SampleRequest, SamplingParams, ScoreRequest

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
        for seed in range(12):
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


async def test_calls_on_a_closed_engine_are_refused_at_once(tiny_model: SlottedModel) -> None:
    async with running(tiny_model) as engine:
        ref = await engine.load(tiny_adapter("a"))
    await refuses_everything(engine, ref, match="engine is closed")


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


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 120 GiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
async def test_short_memory_once_costs_what_is_in_flight_time_alone(
    tiny_model: SlottedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fault = Fault(tiny_model, monkeypatch)
    params = SamplingParams(max_tokens=40, n=2, ignore_eos=True)
    async with running(tiny_model) as engine:
        requests = [sample(engine.base, 1, i, params=params) for i in range(4, 10)]
        scores = [ScoreRequest(model=engine.base, tokens=(1, i, 5)) for i in range(4, 10)]
        expected = await engine.sample(requests), await engine.score(scores)
        await engine.reset_prefix_cache()
        fault.error, fault.num_good = error, 20
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


async def test_another_event_loop_is_refused(tiny_model: SlottedModel) -> None:
    """Its futures could not be answered from here."""
    async with running(tiny_model) as engine:

        def elsewhere() -> None:
            asyncio.run(engine.sample([sample(engine.base, 1, 5)]))

        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineError, match="event loop that opened it"):
                await asyncio.to_thread(elsewhere)


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
