"""Atropos environments for a training: a gateway with engine routes, or the client of one."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import torch
from pydantic import Field, model_validator

from rookery.compat.atropos.app import make_atropos_app
from rookery.compat.atropos.engine_side import EngineSide
from rookery.compat.atropos.feed import AtroposSource, ClientFeed, GatewayFeed, open_client
from rookery.compat.atropos.gateway import Delivery, Gateway, trained_groups
from rookery.compat.atropos.group_queue import TrainerRegistration
from rookery.compat.atropos.programs import running
from rookery.compose.grpo.bridge import Opened
from rookery.compose.grpo.setup import GrpoSetup
from rookery.compose.http_server import answering, listen_all, open_or_create
from rookery.compose.running import quiet_libraries, run_async
from rookery.compose.serve import TemplateCodec
from rookery.config import Config
from rookery.engines import EngineChoice, engine_from_folder, find_model, open_engine
from rookery.environments.atropos import AtroposConfig
from rookery.errors import ConfigError
from rookery.loops.grpo import GrpoConfig
from rookery.runs import Run
from rookery.tasks.template import load_template

__all__ = [
    "PORT_REMEDY",
    "GatewayConfig",
    "gateway_key",
    "open_source",
    "peak_memory",
    "serve_gateway",
    "serving_gateway",
]


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process and of each GPU, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"this process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    for index in range(torch.cuda.device_count()):
        peaks[f"GPU {index}"] = torch.cuda.max_memory_reserved(index)
    return peaks


# `serve_gateway`: the Atropos API alone.


class GatewayConfig(Config):
    """Config of a gateway: its address, its folder, and the engine that it passes requests to."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""
    engine_ports: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()
    """Further ports with the same routes."""
    folder: Path = Path("runs/gateway")
    """The folder that keeps groups until they are trained on."""
    vocab_size: int = Field(ge=1)
    """Vocabulary size of the trained model. Groups with other tokens are refused."""
    engine: EngineChoice | None = None
    """The engine that answers `/generate` and `/v1` with its base model; null: none does."""
    key: str = Field(default="", repr=False, exclude=True)
    """The bearer token that clients must send. Required if `host` is not a loopback address."""
    body_mib: float = Field(default=64.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "GatewayConfig":
        if self.engine is not None and self.engine.type == "service":
            raise ValueError(
                "engine is a service, which environments can ask by themselves: leave engine out, "
                "and give them the address of the service"
            )
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.key:
            raise ValueError(
                f"host is {self.host}, which others reach: give a key, or listen on 127.0.0.1"
            )
        return self

    def from_folder(self, folder: Path) -> "GatewayConfig":
        """Make paths relative to the folder of the config file."""
        engine = None if self.engine is None else engine_from_folder(self.engine, folder)
        return self.model_copy(update={"folder": folder / self.folder, "engine": engine})


def serve_gateway(config: GatewayConfig, *, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `on_ready` gets the URL."""
    if config.engine is not None:
        quiet_libraries()
    run_async(_serve(config, on_ready))


async def _serve(config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
    async with serving_gateway(config) as url:
        on_ready(url)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving_gateway(config: GatewayConfig) -> AsyncIterator[str]:
    """Run the gateway inside the block; yields its URL."""
    remedy = "Stop what listens there, or set `port` and `engine_ports`."
    ports = (config.port, *config.engine_ports)
    with (
        listen_all(config.host, ports, remedy=remedy) as listeners,
        open_or_create(config.folder, kind="gateway", config=config) as run,
    ):
        async with AsyncExitStack() as stack:
            gateway = await Gateway.open(
                run, trainer=None, vocab_size=config.vocab_size, trained=trained_groups(run)
            )
            app = make_atropos_app(
                gateway,
                delivery=Delivery(gateway),
                side=await _open_side(config, gateway, stack),
                key=config.key,
                limit_bytes=int(config.body_mib * 2**20),
            )
            yield await stack.enter_async_context(answering(app, listeners))


async def _open_side(
    config: GatewayConfig, gateway: Gateway, stack: AsyncExitStack
) -> EngineSide | None:
    if config.engine is None:
        return None
    template = load_template(find_model(config.engine, tokenizer="").path)
    engine = await stack.enter_async_context(open_engine(config.engine))
    return EngineSide(engine, codec=TemplateCodec(template), samples=gateway.samples)


PORT_REMEDY = "Stop what listens there, or write environment.port and environment.engine_ports."


def gateway_key(config: AtroposConfig) -> str:
    """Return the key that clients must send. Raises ConfigError if its variable is empty."""
    key = os.environ.get(config.key_env, "") if config.key_env else ""
    if config.key_env and not key:
        raise ConfigError(
            f"environment.key_env is {config.key_env}, which is not set: export it with a key."
        )
    return key


@asynccontextmanager
async def open_source(
    config: GrpoConfig, setup: GrpoSetup, opened: Opened, *, run: Run, say: Callable[[str], None]
) -> AsyncIterator[AtroposSource]:
    """Open the source of the run's batches. `say` gets the progress of each batch."""
    atropos, shape = setup.atropos, opened.model.shape
    assert atropos is not None
    # A batch is durable: one that the trainer cannot read would fail every resume.
    longest = min(atropos.max_token_len, shape.context_tokens)
    registration = _registration(config, run, longest=longest)
    key = gateway_key(atropos)
    if atropos.url:
        async with open_client(atropos.url, key=key) as client:
            await client.register(registration)
            size, limit_s = shape.vocab_size, atropos.batch_s
            feed = ClientFeed(client, vocab_size=size, max_tokens=longest, limit_s=limit_s)
            yield AtroposSource(feed, config=config, run=run)
        return
    gateway = await Gateway.open(
        run, trainer=registration, vocab_size=shape.vocab_size, trained=trained_groups(run)
    )
    side = EngineSide(
        opened.engine,
        codec=TemplateCodec(setup.template),
        samples=gateway.samples,
        num_kept=opened.max_kept,
    )
    app = make_atropos_app(
        gateway, delivery=None, side=side, key=key, limit_bytes=int(atropos.body_mib * 2**20)
    )
    async with AsyncExitStack() as stack:
        ports = (atropos.port, *atropos.engine_ports)
        listeners = stack.enter_context(listen_all(atropos.host, ports, remedy=PORT_REMEDY))
        url = await stack.enter_async_context(answering(app, listeners))
        words = {
            "gateway": _with_key(url, key),
            "engine": f"{url}/v1",
            "model": str(setup.folder.path),
            "key": key,
        }
        logs = run.path / "logs"
        await asyncio.to_thread(logs.mkdir, exist_ok=True)
        programs = await stack.enter_async_context(
            running(atropos.environments, words=words, logs=logs)
        )
        played = GatewayFeed(gateway, side, programs=programs, limit_s=atropos.batch_s, say=say)
        yield AtroposSource(played, config=config, run=run)


def _with_key(url: str, key: str) -> str:
    """Put the key into the URL, for clients that cannot send one."""
    return url.replace("://", f"://any:{quote(key, safe='')}@", 1) if key else url


def _registration(config: GrpoConfig, run: Run, *, longest: int) -> TrainerRegistration:
    return TrainerRegistration(
        wandb_group=run.name,
        wandb_project="rookery",
        batch_size=config.groups_per_step * config.group_size,
        max_token_len=longest,
        checkpoint_dir=str(run.path / "checkpoints"),
        save_checkpoint_interval=config.save_every,
        starting_step=0,
        num_steps=config.steps,
    )
