"""The models of an engine of ours as text models: the base, and each adapter. Needs torch."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from rookery.compose.inputs import open_shown_engine
from rookery.compose.running import quiet_libraries
from rookery.config import Config, parse_config
from rookery.engines import EngineChoice, model_folder, require_adapters
from rookery.loops.evolve.config import RookeryConfig
from rookery.ports import TextModel
from rookery.rollout.asking import EngineTextModel
from rookery.tasks.template import load_template
from rookery.ui.display import Display
from rookery.weights import read_adapter

__all__ = ["open_engine_models"]


class _Parts(Config):
    """What `rookery` says of the engine."""

    engine: EngineChoice
    adapters: dict[str, Path] = Field(default_factory=dict)
    tokenizer: str = ""


@asynccontextmanager
async def open_engine_models(
    config: RookeryConfig, display: Display
) -> AsyncIterator[Mapping[str, TextModel]]:
    """`base` and every adapter, by name, while the engine is open."""
    quiet_libraries()
    document = config.model_dump(mode="json", include={"engine", "adapters", "tokenizer"})
    parts = parse_config(_Parts, document, origin="the section rookery")
    adapters = {name: read_adapter(path) for name, path in parts.adapters.items()}
    require_adapters(parts.engine, {f"The rank of {n}": a.rank for n, a in adapters.items()})
    template = load_template(model_folder(parts.engine, tokenizer=parts.tokenizer))
    async with open_shown_engine(parts.engine, display) as engine:
        refs = {"base": engine.base}
        for name, adapter in adapters.items():
            refs[name] = await engine.load(adapter)
        yield {
            name: EngineTextModel(engine, model=ref, template=template)
            for name, ref in refs.items()
        }
