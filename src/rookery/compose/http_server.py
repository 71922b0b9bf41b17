"""Serves an HTTP application inside a block, on one or several ports."""

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
"""Seconds that requests in flight may take at shutdown. Clients retry them."""
BACKLOG = 2048
LOOK_S = 60.0
"""Seconds between checks for stalled clients. A client is dropped if it neither read nor sent
anything between two checks though it is its turn: it holds memory and a file descriptor. The
interval is long because a laptop may sleep."""


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is dropped if its client stalls or if too many are open."""

    most: int
    """Maximum number of connections, so that the service keeps file descriptors for its files."""
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
        """Abort a stalled connection: `close` would wait until the client reads the buffer."""
        cycle = self.cycle
        is_its_turn = cycle is None or cycle.response_complete or cycle.more_body
        seen = (cycle, self._num_received, self.transport.get_write_buffer_size())
        if (is_its_turn or self.flow.write_paused) and seen == self._seen:
            self.transport.abort()
            return
        self._seen = seen
        self._look = self.loop.call_later(LOOK_S, self._leave_if_idle)


class _Server(uvicorn.Server):
    """A server without signal handlers: the command line has its own."""

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
    """Open the run in a service's folder, or create it."""
    try:
        return Run.open(folder)
    except RunError:
        if (folder / "events.db").exists():
            raise
        document = config.model_dump(mode="json")
        return Run.create(folder.parent, kind=kind, name=folder.name, config=document)


@contextmanager
def listen_all(host: str, ports: Sequence[int], *, remedy: str) -> Iterator[list[socket.socket]]:
    """Listen on each distinct port. If one is taken, the error ends with `remedy`."""
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
            # asyncio leaves TCP_NODELAY unset on connections of such a listener. An answer in
            # two parts would then wait 40 ms for the client's acknowledgement.
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
    """Serve the application inside the block; yields the URL of the first port. At the end,
    `release` must finish the requests that wait for long."""
    most = connection_limit()
    settings = uvicorn.Config(
        app,
        http=type("Connection", (_Connection,), {"most": most}),
        backlog=min(BACKLOG, max(1, most // 2)),  # accepted at once, before any is closed
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
