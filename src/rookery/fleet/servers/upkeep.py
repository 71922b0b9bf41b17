"""Starts servers again that died or hang, where no pool sends them requests and notices."""

import asyncio
import contextlib
import logging
import time

from rookery.errors import FleetError
from rookery.fleet.servers.launch import LocalServer

__all__ = ["HANG_S", "keep_alive"]

logger = logging.getLogger(__name__)
HEALTH_S = 10.0
"""How often a server is asked for its health."""
HANG_S = 180.0
"""A server that lives and is not healthy for this long is started again."""


async def keep_alive(server: LocalServer) -> FleetError:
    """Start a server again whenever it dies or hangs; ends when it is given up, with the reason."""
    while True:
        why = await _wait_failed(server)
        try:
            await server.restart(why)
        except FleetError as error:
            logger.error("%s", error)
            return error


async def _wait_failed(server: LocalServer) -> str:
    """Wait until it serves no more. Empty: its process has ended; else what is wrong."""
    healthy_s = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_S):
                await server.wait_ended()
                return ""
        if await server.is_healthy():
            healthy_s = time.monotonic()
        elif (late_s := time.monotonic() - healthy_s) >= HANG_S:
            return f"was not healthy for {late_s:.0f} s"
