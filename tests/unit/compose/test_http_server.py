"""The HTTP server that the service and the gateway share."""

import socket

import aiohttp
import pytest
from fastapi import FastAPI

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
