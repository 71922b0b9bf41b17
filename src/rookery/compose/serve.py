"""`serve`: runs the HTTP service from its config."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from rookery.compat.serving import make_app, open_service
from rookery.compose.http_server import answering, listen_all, open_or_create
from rookery.compose.inputs import digest, digest_models
from rookery.compose.running import ConfigSource, quiet_libraries, read_config, run_async
from rookery.config import Config, is_loopback
from rookery.embedded import EngineConfig, resolve_model, run_engine
from rookery.embedded.folders import ModelFolder
from rookery.engines import AnyEngineConfig, EngineChoice, base_name, local_model, open_engine
from rookery.errors import ConfigError
from rookery.fleet import FleetConfig
from rookery.fleet.fleet import collected_rarely
from rookery.megatron import (
    LoraStart,
    MegatronEngine,
    MegatronServer,
    MegatronTrainer,
    open_megatron,
)
from rookery.model_names import is_named
from rookery.paths import expanded
from rookery.ports import Adapters, Engine, Trainees, Trainer
from rookery.service.config import ServiceConfig
from rookery.service.keys import Keys, default_key_file, list_keys
from rookery.service.work import Backend
from rookery.slots import SlottedModel, find_device, load_model
from rookery.tasks.template import Template, load_template
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.losses import make_loss
from rookery.types import Json, LoraShape, Message, ModelRef, Task, TokenIds
from rookery.ui.live.export import render_service_page
from rookery.weights import read_adapter, write_adapter
from rookery.weights.folder import write_merged

__all__ = [
    "FolderAdapters",
    "ServeConfig",
    "TemplateCodec",
    "engine_of_environment",
    "lora_config",
    "megatron_of_environment",
    "merge_into",
    "open_backend",
    "open_megatron_backend",
    "serve",
    "serving",
    "tokenizer_of",
]

# The environment variables USE_VLLM and USE_MEGATRON select parts of the service.


_THIS_MACHINE = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def engine_of_environment(
    configured: AnyEngineConfig, environment: Mapping[str, str], *, port: int
) -> AnyEngineConfig:
    """Return the vLLM server of VLLM_BASE_URL, or VLLM_HOST and VLLM_PORT, if USE_VLLM is set; else
    the configured engine. `port` is the service's own."""
    if not _is_set(environment, "USE_VLLM"):
        return configured
    host = environment.get("VLLM_HOST") or "localhost"
    host = "127.0.0.1" if host == "0.0.0.0" else host
    vllm_port = environment.get("VLLM_PORT") or "8000"
    url = environment.get("VLLM_BASE_URL") or f"http://{host}:{vllm_port}"
    if url.rstrip("/") in {f"http://{name}:{port}" for name in _THIS_MACHINE}:
        raise ConfigError(
            f"The vLLM server and this service would both be at {url}: set `port` of the service "
            "to another, or VLLM_PORT and the --port of vLLM."
        )
    return FleetConfig(urls=(url,))


def megatron_of_environment(configured: str | None, environment: Mapping[str, str]) -> str | None:
    """Return MEGATRON_SERVER_URL if USE_MEGATRON is set, else the configured server."""
    if not _is_set(environment, "USE_MEGATRON"):
        return configured
    return environment.get("MEGATRON_SERVER_URL") or "http://localhost:5000"


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ConfigError(f"{name} is {value!r}; write true or false.")
    return value in _TRUE


# Backends: an engine and a trainer over one copy of a model's weights.


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)


@asynccontextmanager
async def open_backend(
    model: str, *, engine: AnyEngineConfig, trainer: TrainerConfig, alpha: float
) -> AsyncIterator[Backend]:
    """Open the engine and the trainer of one model for the block."""
    folder = await asyncio.to_thread(resolve_model, model)
    template = await asyncio.to_thread(load_template, folder.path, chat=False)
    weights = await _load(folder, engine)
    async with _open_engine(weights, folder, engine, template) as opened:
        lora = LoraTrainer(weights, config=trainer)
        trainees = LoraTrainees(lora, weights, base=base_name(folder.name), alpha=alpha)
        yield _backend(model, folder, template, opened, lora, trainees)


def _backend(
    model: str,
    folder: ModelFolder,
    template: Template,
    engine: Engine,
    trainer: Trainer,
    trainees: Trainees,
) -> Backend:
    return Backend(
        engine=engine,
        trainer=trainer,
        trainees=trainees,
        folders=FolderAdapters(engine),
        codec=TemplateCodec(template),
        tokenizer=tokenizer_of(model, folder),
        merge=partial(merge_into, folder.path),
    )


class LoraTrainees:
    """`Trainees` of a LoraTrainer, for callers without tensors."""

    def __init__(
        self, trainer: LoraTrainer, model: SlottedModel, *, base: str, alpha: float
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._base = base
        self._alpha = alpha

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        await asyncio.to_thread(self._create, trainee, start)

    async def remove(self, trainee: str) -> None:
        if trainee in self._trainer.trainees:
            self._trainer.remove(trainee)

    async def export(self, trainee: str, folder: Path) -> None:
        await self._trainer.export(trainee, folder)

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        await asyncio.to_thread(make_loss, loss, options)

    def _create(self, trainee: str, start: LoraShape | Path) -> None:
        if isinstance(start, Path):
            adapter = read_adapter(start, name=trainee)
        else:
            adapter = initial_adapter(
                self._model,
                lora_config(start, self._model.linears, alpha=self._alpha),
                name=trainee,
                base=self._base,
                seed=start.seed,
            )
        if trainee in self._trainer.trainees:
            self._trainer.remove(trainee)
        self._trainer.add(trainee, replace(adapter, base=self._base))


def lora_config(shape: LoraShape, linears: Iterable[str], *, alpha: float) -> LoraConfig:
    """Return the LoRA config of a client's shape, limited to layers that the model has."""
    chosen = {ATTENTION: shape.train_attn, MLP: shape.train_mlp, UNEMBED: shape.train_unembed}
    ends = {name.rpartition(".")[2] for name in linears}
    names = [name for group, is_chosen in chosen.items() if is_chosen for name in group]
    targets = tuple(name for name in names if name in ends)
    return LoraConfig(rank=shape.rank, alpha=alpha, targets=targets)


class FolderAdapters:
    """Loads PEFT folders into an engine."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        adapter = await asyncio.to_thread(read_adapter, folder, name=name)
        return await self._adapters.load(adapter)

    async def unload(self, ref: ModelRef) -> None:
        await self._adapters.unload(ref)


class TemplateCodec:
    """Encodes texts and chats with the model's own tokenizer and chat template."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def encode(self, text: str) -> TokenIds:
        return self._template.encode(Task(id="prompt", prompt=text, reference=None))

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        return self._template.encode_chat(messages, tools=tools)

    def decode(self, tokens: TokenIds) -> str:
        return self._template.decode(tokens)


async def _load(folder: ModelFolder, config: AnyEngineConfig) -> SlottedModel:
    """Load the weights for training. An embedded engine samples from the same copy."""
    dtype, device = "auto", "auto"
    if config.type == "embedded":
        dtype, device = config.dtype, config.device
    return await asyncio.to_thread(
        load_model, folder.path, device=find_device(device), dtype=dtype, names=folder.names
    )


@asynccontextmanager
async def _open_engine(
    weights: SlottedModel, folder: ModelFolder, config: AnyEngineConfig, template: Template
) -> AsyncIterator[Engine]:
    if config.type == "fleet":
        async with open_engine(config) as fleet:
            yield fleet
        return
    assert config.type == "embedded", "the config refuses another service"
    async with run_engine(
        weights,
        config=config,
        detokenize=lambda tokens: template.decode(tuple(tokens)),
        name=folder.name,
    ) as shared:
        yield shared


def merge_into(model: Path, adapter: Path, target: Path) -> None:
    """Write a model folder with a PEFT folder merged into it."""
    write_merged(model, read_adapter(adapter), target)


def tokenizer_of(model: str, folder: ModelFolder) -> str:
    """Return the model's Hugging Face id or, for clients on this machine, its folder."""
    is_id = "/" in model and not expanded(model).exists()
    return model if is_id else str(folder.path.resolve())


# A model on a Megatron server, which trains, and samples unless vLLM does.


@asynccontextmanager
async def open_megatron_backend(
    model: str, *, url: str, engine: AnyEngineConfig, alpha: float
) -> AsyncIterator[Backend]:
    """Open the Megatron server, which must run this model. Only the tokenizer is read here."""
    folder = await asyncio.to_thread(resolve_model, model)
    template = await asyncio.to_thread(load_template, folder.path, chat=False)
    async with AsyncExitStack() as stack:
        key = os.environ.get("MEGATRON_SERVER_KEY", "")
        server = await stack.enter_async_context(open_megatron(url, key=key))
        _check_model(server, folder.name)
        opened: Engine = MegatronEngine(server)
        if engine.type == "fleet":
            opened = await stack.enter_async_context(open_engine(engine))
        trainer = MegatronTrainer(server)
        trainees = MegatronTrainees(trainer, server, base=base_name(folder.name), alpha=alpha)
        yield _backend(model, folder, template, opened, trainer, trainees)


def _check_model(server: MegatronServer, model: str) -> None:
    if not is_named(model, frozenset(server.info.names)):
        raise ConfigError(
            f"The Megatron server at {server.url} runs {server.info.base}, and models names "
            f"{model}: start it with --model {model}, or map the names to its model."
        )


class MegatronTrainees:
    """`Trainees` of a Megatron server, for callers without tensors."""

    def __init__(
        self, trainer: MegatronTrainer, server: MegatronServer, *, base: str, alpha: float
    ) -> None:
        self._trainer = trainer
        self._linears = server.info.linear_layers
        self._base = base
        self._alpha = alpha

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        if isinstance(start, Path):
            adapter = await asyncio.to_thread(read_adapter, start, name=trainee)
            await self._trainer.create(trainee, replace(adapter, base=self._base))
            return
        lora = lora_config(start, self._linears, alpha=self._alpha)
        await self._trainer.create(trainee, LoraStart(lora=lora, base=self._base, seed=start.seed))

    async def remove(self, trainee: str) -> None:
        await self._trainer.remove(trainee)

    async def export(self, trainee: str, folder: Path) -> None:
        adapter = await self._trainer.adapter(trainee)
        await asyncio.to_thread(write_adapter, adapter, folder)

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        await asyncio.to_thread(make_loss, loss, options)


STOP_S = 10.0
"""Seconds from Ctrl-C to the exit. Open answers, the running pass and a snapshot get about a third
each. Unfinished work is done at the next start."""
MERGED = "merged"
"""Subfolder of the service with models that have an adapter merged into them."""
STOP_SERVERS_S = 60.0
"""`STOP_S` of a service with servers to stop."""
PORT_REMEDY = (
    "A vLLM server takes port 8000 by default too: set `port` of the service, or VLLM_PORT and the "
    "--port of vLLM, to another."
)


class ServeConfig(Config):
    """Config of the service: its address, users and models."""

    host: str = "127.0.0.1"
    """The address to listen on. An address that other machines reach needs a key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""
    models: dict[str, str] = Field(default={"smollm2": "smollm2"}, min_length=1)
    """Base models by the names that clients use: a folder, a Hugging Face id, or `smollm2`. Names
    with the same value share one copy. An adapter folder, such as `run:NAME/winner`, is served as
    its base model with the adapter merged into the weights."""
    folder: Path = Path("runs/serve")
    """The folder for everything that survives a restart."""
    anonymous: bool = False
    """Serve without keys, with all clients as one tenant; only on a loopback address."""
    keys: Path | None = None
    """The key file; null: that of `rookery keys`."""
    engine: EngineChoice = Field(default_factory=EngineConfig)
    """The engine that samples: this process, on the trainer's weights, or vLLM servers."""
    megatron: str | None = None
    """The URL of a Megatron server that trains, and samples unless `engine` is vLLM servers."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    lora_alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by this value divided by their rank. Clients cannot choose it."""
    service: ServiceConfig = Field(default_factory=ServiceConfig)

    @field_validator("engine")
    @classmethod
    def _computes(cls, engine: AnyEngineConfig) -> AnyEngineConfig:
        if engine.type == "service":
            raise ValueError(
                "a service computes with an engine of its own: write type embedded or fleet"
            )
        return engine

    def from_folder(self, folder: Path) -> "ServeConfig":
        """Make paths relative to the folder of the config file."""
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
    """Serve until Ctrl-C. `on_ready` gets the URL. `on_stop` gets the number of unfinished requests
    and the seconds until the process ends."""
    loaded = read_config(ServeConfig, config, values)
    engine = engine_of_environment(loaded.engine, os.environ, port=loaded.port)
    megatron = megatron_of_environment(loaded.megatron, os.environ)
    loaded = loaded.model_copy(update={"engine": engine, "megatron": megatron})
    quiet_libraries()
    stop_s = STOP_S if engine.type == "embedded" else STOP_SERVERS_S
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
    """Run the service inside the block; yields its URL. `backends` replace the models of the
    config. `on_stop` gets the number of unfinished requests."""
    keys = _keys(config)
    ports = listen_all(config.host, [config.port], remedy=PORT_REMEDY)
    # Listen before loading models, so that a taken port fails at once.
    with (
        ports as listeners,
        open_or_create(config.folder, kind="serve", config=config) as run,
        collected_rarely(),
    ):
        async with AsyncExitStack() as stack:
            if backends is None:
                backends = await _open_backends(config, stack)
            service = await stack.enter_async_context(open_service(run, backends, config.service))
            app = make_app(service, keys=keys, render=render_service_page)
            async with answering(app, listeners, release=service.stop) as url:
                try:
                    yield url
                finally:
                    on_stop(len(service.context.pending))


async def _open_backends(config: ServeConfig, stack: AsyncExitStack) -> Mapping[str, Backend]:
    models = {
        name: await asyncio.to_thread(_served_model, model, config.folder)
        for name, model in config.models.items()
    }
    folders = dict.fromkeys(models.values())
    is_elsewhere = config.megatron is not None or config.engine.type == "fleet"
    if len(folders) > 1 and is_elsewhere:
        raise ConfigError(
            f"models names {len(folders)} models, and a fleet or a Megatron server has one: map "
            "all names to it, or use the engine of this process."
        )
    opened = {}
    for model in folders:
        engine = config.engine
        if engine.type == "embedded":
            engine = engine.model_copy(update={"model": model})
        alpha = config.lora_alpha
        opened[model] = await stack.enter_async_context(
            open_backend(model, engine=engine, trainer=config.trainer, alpha=alpha)
            if config.megatron is None
            else open_megatron_backend(model, url=config.megatron, engine=engine, alpha=alpha)
        )
    return {name: opened[model] for name, model in models.items()}


def _served_model(model: str, folder: Path) -> str:
    """Return the model or, for an adapter, the folder of its merged model. Merged at first use."""
    path = expanded(model)
    if not (path / "adapter_config.json").is_file():
        return model
    adapter = read_adapter(path)
    if not adapter.base:
        raise ConfigError(
            f"The adapter {model} does not say its base model (base_model_name_or_path): serve "
            "that model, and register the adapter with POST /api/v1/adapters."
        )
    base = resolve_model(adapter.base).path
    target = folder / MERGED / digest([adapter.version, digest_models({"base": base})])
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            write_merged(base, adapter, Path(scratch) / target.name)
            (Path(scratch) / target.name).rename(target)
    return str(target)


def _keys(config: ServeConfig) -> Keys | None:
    if config.anonymous:
        if not is_loopback(config.host):
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
