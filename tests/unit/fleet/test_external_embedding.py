"""External APIs as embedders: a text out, a vector back, and answers that are none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fleet.stub import serve_routes

from rookery.errors import ConfigError, FleetError
from rookery.fleet.http.api import ExternalConfig
from rookery.fleet.http.external import ExternalEmbedder, open_embedder
from rookery.ports import Embedder


class Api:
    """Answers with `answer`, or with `status`."""

    def __init__(self, answer: Any = None, *, status: int = 200) -> None:
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self._answer = answer
        self._status = status

    async def embed(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response(self._answer, status=self._status)

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "as told"}}, status=self._status)


@asynccontextmanager
async def connect(api: Api, *, root: str = "/v1", key: str = "") -> AsyncIterator[ExternalEmbedder]:
    routes = (
        web.post(f"{root}/embeddings", api.embed),
        web.get(f"{root}/models", api.list_models),
    )
    async with serve_routes(*routes) as url:
        config = ExternalConfig(
            url=url + root, model="meaning", api_key_env="", requests_per_minute=None
        )
        async with open_embedder(config, api_key=key) as embedder:
            yield embedder


@pytest.mark.parametrize("root", ["/v1", "/v1beta/openai"])
async def test_a_text_goes_out_and_a_vector_comes_back(root: str) -> None:
    api = Api({"data": [{"embedding": [1, 0.5, -2.0]}], "usage": {"prompt_tokens": 3}})
    async with connect(api, root=root, key="secret") as embedder:
        assert isinstance(embedder, Embedder)
        assert await embedder.embed("x = '\ud800'") == (1.0, 0.5, -2.0)
    assert api.bodies == [{"model": "meaning", "input": ["x = '?'"], "encoding_format": "float"}]
    assert api.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": [{"embedding": [1.0]}, {"embedding": [2.0]}]},
        {"data": [{"embedding": []}]},
        {"data": [{"embedding": [True]}]},
        {"data": [{"embedding": [float("nan")]}]},
        {"data": ["vector"]},
    ],
)
async def test_what_is_no_vector_is_an_error(answer: Any) -> None:
    async with connect(Api(answer)) as embedder:
        with pytest.raises(FleetError, match="meaning answered"):
            await embedder.embed("x = 1")


async def test_a_refused_key_is_told_before_anything_is_embedded() -> None:
    api = Api(status=401)
    async with connect(api) as embedder:
        with pytest.raises(ConfigError, match="refuses the key, or wants one"):
            await embedder.check()
        assert api.bodies == []
        with pytest.raises(ConfigError):
            await embedder.embed("x = 1")
