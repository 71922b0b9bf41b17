"""The client of a service, beside answers that are lost on their way."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx2
import pytest
from fastapi import FastAPI
from service.tenants import WordCodec, fake_backend

from rookery.compat.atropos.app import make_engine_router
from rookery.compat.atropos.engine_side import EngineSide, SampleIndex, ServingEngine
from rookery.compose.serve import ServeConfig, serving
from rookery.remote import ServiceTrainer
from rookery.remote import engine as connection
from rookery.remote.engine import (
    Away,
    HttpReply,
    Samplers,
    ServiceClientConfig,
    open_connection,
)
from rookery.service.fair_queue import FairSemaphore
from rookery.testing import BASE, FakeSampler
from rookery.types import LoraShape, ModelRef, TokenIds


@asynccontextmanager
async def lossy_trainer(folder: Path, lost: set[str]) -> AsyncIterator[ServiceTrainer]:
    """A trainer of a service: the first answer to requests of these methods and paths is lost."""
    config = ServeConfig(port=0, anonymous=True, models={"fake": "unused"}, folder=folder)
    async with (
        serving(config, backends={"fake": fake_backend()}) as url,
        open_connection(ServiceClientConfig(url=url, away_s=20.0)) as connection,
    ):
        send = connection.send_once

        async def send_and_lose(
            method: str, url: str, body: bytes | None, accept: str
        ) -> HttpReply:
            answer = await send(method, url, body, accept)
            for name in list(lost):
                if name in f"{method} {url}":
                    lost.remove(name)
                    raise Away("the answer was lost")
            return answer

        connection.send_once = send_and_lose  # type: ignore[method-assign]
        samplers = Samplers(connection, base=BASE, base_model="fake")
        yield ServiceTrainer(connection, samplers, base_model="fake")


async def test_what_is_ended_with_a_lost_answer_is_ended(tmp_path: Path) -> None:
    lost = {"DELETE", "unload_model", "create_model", "save_weights_for_sampler"}
    async with lossy_trainer(tmp_path / "run", lost) as trainer:
        await trainer.create("poet", LoraShape(rank=4, seed=0))
        await trainer.export("poet", tmp_path / "exported")
        assert list((tmp_path / "exported").iterdir())
        await trainer.remove("poet")
    assert not lost, "all of them were asked for, twice"


async def test_weights_over_a_slow_line_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds a wait is silence, not how long a download takes."""
    monkeypatch.setattr(connection, "POLL_S", 0.5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nconnection: close\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.1)
            writer.write(b"w")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, aiohttp.ClientSession() as http:
        own = connection.Connection(http, ServiceClientConfig(url=url, away_s=1.0))
        assert (await own.request("GET", f"{url}/weights")).content == b"w" * 8


async def test_many_first_samples_of_the_base_share_a_sampling_session(tmp_path: Path) -> None:
    config = ServeConfig(port=0, anonymous=True, models={"fake": "unused"}, folder=tmp_path / "run")
    async with (
        serving(config, backends={"fake": fake_backend()}) as url,
        open_connection(ServiceClientConfig(url=url)) as connection,
    ):
        samplers = Samplers(connection, base=BASE, base_model="fake")

        async def use() -> str:
            async with samplers.use(BASE) as name:
                return name

        names = await asyncio.gather(*(use() for _ in range(8)))
        path = f"sessions/{connection.session_id}"
        made = (await connection.request("GET", path)).document()["sampler_ids"]
    assert made == [names[0]]


# The routes that environments ask the engine by, over an engine that tells what it is asked.


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
    app.include_router(make_engine_router(EngineSide(engine, codec=codec, samples=SampleIndex())))
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


async def test_long_prompts_are_read_and_numbers_that_no_server_holds_refused() -> None:
    prompt = [5] * 20_000
    body = {"model": "any", "prompt": prompt, "token_ids": prompt}
    async with asking(WordCodec()) as client:
        for path in ("/generate", "/v1/completions", "/inference/v1/generate"):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200 and str(prompt)[:60] in answer.text
        for name in ("max_tokens", "top_k", "prompt_logprobs"):
            answer = await client.post("/generate", json={"prompt": [5], name: 10**30})
            assert answer.status_code == 422 and "less than or equal to 2147483647" in answer.text
