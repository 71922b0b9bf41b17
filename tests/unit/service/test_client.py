"""The client of a service, beside answers that are lost on their way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from service.tenants import fake_backend

from rookery.compose.serve import ServeConfig, serving
from rookery.service.client import ServiceTrainer, connection
from rookery.service.client.connection import (
    Answer,
    ServiceClientConfig,
    _Away,
    open_connection,
)
from rookery.service.client.engine import Samplers
from rookery.testing import BASE
from rookery.types import LoraShape


@asynccontextmanager
async def lossy_trainer(folder: Path, lost: set[str]) -> AsyncIterator[ServiceTrainer]:
    """A trainer of a service: the first answer to requests of these methods and paths is lost."""
    config = ServeConfig(port=0, anonymous=True, models={"fake": "unused"}, folder=folder)
    async with (
        serving(config, backends={"fake": fake_backend()}) as url,
        open_connection(ServiceClientConfig(url=url, away_s=20.0)) as connection,
    ):
        send = connection._send

        async def send_and_lose(method: str, url: str, body: bytes | None, accept: str) -> Answer:
            answer = await send(method, url, body, accept)
            for name in list(lost):
                if name in f"{method} {url}":
                    lost.remove(name)
                    raise _Away("the answer was lost")
            return answer

        connection._send = send_and_lose  # type: ignore[method-assign]
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
