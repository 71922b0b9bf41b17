"""What every engine promises through the port, whichever it is: here, on servers, in a service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet.stub import Stub, serve
from tiny import tiny_adapter

from rookery.compose.serve import ServeConfig, serving
from rookery.embedded import EngineConfig, open_engine
from rookery.errors import RookeryError
from rookery.fleet import FleetConfig, open_fleet
from rookery.ports import Adapters, Engine, Sampler
from rookery.remote import ServiceClientConfig, open_client
from rookery.types import ModelRef, SampleRequest, SamplingParams, ScoreRequest

TOLD_S = 30.0
DRAWN = SamplingParams(max_tokens=6, n=2, seed=3, ignore_eos=True)


@asynccontextmanager
async def embedded(model: Path, folder: Path) -> AsyncIterator[Engine]:
    async with open_engine(EngineConfig(model=str(model), cache_gib=0.01)) as engine:
        yield engine


@asynccontextmanager
async def fleet(model: Path, folder: Path) -> AsyncIterator[Engine]:
    stub = Stub(root=str(model))
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as engine:
        yield engine


@asynccontextmanager
async def service(model: Path, folder: Path) -> AsyncIterator[Engine]:
    config = ServeConfig(
        port=0, anonymous=True, models={"tiny": str(model)}, folder=folder,
        engine=EngineConfig(cache_gib=0.01),
    )  # fmt: skip
    async with (
        serving(config) as url,
        open_client(ServiceClientConfig(url=url, away_s=5.0)) as client,
    ):
        yield client.engine


Opened = Callable[[Path, Path], AbstractAsyncContextManager[Engine]]
each_engine = pytest.mark.parametrize("opened", [embedded, fleet, service])


@pytest.fixture
def opening(
    opened: Opened, tiny_folder: Path, tmp_path: Path
) -> AbstractAsyncContextManager[Engine]:
    return opened(tiny_folder, tmp_path / "engine")


def ask(model: ModelRef, *prompt: int, **params: Any) -> SampleRequest:
    return SampleRequest(model=model, prompt=prompt or (5, 6), params=replace(DRAWN, **params))


@each_engine
async def test_answers_come_in_order_under_the_models_they_name_and_repeat_by_their_seed(
    opening: AbstractAsyncContextManager[Engine],
) -> None:
    """And scores are the log-probabilities of what was drawn."""
    async with opening as engine:
        assert isinstance(engine, Sampler) and isinstance(engine, Adapters)
        refs = [engine.base, *[await engine.load(tiny_adapter(f"a{i}", seed=i)) for i in (1, 2)]]
        asked = [ask(ref, 5, 6 + i) for i in range(3) for ref in refs]
        answers = await engine.sample(asked)
        for request, answer in zip(asked, answers, strict=True):
            assert [one.model for one in answer] == [request.model] * 2
            assert all(len(one.tokens) == len(one.logprobs) == 6 for one in answer)
        assert await engine.sample(asked[4:5]) == answers[4:5], "alone as in company"
        assert len({answer[0].tokens for answer in answers}) > 5, "models differ"
        assert await engine.sample([]) == [] and await engine.score([]) == []
        first, again, other = await engine.sample(
            [ask(engine.base, n=4), ask(engine.base, n=4), ask(engine.base, n=4, seed=4)]
        )
        assert first == again
        assert len({one.tokens for one in (*first, *other)}) > 4
        for model in refs[:2]:
            [[one, _]] = await engine.sample([ask(model)])
            tokens = (5, 6, *one.tokens)
            [score] = await engine.score(
                [ScoreRequest(model=model, tokens=tokens, start=2, labels=(9, 10))]
            )
            assert score.logprobs == pytest.approx(one.logprobs, abs=1e-4)
            assert score.model == model and len(score.label_logprobs) == 2


@each_engine
async def test_an_adapter_is_there_from_its_load_to_its_last_unload(
    opening: AbstractAsyncContextManager[Engine],
) -> None:
    async with opening as engine:
        adapter = tiny_adapter("a", seed=4)
        ref = await engine.load(adapter)
        assert await engine.load(adapter) == ref, "equal weights are one model"
        newer = await engine.load(tiny_adapter("a", seed=5))
        assert newer.name == ref.name and newer.version != ref.version
        before = await engine.sample([ask(ref)])
        await engine.unload(ref)
        assert await engine.sample([ask(ref)]) == before, "loaded twice, unloaded once"
        await engine.unload(ref)
        with pytest.raises(RookeryError):
            await engine.sample([ask(ref)])
        with pytest.raises(RookeryError):
            await engine.unload(ref)
        [[one, _]] = await engine.sample([ask(newer)])
        assert one.tokens != before[0][0].tokens
        assert await engine.load(adapter) == ref and await engine.sample([ask(ref)]) == before


@each_engine
async def test_what_is_refused_or_cancelled_harms_nobody(
    opening: AbstractAsyncContextManager[Engine],
) -> None:
    async with opening as engine:
        nobody = ModelRef(name="x", version="1")
        wrong = {
            "x@1": ask(nobody),
            "temperature": ask(engine.base, temperature=-1.0),
            "top_p": ask(engine.base, top_p=0.0),
            "max_tokens": ask(engine.base, max_tokens=0),
            r"\bn\b|num_samples": ask(engine.base, n=0),
            "stop": ask(engine.base, stop=("",)),
        }
        for said, request in wrong.items():
            with pytest.raises(RookeryError, match=said):
                await engine.sample([request])
        with pytest.raises(RookeryError, match="x@1"):
            await engine.score([ScoreRequest(model=nobody, tokens=(5, 6))])
        with pytest.raises(RookeryError):
            await engine.unload(engine.base)
        assert len(await engine.sample([ask(engine.base)])) == 1
        expected = await engine.sample([ask(engine.base)])
        cancelled = asyncio.create_task(engine.sample([ask(engine.base, 9, n=8, max_tokens=100)]))
        kept = asyncio.create_task(engine.sample([ask(engine.base)]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        async with asyncio.timeout(TOLD_S):
            assert await kept == expected


@each_engine
async def test_another_event_loop_gets_a_sentence_and_a_closed_engine_refuses_at_once(
    opening: AbstractAsyncContextManager[Engine],
) -> None:
    async with opening as engine:

        def elsewhere() -> None:
            asyncio.run(asyncio.wait_for(engine.sample([ask(engine.base)]), TOLD_S))

        with pytest.raises(RookeryError, match="event loop"):
            await asyncio.to_thread(elsewhere)
        ref = await engine.load(tiny_adapter("a", seed=1))
    async with asyncio.timeout(TOLD_S):
        for model in (engine.base, ref):
            with pytest.raises(RookeryError, match="closed"):
                await engine.sample([ask(model)])
        with pytest.raises(RookeryError, match="closed"):
            await engine.load(tiny_adapter("b", seed=2))
