"""The client of a service, beside answers that are lost on their way."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from service.tenants import fake_backend

from rookery.compose.serve import ServeConfig, serving
from rookery.service.client import ServiceTrainer
from rookery.service.client.connection import (
    Answer,
    ServiceClientConfig,
    _Away,
    open_connection,
)
from rookery.service.client.samplers import Samplers
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
