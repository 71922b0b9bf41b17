"""`rookery serve` in a process of its own, which can be killed and started again."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

__all__ = ["START_S", "ServerProcess"]

START_S = 180.0


class ServerProcess:
    """`rookery serve` on a port of its own; started again on the same folder."""

    def __init__(self, folder: Path, models: Mapping[str, str], **more: object) -> None:
        """`more`: of its config."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._config = folder / "serve.yaml"
        document = {
            "port": self.port,
            "anonymous": True,
            "models": dict(models),
            "folder": str(folder / "run"),
            **more,
        }
        self._config.write_text(json.dumps(document))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rookery", "serve", str(self._config),
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while not await self._answers(http):
                assert self._process.returncode is None, "the service ended"
                await asyncio.sleep(0.2)

    async def _answers(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.url}/api/v1/healthz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Started for the block, and ended with it however that ends."""
        try:
            await self.start()
            yield
        finally:
            if self._process is not None and self._process.returncode is None:
                await self.stop()

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return await asyncio.wait_for(self._process.wait(), START_S)
