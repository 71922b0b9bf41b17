"""The models of an evolution, open for a block: APIs by `llm`, an engine of ours by `rookery`.

    async with open_models(config, display, engine=inputs.engine) as opened:
        reply = await opened.models["gpt-4o"].reply(request)

Without an engine nothing here needs torch.
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
"""How the names of models begin that take max_completion_tokens, as OpenEvolve lists them."""
NO_SEED = "generativelanguage.googleapis.com"
"""An API that refuses requests with a seed."""


@asynccontextmanager
async def open_models(
    config: EvolveConfig, display: Display, *, engine: "OwnEngine | None" = None
) -> AsyncIterator[Models]:
    """A model is asked for a word only where its API does not list it. `engine` has those of
    `rookery.engine`; None: none is used."""
    by_name, own_names = list_models(config), config.rookery.engine_models
    async with AsyncExitStack() as stack:
        models: dict[str, TextModel] = {}
        for name, model in by_name.items():
            if name not in own_names:
                models[name] = await stack.enter_async_context(_open_api_model(model, config))
        own = Models(models={})
        if engine is not None:
            from rookery.compose.engine_models import open_engine_models

            names = [name for name in by_name if name in own_names]
            opening = open_engine_models(engine, names, display)
            own = await stack.enter_async_context(opening)
        yield replace(own, models={**models, **own.models})


def list_models(config: EvolveConfig) -> dict[str, ModelConfig]:
    """A model that is named twice, as primary and as secondary, is one model."""
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
    """What to do when the server refuses the key."""
    if not key:
        return "Export OPENAI_API_KEY=..., or write llm.api_key: ${VARIABLE}."
    names = [name for name, value in os.environ.items() if value == key]
    return f"The key came from {names[0]}." if names else "The key came from llm.api_key."


# The embedding model of an evolution, open for a block, or none where its config names none.
#
#     async with open_config_embedder(config, environment=os.environ) as embedder:
#         await embedder.embed("x = 1")
#
# Servers and keys are found as OpenEvolve finds them.


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
