"""The connection to a Ray cluster, for whoever places work there.

async with connect_ray("auto", error=FleetError) as ray:
    ...
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rookery.errors import ConfigError, RookeryError, boundary

__all__ = ["connect_ray"]

INSTALL = "pip install 'rookery[ray]'"
REACH_S = 10.0


@asynccontextmanager
async def connect_ray(
    address: str, *, error: type[RookeryError], **options: object
) -> AsyncIterator[Any]:
    """The module `ray`, connected to the cluster at `address`; "local" starts one.

    A connection that this process has already is used and kept. Options are those of `ray.init`.
    """
    try:
        import ray
    except ImportError as missing:
        raise ConfigError(f"Work on a cluster needs Ray: {INSTALL}.") from missing
    was_connected = ray.is_initialized()
    if not was_connected:
        with boundary(error, f"Connecting to the Ray cluster at {address}"):
            await _check_reachable(address)
            await asyncio.to_thread(ray.init, address, **options)
    try:
        yield ray
    finally:
        if not was_connected:
            # A cluster of our own dies with the thread that started it: it must not be met again.
            await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes, in a thread that cannot be ended."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto" and "local"
        return
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as cause:  # a timeout is one
        raise ConnectionError(
            f"nothing answers there within {REACH_S:g} s. Start one with `ray start --head`, or "
            "name no address to start one on this machine"
        ) from cause
    writer.close()
