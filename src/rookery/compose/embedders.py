"""The embedding model of an evolution, open for a block, or none where its config names none.

    async with open_config_embedder(config, environment=os.environ) as embedder:
        await embedder.embed("x = 1")

Servers and keys are found as OpenEvolve finds them.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rookery.errors import ConfigError
from rookery.fleet.http.api import ExternalClientConfig, ExternalConfig
from rookery.fleet.http.external_embedding import ExternalEmbedder, open_embedder
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.config.llm import DEFAULT_API_BASE

__all__ = ["open_config_embedder"]

OPENAI_KEYS = ("OPENAI_EMBEDDING_API_KEY", "OPENAI_API_KEY")
KNOWN = {
    "gemini-embedding-001": (
        "https://generativelanguage.googleapis.com/v1beta/openai/",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    ),
    "text-embedding-3-large": (DEFAULT_API_BASE, OPENAI_KEYS),
    "text-embedding-3-small": (DEFAULT_API_BASE, OPENAI_KEYS),
}
"""Models whose server needs no name: its URL, and the variables that may hold its key."""
LIMITS = ExternalClientConfig(request_s=30.0, busy_s=30.0)
"""An embedding takes well under a second; one that fails is counted, and the run goes on."""


@asynccontextmanager
async def open_config_embedder(
    config: EvolveConfig, *, environment: Mapping[str, str]
) -> AsyncIterator[ExternalEmbedder | None]:
    """A key that the server refuses is a ConfigError; a server that is down is left for later."""
    if not config.database.is_compared:
        yield None
        return
    model = config.database.embedding_model or ""
    url, names = _server(config, model)
    used = next((name for name in names if environment.get(name)), names[0])
    key = environment.get(used, "")
    if not key and url == KNOWN.get(model, ("",))[0]:
        raise ConfigError(f"{url} needs a key for {model}: export {names[0]}=...")
    settings = ExternalConfig(
        url=url,
        model=model,
        api_key_env="",
        requests_per_minute=None,
        max_in_flight=config.rookery.in_flight,
        client=LIMITS,
    )
    async with open_embedder(settings, api_key=key, key_hint=f"Export {used}=...") as embedder:
        await embedder.check()
        yield embedder


def _server(config: EvolveConfig, model: str) -> tuple[str, tuple[str, ...]]:
    if config.database.embedding_api_base:
        return config.database.embedding_api_base, OPENAI_KEYS
    if model in KNOWN:
        return KNOWN[model]
    raise ConfigError(
        f"database.embedding_model is {model!r}, and no server is named for it: write "
        "database.embedding_api_base, or export OPENAI_EMBEDDING_BASE_URL=http://HOST/v1. Without "
        f"one these are known: {', '.join(KNOWN)}."
    )
