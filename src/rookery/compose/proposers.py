"""Opens the models of an evolution for a block: APIs from `llm`, our own engine from `rookery`.

    async with open_models(config, display, engine=inputs.engine) as opened:
        reply = await opened.models["gpt-4o"].reply(request)

Needs torch only with an engine.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rookery.errors import ConfigError
from rookery.fleet.http.api import ExternalClientConfig, ExternalConfig
from rookery.fleet.http.external import (
    ExternalEmbedder,
    ExternalTextModel,
    open_embedder,
    open_text_model,
)
from rookery.loops.evolve.config import EvolveConfig, ModelConfig
from rookery.loops.evolve.config_sections import DEFAULT_API_BASE
from rookery.loops.evolve.parts import Models
from rookery.ports import TextModel
from rookery.ui.display import Display

if TYPE_CHECKING:
    from rookery.compose.engine_models import OwnEngine

__all__ = ["list_models", "open_config_embedder", "open_models"]

REASONING = ("o1", "o3", "o4-", "gpt-5", "gpt-oss-120b", "gpt-oss-20b")
"""Name prefixes of models that take max_completion_tokens, as OpenEvolve lists them."""
NO_SEED = "generativelanguage.googleapis.com"
"""Host of an API that refuses requests with a seed."""


@asynccontextmanager
async def open_models(
    config: EvolveConfig, display: Display, *, engine: "OwnEngine | None" = None
) -> AsyncIterator[Models]:
    """Open all models and check each API. `engine` is that of `rookery.engine`; None: not used."""
    by_name, own_names = list_models(config), config.rookery.engine_models
    async with AsyncExitStack() as stack:
        models: dict[str, TextModel] = {}
        for name, model in by_name.items():
            if name not in own_names:
                models[name] = await stack.enter_async_context(_open_api_model(model, config))
        from_engine = Models(models={})
        if engine is not None:
            from rookery.compose.engine_models import open_engine_models

            names = [name for name in by_name if name in own_names]
            opening = open_engine_models(engine, names, display)
            from_engine = await stack.enter_async_context(opening)
        yield replace(from_engine, models={**models, **from_engine.models})


def list_models(config: EvolveConfig) -> dict[str, ModelConfig]:
    """Return the models by name. A model named twice, as primary and secondary, is one model."""
    judges = config.llm.judges if config.evaluator.use_llm_feedback else ()
    models: dict[str, ModelConfig] = {}
    for model in (*config.llm.ensemble, *judges):
        name = model.name or ""
        known = models.setdefault(name, model)
        if known.api_base != model.api_base:
            raise ConfigError(
                f"The model {name!r} is named with two servers, {known.api_base} and "
                f"{model.api_base}: models are told apart by name, give one of them another."
            )
    return models


@asynccontextmanager
async def _open_api_model(
    model: ModelConfig, config: EvolveConfig
) -> AsyncIterator[ExternalTextModel]:
    name, url = model.name or "", model.api_base or DEFAULT_API_BASE
    key = model.api_key.get_secret_value() if model.api_key is not None else ""
    if not key and url.startswith(DEFAULT_API_BASE):
        raise ConfigError(
            f"{url} needs a key: export OPENAI_API_KEY=..., or name another server with --api-base."
        )
    settings = ExternalConfig(
        url=url,
        model=name,
        api_key_env="",
        requests_per_minute=None,
        max_in_flight=config.rookery.in_flight + config.workers,
        token_limit=(
            "max_completion_tokens" if name.lower().startswith(REASONING) else "max_tokens"
        ),
        reasoning_effort=model.reasoning_effort,
        takes_seed=NO_SEED not in url,
        client=ExternalClientConfig(request_s=model.timeout or 60.0),
    )
    async with open_text_model(settings, api_key=key, key_hint=_key_hint(key)) as opened:
        await opened.check()
        yield opened


def _key_hint(key: str) -> str:
    """Return the hint for the error of a server that refuses the key."""
    if not key:
        return "Export OPENAI_API_KEY=..., or write llm.api_key: ${VARIABLE}."
    names = [name for name, value in os.environ.items() if value == key]
    return f"The key came from {names[0]}." if names else "The key came from llm.api_key."


# The embedding model of an evolution. Servers and keys are found as OpenEvolve finds them.


OPENAI_KEYS = ("OPENAI_EMBEDDING_API_KEY", "OPENAI_API_KEY")
KNOWN = {
    "gemini-embedding-001": (
        "https://generativelanguage.googleapis.com/v1beta/openai/",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    ),
    "text-embedding-3-large": (DEFAULT_API_BASE, OPENAI_KEYS),
    "text-embedding-3-small": (DEFAULT_API_BASE, OPENAI_KEYS),
}
"""Embedding models with a known server: its URL, and the variables that may hold its key."""
LIMITS = ExternalClientConfig(request_s=30.0, busy_s=30.0)
"""Limits of an embedding request, which takes well under 1 s. A failed one does not end the run."""


@asynccontextmanager
async def open_config_embedder(
    config: EvolveConfig, *, environment: Mapping[str, str]
) -> AsyncIterator[ExternalEmbedder | None]:
    """Open the embedding model, or yield None if the config names none. A refused key is a
    ConfigError. A server that is down is not an error yet."""
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
