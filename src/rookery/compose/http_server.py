"""An HTTP application that answers inside a block, on one port or several."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from rookery.errors import ConfigError

__all__ = ["answering", "listen_all"]

GRACE_S = 3
"""How long requests in flight may take at the end; clients send them again."""


class _Server(uvicorn.Server):
    """Without signal handlers of its own: the command line has them."""

    def __init__(self, settings: uvicorn.Config) -> None:
        super().__init__(settings)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def listen_all(host: str, ports: Sequence[int], *, remedy: str) -> Iterator[list[socket.socket]]:
    """The ports, taken, each once; `remedy` says what to write when one is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listeners = []
        for port in dict.fromkeys(ports):
            try:
                listener = socket.create_server((host, port), family=family, backlog=2048)
            except OSError as error:
                raise ConfigError(
                    f"{host}:{port} cannot be used: {error.strerror}. {remedy}"
                ) from error
            # asyncio leaves it unset on connections of such a listener, and an answer in two parts
            # would wait 40 ms for the client's acknowledgement of the first.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listeners.append(stack.enter_context(listener))
        yield listeners


@asynccontextmanager
async def answering(
    app: Any,
    listeners: Sequence[socket.socket],
    *,
    release: Callable[[], None] = lambda: None,
) -> AsyncIterator[str]:
    """The application answers inside the block; its address, of the first port. `release` ends the
    requests that would wait for long."""
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=list(listeners)), name="http")
    try:
        await server.ready.wait()
        host, port = listeners[0].getsockname()[:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        release()
        await task
