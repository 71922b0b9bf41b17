"""The routes that environments ask the engine by, over an engine that tells what it is asked."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI
from service.tenants import WordCodec

from rookery.compat.atropos.engine_routes import make_router
from rookery.compat.atropos.engine_side import EngineSide, SampleIndex, ServingEngine
from rookery.service.fair_queue import FairSemaphore
from rookery.testing import FakeSampler
from rookery.types import ModelRef, TokenIds


class SlowCodec(WordCodec):
    """Takes as long over a text as nobody else may wait."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def encode(self, text: str) -> TokenIds:
        self._wait()
        return super().encode(text)

    def _wait(self) -> None:
        self.begun.set()
        assert self.may_end.wait(30), "nobody else was answered meanwhile"


class Engine(FakeSampler):
    base = ModelRef(name="base", version="m")
    loaded: tuple[ModelRef, ...] = ()
    context_tokens = None


@asynccontextmanager
async def asking(codec: WordCodec) -> AsyncIterator[httpx2.AsyncClient]:
    app = FastAPI()
    app.state.reading = FairSemaphore(1)
    engine = cast(ServingEngine, Engine())  # what else engines do is not asked for
    app.include_router(make_router(EngineSide(engine, codec=codec, samples=SampleIndex())))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "5 6"}),
        ("/v1/completions", {"model": "any", "prompt": "5 6"}),
        (
            "/v1/chat/completions",
            {"model": "any", "messages": [{"role": "user", "content": "5 6"}]},
        ),
    ],
)
async def test_others_are_answered_while_a_long_text_is_tokenized(
    path: str, body: dict[str, Any]
) -> None:
    codec = SlowCodec()
    async with asking(codec) as client:
        slow = asyncio.create_task(client.post(path, json=body))
        await asyncio.to_thread(codec.begun.wait, 30)
        assert (await client.get("/health")).status_code == 200
        assert not slow.done()
        codec.may_end.set()
        assert (await slow).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/inference/v1/generate"])
async def test_long_prompts_are_read(path: str) -> None:
    prompt = [5] * 20_000
    body = {"model": "any", "prompt": prompt, "token_ids": prompt}
    async with asking(WordCodec()) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200 and str(prompt)[:60] in answer.text


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "prompt_logprobs"])
async def test_numbers_that_no_server_holds_are_refused(name: str) -> None:
    async with asking(WordCodec()) as client:
        answer = await client.post("/generate", json={"prompt": [5], name: 10**30})
        assert answer.status_code == 422 and "less than or equal to 2147483647" in answer.text
