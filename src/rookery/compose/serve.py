"""`serve`: the HTTP service, from its config to its end."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import Field

from rookery.compose.backends import open_backend
from rookery.compose.environment import engine_of_environment, megatron_of_environment
from rookery.compose.http_server import answering, listen_all
from rookery.compose.megatron import open_megatron_backend
from rookery.compose.running import ConfigSource, quiet_libraries, read_config, run_async
from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import EngineChoice, local_model
from rookery.errors import ConfigError, RunError
from rookery.fleet.garbage import collected_rarely
from rookery.runs import Run
from rookery.service.app import make_app
from rookery.service.backend import Backend
from rookery.service.config import ServiceConfig
from rookery.service.keys import Keys, default_key_file, list_keys
from rookery.service.service import open_service
from rookery.train import TrainerConfig
from rookery.ui.service import render_service_page

__all__ = ["ServeConfig", "serve", "serving"]

STOP_S = 10.0
"""After Ctrl-C: answers, the running pass and a snapshot have about a third of it each. What is not
done then is done at the next start."""
STOP_SERVERS_S = 60.0
"""The same with servers that were started and must end."""
PORT_REMEDY = (
    "A vLLM server takes port 8000 by default too: set `port` of the service, or VLLM_PORT and the "
    "--port of vLLM, to another."
)


class ServeConfig(Config):
    """The service: where it listens, who may use it, which models it has."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    models: dict[str, str] = Field(default={"smollm2": "smollm2"}, min_length=1)
    """Names that clients use for base models, each with its folder, Hugging Face id, or
    `smollm2`. Names of one folder share it."""
    folder: Path = Path("runs/serve")
    """Where everything is kept that survives a restart."""
    anonymous: bool = False
    """Serve without keys, everybody as one tenant; on this machine's own address only."""
    keys: Path | None = None
    """The key file; by default that of `rookery keys`."""
    engine: EngineChoice = Field(default_factory=EngineConfig)
    """What samples: in this process, sharing its weights with the trainer, or vLLM servers."""
    megatron: str | None = None
    """The address of a Megatron server, which then trains, and samples too unless `engine` is vLLM
    servers."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    lora_alpha: float = Field(default=32.0, gt=0)
    """Adapters are multiplied by this over their rank; clients cannot choose it."""
    service: ServiceConfig = Field(default_factory=ServiceConfig)

    def from_folder(self, folder: Path) -> "ServeConfig":
        """With its paths taken from the folder of its file."""
        adapters = tuple(folder / one for one in self.service.adapter_folders)
        return self.model_copy(
            update={
                "service": self.service.model_copy(update={"adapter_folders": adapters}),
                "models": {n: local_model(model, folder) for n, model in self.models.items()},
                "folder": folder / self.folder,
                "keys": None if self.keys is None else folder / self.keys,
            }
        )


def serve(
    config: ConfigSource | ServeConfig,
    *,
    on_ready: Callable[[str], None],
    on_stop: Callable[[int, float], None] = lambda *_: None,
    **values: Any,
) -> None:
    """Serve until Ctrl-C. `on_ready` is told the address, `on_stop` how many requests are not done
    and within how many seconds the process ends."""
    loaded = read_config(ServeConfig, config, values)
    engine = engine_of_environment(loaded.engine, os.environ, port=loaded.port)
    megatron = megatron_of_environment(loaded.megatron, os.environ)
    loaded = loaded.model_copy(update={"engine": engine, "megatron": megatron})
    quiet_libraries()
    stop_s = STOP_S if isinstance(loaded.engine, EngineConfig) else STOP_SERVERS_S
    run_async(_serve(loaded, on_ready, lambda num: on_stop(num, stop_s)), stop_s=stop_s)


async def _serve(
    config: ServeConfig, on_ready: Callable[[str], None], on_stop: Callable[[int], None]
) -> None:
    async with serving(config, on_stop=on_stop) as url:
        on_ready(url)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(
    config: ServeConfig,
    *,
    backends: Mapping[str, Backend] | None = None,
    on_stop: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[str]:
    """The service at its address, inside the block; with backends of the caller's instead of the
    models of the config. `on_stop` is told how many requests are not done at its end."""
    keys = _keys(config)
    ports = listen_all(config.host, [config.port], remedy=PORT_REMEDY)
    # Taken before models are loaded.
    with ports as listeners, _own_run(config) as run, collected_rarely():
        async with AsyncExitStack() as stack:
            if backends is None:
                backends = await _open_backends(config, stack)
            service = await stack.enter_async_context(open_service(run, backends, config.service))
            app = make_app(service, keys=keys, render=render_service_page)
            async with answering(app, listeners, release=service.stop) as url:
                try:
                    yield url
                finally:
                    on_stop(len(service.desk.pending))


async def _open_backends(config: ServeConfig, stack: AsyncExitStack) -> Mapping[str, Backend]:
    folders = dict.fromkeys(config.models.values())
    is_elsewhere = config.megatron is not None or not isinstance(config.engine, EngineConfig)
    if len(folders) > 1 and is_elsewhere:
        raise ConfigError(
            f"models names {len(folders)} models, and a fleet or a Megatron server has one: map "
            "all names to it, or use the engine of this process."
        )
    opened = {}
    for model in folders:
        engine = config.engine
        if isinstance(engine, EngineConfig):
            engine = engine.model_copy(update={"model": model})
        alpha = config.lora_alpha
        opened[model] = await stack.enter_async_context(
            open_backend(model, engine=engine, trainer=config.trainer, alpha=alpha)
            if config.megatron is None
            else open_megatron_backend(model, url=config.megatron, engine=engine, alpha=alpha)
        )
    return {name: opened[model] for name, model in config.models.items()}


def _keys(config: ServeConfig) -> Keys | None:
    if config.anonymous:
        if not _is_loopback(config.host):
            raise ConfigError(
                f"anonymous serves everybody who reaches {config.host}: leave it out and make keys "
                "with `rookery keys add NAME`, or listen on 127.0.0.1."
            )
        return None
    path = config.keys or default_key_file()
    if not list_keys(path):
        raise ConfigError(
            f"There are no keys in {path}: make one with `rookery keys add NAME`, or write "
            "anonymous: true to serve programs of this machine without."
        )
    return Keys(path)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _own_run(config: ServeConfig) -> Iterator[Run]:
    """The service's folder, made when it is not there."""
    try:
        run = Run.open(config.folder)
    except RunError:
        if (config.folder / "events.db").exists():
            raise
        document = config.model_dump(mode="json")
        root, name = config.folder.parent, config.folder.name
        run = Run.create(root, kind="serve", name=name, config=document)
    with run:
        yield run
