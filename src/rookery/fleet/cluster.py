"""Servers on the nodes of a Ray cluster: Ray finds the GPUs, Rookery owns the servers.

    async with place_on_ray(config, num=8, address="auto") as placed:
        placed.urls, placed.api_key

An actor per server holds its GPUs, starts it on its node, starts it again when it dies and stops it
when the block ends or the cluster loses this program. The servers listen on their nodes' addresses
and therefore need a key, which is made here. Adapters need a folder that all nodes see.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rookery.errors import ConfigError, FleetError, boundary
from rookery.fleet.launch import LocalServer, open_servers
from rookery.fleet.settings import LaunchConfig

__all__ = ["Placed", "place_on_ray"]

INSTALL = "pip install 'rookery[ray]'"
SUPERVISE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the servers are, and the key they ask for."""

    urls: tuple[str, ...]
    api_key: str


class ServerHost:
    """The actor: one server on its node. Its event loop is Ray's."""

    def __init__(self, document: dict[str, Any], api_key: str) -> None:
        self._document = document
        self._api_key = api_key
        self._stack = AsyncExitStack()
        self._servers: list[LocalServer] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start the server; its URL once it is ready."""
        import ray

        config = LaunchConfig.model_validate(
            {
                **self._document,
                "host": ray.util.get_node_ip_address(),
                "api_key": self._api_key,
                "replicas": 1,
            }
        )
        self._servers = await self._stack.enter_async_context(open_servers(config))
        self._watching = asyncio.create_task(self._watch())
        return self._servers[0].url

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._stack.aclose()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SUPERVISE_S)
            for server in self._servers:
                if not server.is_alive:
                    await server.restart()


@asynccontextmanager
async def place_on_ray(config: LaunchConfig, *, num: int, address: str) -> AsyncIterator[Placed]:
    """Place `num` servers on the cluster at `address`, all at once, and stop them at the end."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Placing servers on a cluster needs Ray: {INSTALL}.") from error
    was_connected = ray.is_initialized()
    with boundary(FleetError, f"Connecting to the Ray cluster at {address}"):
        await asyncio.to_thread(ray.init, address, ignore_reinit_error=True)
    size = 0 if config.device == "cpu" else config.tensor_parallel * config.data_parallel
    key = secrets.token_urlsafe(32)
    document = config.model_dump(mode="json", exclude={"host", "replicas"})
    actor = ray.remote(num_cpus=1, num_gpus=size, max_restarts=0)(ServerHost)
    hosts = [actor.remote(document, key) for _ in range(num)]
    try:
        with boundary(FleetError, f"Starting {num} servers on the Ray cluster"):
            async with asyncio.timeout(config.startup_s):
                urls = await asyncio.gather(*(_wait(host.start.remote()) for host in hosts))
        yield Placed(urls=tuple(urls), api_key=key)
    finally:
        stops = [_wait(host.stop.remote()) for host in hosts]
        await asyncio.gather(*stops, return_exceptions=True)
        for host in hosts:
            ray.kill(host)
        if not was_connected:
            # A cluster of our own dies with the thread that started it: it must not be met again.
            await asyncio.to_thread(ray.shutdown)


async def _wait(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
