"""`up`, `status`, `verify`, `down` as functions."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from aiohttp import web
from fleet.adapters import make_small, write_model
from fleet.stub import Stub, serve

from rookery.errors import RookeryError
from rookery.fleet import Client, open_session
from rookery.fleet.admin import down, status
from rookery.fleet.http.probe import probe
from rookery.fleet.servers import launch as launching
from rookery.fleet.servers.settings import LaunchConfig
from rookery.fleet.verify import verify

FAKE = Path(__file__).parent / "fake"


async def test_verifying_a_good_server(tmp_path: Path) -> None:
    stub = Stub(root=str(write_model(tmp_path / "tiny")))
    async with serve(stub):
        checks = {check.name: check for check in await verify(stub.url, adapter=make_small("a"))}
    assert all(check.is_fine for name, check in checks.items() if name != "prefix cache"), checks
    assert not checks["prefix cache"].is_fine, "the stub's counters stand still"
    assert stub.loads.total() == 1 and not stub.adapters
    assert "at most 8" in checks["adapters"].detail and "tiny" in checks["server"].detail
    assert "0.0-stub" in checks["version"].detail


async def test_verifying_a_poor_server_says_what_to_do() -> None:
    stub = Stub(processed=False, fields=("model", "prompt", "logprobs"), routes=())
    async with serve(stub):
        checks = {check.name: check for check in await verify(stub.url)}
    assert "--logprobs-mode processed_logprobs" in checks["log-probs"].detail
    assert "--max-logprobs" in checks["label log-probs"].detail
    assert "--enable-lora" in checks["adapters"].detail
    wrong = ("log-probs", "label log-probs", "prompt log-probs", "adapters")
    assert [checks[name].is_fine for name in wrong] == [False] * 4
    assert checks["completion"].is_fine


async def test_verifying_a_server_that_computes_prompts_wrongly() -> None:
    async with serve(Stub(prompts_off=1.5)) as (stub,):
        checks = {check.name: check for check in await verify(stub.url)}
    assert checks["completion"].is_fine and checks["label log-probs"].is_fine
    check = checks["prompt log-probs"]
    assert check.is_fine is False and "1.50 nats" in check.detail
    assert "cudagraph_mode FULL" in check.detail


async def test_verifying_nothing() -> None:
    [check] = await verify("http://127.0.0.1:9")
    assert check.is_fine is False and "can't be reached at http://127.0.0.1:9" in check.detail


@pytest.mark.parametrize("route", ["models", "openapi", "version", "metrics", "complete"])
@pytest.mark.parametrize(
    "body",
    [
        "null", "[1]", '{"data": [1, null]}', "[" * 200_000,
        '{"choices": [{"logprobs": {"top_logprobs": [[1, 2]]}}]}',
        '{"choices": [{"logprobs": {"top_logprobs": [{"token_id:7": null}]}}]}',
    ],
)  # fmt: skip
async def test_a_server_that_answers_garbage_gets_a_sentence(route: str, body: str) -> None:
    stub = Stub()

    async def garbage(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    assert hasattr(stub, f"_{route}")
    setattr(stub, f"_{route}", garbage)
    async with serve(stub), open_session() as session:
        [one] = await status([stub.url])
        assert one.is_up or one.error
        with contextlib.suppress(RookeryError):
            await probe(Client(stub.url, session=session))


async def test_down_leaves_the_servers_of_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setattr(launching, "POLL_S", 0.02)
    config = LaunchConfig(model="tiny", device="cpu", port=18700)
    async with launching.open_servers(config) as [server]:
        assert (await asyncio.to_thread(down, tmp_path / "fleet")).urls == ()
        assert server.is_alive
    assert os.listdir(tmp_path / "fleet") == []
