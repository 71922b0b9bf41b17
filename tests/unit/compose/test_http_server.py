"""The HTTP server that the service and the gateway share."""

import asyncio
import os
import socket
from typing import Any

import aiohttp
import pytest
from executors.jobs import until
from fastapi import FastAPI

from rookery.compose import http_server
from rookery.compose.http_server import answering, listen_all


def test_an_answer_does_not_wait_for_acknowledgements() -> None:
    """Connections get the option from the port they came to."""
    with (
        listen_all("127.0.0.1", [0], remedy="") as [listener],
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_address_is_one_that_clients_reach(host: str) -> None:
    with listen_all(host, [0], remedy="") as listeners:
        async with (
            answering(FastAPI(), listeners) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/openapi.json") as answer,
        ):
            assert answer.status == 200


def test_a_port_that_is_named_twice_is_taken_once() -> None:
    """As by an engine port that is the gateway's own."""
    with listen_all("127.0.0.1", [0], remedy="") as [listener]:
        port = listener.getsockname()[1]
    with listen_all("127.0.0.1", [port, port], remedy="") as listeners:
        assert len(listeners) == 1


PARTS = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nhost:",
    "half a body": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
    "all, and reads nothing": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("sent", PARTS)
async def test_a_client_that_does_not_do_its_part_is_left(
    monkeypatch: pytest.MonkeyPatch, sent: str, is_stream: bool
) -> None:
    """Also one whose answer is written: it would be held until it is read."""
    monkeypatch.setattr(http_server, "LOOK_S", 0.1)
    has_ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.request":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                part = {"type": "http.response.body", "body": bytes(20 << 20)}
                while is_stream and message["type"] != "http.disconnect":
                    await send({**part, "more_body": True})
                    async with asyncio.timeout(10):
                        message = await receive()
                await send(part)
        finally:
            has_ended.set()

    with listen_all("127.0.0.1", [0], remedy="") as listeners, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with answering(app, listeners), asyncio.timeout(15):
            num_before = _num_descriptors()
            client.connect(listeners[0].getsockname())
            client.send(PARTS[sent])
            await until(lambda: _num_descriptors() > num_before)
            await until(lambda: _num_descriptors() <= num_before)
            if sent not in ("nothing", "half a head"):
                await has_ended.wait()


def _num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


async def test_more_connections_than_descriptors_leave_some_to_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "connection_limit", lambda: 4)
    with listen_all("127.0.0.1", [0], remedy="") as listeners:
        address = listeners[0].getsockname()
        async with answering(FastAPI(), listeners) as url, asyncio.timeout(10):
            opened = [await asyncio.open_connection(*address) for _ in range(9)]
            reading = [asyncio.create_task(reader.read()) for reader, _ in opened]
            await until(lambda: sum(task.done() for task in reading) == 5)
            await asyncio.gather(*reading[4:], return_exceptions=True)
            assert not any(task.done() for task in reading[:4])
            for task, (_, writer) in zip(reading, opened, strict=True):
                task.cancel()
                writer.close()
            await asyncio.gather(*reading, return_exceptions=True)
            async with aiohttp.ClientSession() as session:
                while True:  # until the server has seen that they left
                    try:
                        async with session.get(f"{url}/openapi.json") as answer:
                            assert answer.status == 200
                            break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.01)
