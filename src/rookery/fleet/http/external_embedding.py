"""An external OpenAI-compatible API as an `Embedder`: a text in, its vector out.

config = ExternalConfig(url="https://api.example.com/v1", model="text-embedding-3-small")
async with open_embedder(config) as embedder:
    vector = await embedder.embed("def f(x): return x * x")
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rookery.errors import FleetError
from rookery.fleet.http.api import Api, ExternalConfig, open_api
from rookery.fleet.http.external_text import CHARACTERS_PER_TOKEN

__all__ = ["ExternalEmbedder", "open_embedder"]


class ExternalEmbedder:
    """An Embedder over one API; `open_embedder` makes one."""

    def __init__(self, api: Api) -> None:
        self.config = api.config
        self._api = api

    async def check(self) -> None:
        """Raise a FleetSettingsError if the API refuses the key, or wants one. Embeds nothing."""
        await self._api.list_models()

    async def embed(self, text: str) -> tuple[float, ...]:
        clean = text.encode(errors="replace").decode()
        body = {"model": self.config.model, "input": [clean], "encoding_format": "float"}
        async with self._api.call():
            path = f"{self._api.root}/embeddings"
            answer = await self._api.ask(path, body, cost=1 + len(clean) // CHARACTERS_PER_TOKEN)
        rows = answer.get("data")
        row = rows[0] if isinstance(rows, list) and len(rows) == 1 else None
        vector = row.get("embedding") if isinstance(row, dict) else None
        if not isinstance(vector, list) or not vector or not all(map(_is_number, vector)):
            raise FleetError(f"{self.config.model} answered {rows!r:.80}, not one vector.")
        return tuple(map(float, vector))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@asynccontextmanager
async def open_embedder(
    config: ExternalConfig, *, api_key: str | None = None, key_hint: str = ""
) -> AsyncIterator[ExternalEmbedder]:
    """Connect to the API as `open_api` does. `url` is all that comes before /embeddings."""
    async with open_api(config, api_key=api_key, key_hint=key_hint) as api:
        yield ExternalEmbedder(api)
