"""Servers and a service on the page, and samples with a tenant's key."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fleet.stub import Stub
from fleet.stub import serve as serve_stub
from service.tenants import Served, serve
from ui.test_live import Visitor

from rookery.compat.serving import make_app
from rookery.errors import ConfigError
from rookery.service.keys import Keys, add_key
from rookery.ui.live.export import render_service_page
from rookery.ui.live.server import open_page


@asynccontextmanager
async def listening(served: Served, key_file: Path) -> AsyncIterator[str]:
    """The service on a port of this machine."""
    app = make_app(served.service, keys=Keys(key_file), render=render_service_page)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def post(visitor: Visitor, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    response, answer = visitor.ask(path, method="POST", body=json.dumps(body), headers=headers)
    return response.status, json.loads(answer) if response.status != 401 else {}


async def test_a_service_is_shown_and_sampled_from_with_a_key(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    async with serve(tmp_path / "run", key_file=key_file) as served:
        await served.client("ada").session()
        key = add_key(key_file, name="ada")
        async with listening(served, key_file) as url:
            page = await asyncio.to_thread(open_page, tmp_path / "runs", port=0, service=url)
            visitor = Visitor(page)
            asked = {"model": "fake", "prompt": "5 6", "max_tokens": 2, "key": key}
            sample = ("/api/service/sample", asked)
            stranger, _ = await asyncio.to_thread(post, visitor, *sample)
            assert stranger == 401, "whoever has no token of the page"
            await asyncio.to_thread(visitor.enter)
            status = await asyncio.to_thread(visitor.get, "service")
            assert [queue["name"] for queue in status["queues"]] == ["training", "sampling"]
            assert [tenant["name"] for tenant in status["tenants"]] == ["ada"]
            code, found = await asyncio.to_thread(post, visitor, *sample)
            assert code == 200 and found["text"] and found["usage"]["completion_tokens"] == 2
            listed = await asyncio.to_thread(post, visitor, "/api/service/models", {"key": key})
            assert "fake" in listed[1]["models"] and listed[1]["checkpoints"] == []
            for wrong in ({**asked, "key": "tml-no"}, {**asked, "model": "none"}):
                code, told = await asyncio.to_thread(post, visitor, "/api/service/sample", wrong)
                assert code == 404 and told["error"], "a sentence of the service"
            form = await asyncio.to_thread(visitor.ask, "/api/service/sample", method="POST")
            assert form[0].status == 405, "a form of another site cannot send JSON"
            await asyncio.to_thread(page.close)


async def test_servers_are_shown_with_their_load_and_adapters(tmp_path: Path) -> None:
    stub = Stub()
    async with serve_stub(stub):
        down = "http://127.0.0.1:9"
        with await asyncio.to_thread(open_page, tmp_path, port=0, fleet=[stub.url, down]) as page:
            visitor = await asyncio.to_thread(Visitor(page).enter)
            servers = (await asyncio.to_thread(visitor.get, "fleet"))["servers"]
            assert [server["is_up"] for server in servers] == [True, False]
            assert servers[0]["model"] and "reached" in servers[1]["error"]
            assert servers[0]["num_restarts"] is None, "only its own pool knows"
            response, told = await asyncio.to_thread(visitor.ask, "/api/service")
            assert response.status == 200 and json.loads(told) == {"url": ""}
            await asyncio.to_thread(page.close)


@pytest.mark.parametrize("is_slow", [True, False])
async def test_a_service_that_is_slow_or_dead_gets_a_sentence_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr("rookery.ui.live.fleets.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}" if is_slow else "http://127.0.0.1:9"
        with await asyncio.to_thread(open_page, tmp_path, port=0, service=url) as page:
            visitor = await asyncio.to_thread(Visitor(page).enter)
            response, told = await asyncio.to_thread(visitor.ask, "/api/service")
            await asyncio.to_thread(page.close)
    expected = f"{url} does not answer: it is busy, or `rookery serve` does not run there."
    assert response.status == 404 and json.loads(told)["error"] == expected


@pytest.mark.parametrize("path", ["/api/fleet", "/api/service"])
def test_closing_the_page_ends_its_questions_without_a_word(
    tmp_path: Path, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        page = open_page(tmp_path, port=0, fleet=[url], service=url)
        asked = pool.submit(Visitor(page).enter().ask, path)
        held, _ = silent.accept()  # the question has arrived
        begun = time.monotonic()
        page.close()
        assert time.monotonic() - begun < 2.5, "before the server's own limit"
        response, told = asked.result(timeout=10)
        held.close()
    assert (response.status, json.loads(told)["error"]) == (404, "The page was closed.")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", ["/api/service/sample", "/api/fleet", "/api/service"])
def test_nobody_asks_servers_through_the_page_without_its_token(tmp_path: Path, path: str) -> None:
    with open_page(tmp_path, port=0, service="http://127.0.0.1:9") as page:
        response, _ = Visitor(page).ask(path)
        assert response.status == 401


@pytest.mark.parametrize(
    "answer", ["[]", '{"data": [3], "choices": []}', '{"queues": 3, "choices": [{"text": null}]}']
)
async def test_a_service_that_answers_in_another_form_gets_a_sentence(
    tmp_path: Path, answer: str
) -> None:
    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
        writer.write((head + answer).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with await asyncio.to_thread(open_page, tmp_path, port=0, service=url) as page:
            visitor = await asyncio.to_thread(Visitor(page).enter)
            response, body = await asyncio.to_thread(visitor.ask, "/api/service")
            found = [(response.status, json.loads(body))]
            for part, asked in (("models", {}), ("sample", {"model": "m", "prompt": "p"})):
                told = await asyncio.to_thread(post, visitor, f"/api/service/{part}", asked)
                found.append(told)
            for code, document in found:
                assert code == 404 and "not answer as a service" in document["error"]


def test_an_address_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:99999", "http://[::", "ftp://a", "127.0.0.1:8000", "http://"):
        with pytest.raises(ConfigError, match=f"Got the address {re.escape(url)}: "):
            open_page(tmp_path, port=0, service=url)
