"""One server that programs without async talk to: a vLLM server, or a Rookery service.

async with open_server(BackendConfig(base_url="http://gpu1:8000")) as server: ...
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from rookery.config import Config
from rookery.fleet.fleet import Fleet, open_fleet
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.fleet.http.service import ServiceServer, is_service
from rookery.fleet.servers.settings import FleetConfig

__all__ = ["BackendConfig", "open_server"]

RETRY_S = 0.25
LEAST_S = 0.5
"""What a server gets to answer in, however short the timeout."""


class BackendConfig(Config):
    """The server, as the environment describes it."""

    base_url: str = ""
    """Wins over host and port, unless it is the environment's and they are given explicitly."""
    host: str = "localhost"
    port: int = Field(default=8000, ge=1, le=65535)
    group_port: int = 51216
    timeout: float = Field(default=5.0, ge=0)
    """Seconds to wait for the server to be reachable."""
    request_s: float = Field(default=900.0, gt=0)
    """Seconds that one request for completions may take; one without an answer is sent once more,
    then the call ends with a ConnectionError."""
    enable_lora: bool = True
    max_loras: int = Field(default=4, ge=1)
    max_lora_rank: int = Field(default=64, ge=1)
    adapter_folder: Path | None = None
    """A folder that this machine and the server see at the same path: adapters for a server on
    another machine go there."""
    resolver: bool = False
    """The server searches adapter_folder by name (lora_filesystem_resolver)."""

    @property
    def url(self) -> str:
        # A server that listens on every interface is reached at this machine's own.
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return self.base_url or f"http://{host}:{self.port}"


@asynccontextmanager
async def open_server(config: BackendConfig) -> AsyncIterator[Fleet | ServiceServer]:
    """Whichever of the two answers there. ConnectionError when none does within the timeout."""
    await _wait_reachable(config)
    async with open_session() as session:
        limits = ClientConfig(request_s=config.request_s)
        key = os.environ.get("VLLM_API_KEY", "")
        client = Client(config.url, session=session, config=limits, api_key=key)
        if await is_service(client):
            yield await ServiceServer.connect(client)
            return
    settings = FleetConfig(
        urls=(config.url,),
        adapter_folder=config.adapter_folder,
        resolver=config.resolver,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        all_down_timeout_s=config.timeout,
        client=limits,
    )
    async with open_fleet(settings) as fleet:
        yield fleet


async def _wait_reachable(config: BackendConfig) -> None:
    deadline = time.monotonic() + config.timeout
    async with open_session() as session:
        while True:
            # One that accepts and never answers is not waited for longer than one that is away.
            left_s = max(deadline - time.monotonic(), LEAST_S)
            limits = ClientConfig(connect_s=left_s, control_s=left_s)
            if await Client(config.url, session=session, config=limits).is_healthy():
                return
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"The vLLM server can't be reached at {config.url}. Is it running? Start it "
                    "with `rookery fleet up`, or `vllm serve MODEL --enable-lora` and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
                )
            await asyncio.sleep(RETRY_S)
