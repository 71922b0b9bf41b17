"""The engines by their configs, and how to open one.

    async with open_engine("smollm2") as engine: ...
    async with open_engine(FleetConfig(urls=("http://gpu1:8000",))) as engine: ...
    async with open_engine(ServiceClientConfig(url="http://gpu1:8000")) as engine: ...

An external API takes no adapters, so it is a sampler and no engine: `open_sampler` opens any of
the four.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from rookery.embedded import EmbeddedEngine, EngineConfig, resolve_model
from rookery.embedded import open_engine as open_embedded
from rookery.embedded.folders import ModelFolder
from rookery.errors import ConfigError
from rookery.fleet import Fleet, FleetConfig, LaunchConfig, LaunchProgress, open_fleet
from rookery.fleet.http.external import ExternalConfig, ExternalSampler, TextCodec, open_external
from rookery.fleet.servers.settings import first_spare_gpu
from rookery.model_names import loadable_model
from rookery.paths import expanded
from rookery.remote import ServiceClientConfig, ServiceEngine, open_client
from rookery.slots import find_device

__all__ = [
    "AnyEngineConfig",
    "AnySamplerConfig",
    "EngineChoice",
    "SamplerChoice",
    "base_name",
    "engine_from_folder",
    "find_model",
    "launch_of",
    "local_model",
    "model_folder",
    "open_engine",
    "open_sampler",
    "open_servers",
    "opened_model",
    "require_adapters",
    "resolve_smollm2",
    "trainer_place",
    "with_rank",
]

OnLaunch = Callable[[LaunchProgress], None]
"""Called with the progress of each server that is being started."""
AnyEngineConfig = EngineConfig | FleetConfig | ServiceClientConfig
AnySamplerConfig = AnyEngineConfig | ExternalConfig
SamplerConfig = TypeVar("SamplerConfig", bound=AnySamplerConfig)


def _is_embedded_unless_told(value: Any) -> Any:
    is_untold = isinstance(value, dict) and "type" not in value
    return {"type": "embedded", **value} if is_untold else value


EngineChoice = Annotated[
    AnyEngineConfig, Field(discriminator="type"), BeforeValidator(_is_embedded_unless_told)
]
"""In this process (`type: embedded`, the default), vLLM servers (`type: fleet`) or a service
elsewhere (`type: service`)."""
SamplerChoice = Annotated[
    AnySamplerConfig, Field(discriminator="type"), BeforeValidator(_is_embedded_unless_told)
]
"""The same, or an OpenAI-compatible API (`type: external`)."""


@asynccontextmanager
async def open_engine(
    config: AnyEngineConfig | str, *, on_launch: OnLaunch | None = None
) -> AsyncIterator[EmbeddedEngine | Fleet | ServiceEngine]:
    """Open the engine for the block. A text names the model of an embedded engine."""
    if isinstance(config, str):
        config = EngineConfig(model=config)
    if isinstance(config, EngineConfig):
        async with open_embedded(config) as embedded:
            yield embedded
        return
    if isinstance(config, ServiceClientConfig):
        async with open_client(config) as client:
            yield client.engine
        return
    async with open_servers(config, on_launch=on_launch) as fleet:
        yield fleet


def open_servers(
    config: FleetConfig, *, on_launch: OnLaunch | None = None
) -> AbstractAsyncContextManager[Fleet]:
    """Open the servers of a fleet for the block."""
    return open_fleet(_with_folder(config), progress=on_launch)


@asynccontextmanager
async def open_sampler(
    config: AnySamplerConfig, *, codec: TextCodec, on_launch: OnLaunch | None = None
) -> AsyncIterator[EmbeddedEngine | Fleet | ServiceEngine | ExternalSampler]:
    """Open the engine or the external API for the block; `codec` is the API's tokenizer."""
    if isinstance(config, ExternalConfig):
        async with open_external(config, codec=codec) as external:
            yield external
        return
    async with open_engine(config, on_launch=on_launch) as engine:
        yield engine


def require_adapters(config: AnyEngineConfig, ranks: Mapping[str, int]) -> None:
    """Raise ConfigError if the engine cannot take adapters of these ranks; keys name them in the
    error. Servers that run already are checked once they are asked."""
    launch = launch_of(config)
    if isinstance(config, EngineConfig):
        key, limit = "engine.max_rank", config.max_rank
    elif launch is not None:
        key, limit = "engine.launch.max_lora_rank", launch.lora_rank
    else:
        return
    for what, rank in ranks.items():
        if launch is not None and not launch.max_loras:
            raise ConfigError(
                f"{what} is {rank}, and engine.launch.max_loras is 0, which serves no adapters: "
                "write max_loras: 1 or more."
            )
        if rank > limit:
            raise ConfigError(
                f"{what} is {rank}, and the engine takes adapters up to rank {limit}: raise "
                f"{key} to {rank}, or give a lower rank."
            )


def launch_of(config: AnySamplerConfig) -> LaunchConfig | None:
    """Settings of the servers to start; None if none are started."""
    return config.launch if isinstance(config, FleetConfig) else None


def opened_model(config: AnySamplerConfig) -> str:
    """Name of the model loaded on this machine, as in the config; "" if none is."""
    opened = config if isinstance(config, EngineConfig) else launch_of(config)
    return opened.model if opened is not None else ""


def with_rank(config: AnyEngineConfig, rank: int) -> AnyEngineConfig:
    """The config with `max_rank` of an embedded engine raised to `rank`."""
    if not isinstance(config, EngineConfig):
        return config
    return config.model_copy(update={"max_rank": max(config.max_rank, rank)})


def model_folder(config: AnySamplerConfig, *, tokenizer: str = "") -> Path:
    """Folder with the tokenizer and the chat template of the engine's model."""
    return find_model(config, tokenizer=tokenizer).path


def find_model(config: AnySamplerConfig, *, tokenizer: str = "") -> ModelFolder:
    """The engine's model as a local folder, with the names that adapters may give it."""
    model = tokenizer or opened_model(config)
    if not model:
        keeper = {
            "external": "An external API does not expose its tokenizer",
            "service": "A service does not send its tokenizer",
        }.get(config.type, "Servers given by URL do not expose their tokenizer")
        raise ConfigError(f"{keeper}: write tokenizer, the model's folder or Hugging Face id.")
    return resolve_model(model)


def local_model(name: str, folder: Path) -> str:
    """A model folder as an absolute path, found from `folder` or else from the current one.

    Other names, such as Hugging Face ids, stay as they are.
    """
    if not name or name.lower() == "smollm2":
        return name
    for start in (folder, Path.cwd()):
        path = expanded(name, start)
        if path.is_dir():
            return str(path.parent.resolve() / path.name)  # a link keeps its name
    return name


def base_name(model: str) -> str:
    """The base model's name in adapters: a folder becomes an absolute path."""
    path = expanded(model)
    is_folder = loadable_model(model) == model and path.is_dir()
    return str(path.absolute()) if is_folder else model


def trainer_place(engine: AnyEngineConfig) -> tuple[str, str]:
    """Device and dtype of the trainer's model: those of the embedded engine, or a GPU that the
    servers leave free. Each process of torchrun has its own GPU."""
    device, dtype = "auto", "auto"
    if engine.type == "embedded":
        device, dtype = engine.device, engine.dtype
    device = find_device(device)
    local_rank = os.environ.get("LOCAL_RANK")
    launch = launch_of(engine)
    if device == "cuda" and (local_rank or (launch is not None and launch.spare_gpus)):
        first = first_spare_gpu(launch) if launch is not None else 0
        return f"cuda:{first + int(local_rank or 0)}", dtype
    return device, dtype


def engine_from_folder(config: SamplerConfig, folder: Path) -> SamplerConfig:
    """The config with its model's relative path resolved from the config file's folder."""
    if isinstance(config, EngineConfig):
        return config.model_copy(update={"model": local_model(config.model, folder)})
    if isinstance(config, FleetConfig) and config.launch is not None:
        model = local_model(config.launch.model, folder)
        return config.model_copy(
            update={"launch": config.launch.model_copy(update={"model": model})}
        )
    return config


def resolve_smollm2(model: str) -> str:
    """Resolve `smollm2` to a folder that vLLM can load; return other names unchanged."""
    return str(resolve_model(model).path) if model.lower() == "smollm2" else model


def _with_folder(config: FleetConfig) -> FleetConfig:
    """Resolve the model to a folder, and serve it under the config's name for it."""
    launch = config.launch
    if launch is None:
        return config
    resolved = launch.model_copy(update={"model": resolve_smollm2(launch.model)})
    return config.model_copy(update={"name": config.name or launch.model, "launch": resolved})
