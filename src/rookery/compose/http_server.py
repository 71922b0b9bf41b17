"""An HTTP application that answers inside a block, on one port or several, and its folder."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rookery.config import Config
from rookery.errors import ConfigError, RunError
from rookery.fleet.http.client import connection_limit
from rookery.runs import Run

__all__ = ["answering", "listen_all", "open_or_create"]

GRACE_S = 3
"""How long requests in flight may take at the end; clients send them again."""
BACKLOG = 2048
LOOK_S = 60.0
"""A client that neither reads nor sends between two looks, though it is its turn, is left: a
person's terminal may sleep, a lost one holds memory and a file descriptor."""


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Is held no longer than its client does its part, and only while descriptors are left to the
    files of the service."""

    most: int
    """Connections at a time; more are closed at once."""
    _look: asyncio.TimerHandle | None = None
    _num_received = 0
    _seen: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._look = self.loop.call_later(LOOK_S, self._leave_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        super().data_received(data)

    def _leave_if_idle(self) -> None:
        """Closing would wait until the client has read what is written."""
        cycle = self.cycle
        is_its_turn = cycle is None or cycle.response_complete or cycle.more_body
        seen = (cycle, self._num_received, self.transport.get_write_buffer_size())
        if (is_its_turn or self.flow.write_paused) and seen == self._seen:
            self.transport.abort()
            return
        self._seen = seen
        self._look = self.loop.call_later(LOOK_S, self._leave_if_idle)


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


def open_or_create(folder: Path, *, kind: str, config: Config) -> Run:
    """The run in the folder of a service, made when it is not there."""
    try:
        return Run.open(folder)
    except RunError:
        if (folder / "events.db").exists():
            raise
        document = config.model_dump(mode="json")
        return Run.create(folder.parent, kind=kind, name=folder.name, config=document)


@contextmanager
def listen_all(host: str, ports: Sequence[int], *, remedy: str) -> Iterator[list[socket.socket]]:
    """The ports, taken, each once; `remedy` says what to write when one is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listeners = []
        for port in dict.fromkeys(ports):
            try:
                listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
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
    most = connection_limit()
    settings = uvicorn.Config(
        app,
        http=type("Connection", (_Connection,), {"most": most}),
        backlog=min(BACKLOG, max(1, most // 2)),  # so many are accepted before one is closed
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
