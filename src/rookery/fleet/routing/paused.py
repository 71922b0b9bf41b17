"""A server that is paused while its weights change: it answers no request until it goes on."""

import asyncio
import logging
import time
from typing import Any

from rookery.errors import FleetError
from rookery.fleet.http.address import is_local
from rookery.fleet.http.client import Client, ServerLost, ServerRefusal
from rookery.fleet.servers.trainer_lock import is_trained

__all__ = ["wait_until_running"]

logger = logging.getLogger(__name__)
IS_PAUSED = "/is_paused"
CHANGE_S = 60.0
"""The longest that weights may take to change, until who asks is told."""
LOOK_S = 0.1


async def wait_until_running(client: Client) -> None:
    """Wait for who has paused the server. One of this machine that nobody trains is resumed: its
    trainer was killed in the middle of a change."""
    end_s = time.monotonic() + CHANGE_S
    while await _is_paused(client):
        if is_local(client.url) and not is_trained(client.url):
            logger.warning("%s was left paused, and goes on now", client.url)
            await client.post("/resume", b"")
            return
        if time.monotonic() >= end_s:
            raise FleetError(
                f"{client.url} has been paused for {CHANGE_S:g} s, and answers no requests: wait "
                f"for who changes its weights, or resume it (`curl -X POST {client.url}/resume`)."
            )
        await asyncio.sleep(LOOK_S)


async def _is_paused(client: Client) -> bool:
    try:
        answer: Any = await client.get(IS_PAUSED)
    except ServerRefusal:  # it has no such route
        return False
    except ServerLost as loss:
        if loss.is_broken:
            raise
        return False
    return isinstance(answer, dict) and answer.get("is_paused") is True
