"""`serve_gateway`: the Atropos API alone, from its config to its end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from rookery.compose.backends import TemplateCodec
from rookery.compose.http_server import answering, listen_all
from rookery.compose.running import quiet_libraries, run_async
from rookery.config import Config
from rookery.embedded import EmbeddedEngine
from rookery.engines import EngineChoice, engine_from_folder, find_model, open_engine
from rookery.environments.atropos.delivery import Delivery, trained_groups
from rookery.environments.atropos.engine_side import EngineSide
from rookery.environments.atropos.gateway import Gateway
from rookery.errors import ConfigError, RunError
from rookery.fleet import Fleet
from rookery.runs import Run
from rookery.service.atropos import make_atropos_app
from rookery.tasks.template import load_template

__all__ = ["GatewayConfig", "serve_gateway", "serving_gateway"]


class GatewayConfig(Config):
    """The gateway: where it listens, what it keeps, and the engine it passes requests to."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    engine_ports: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()
    """Further ports for the same routes."""
    folder: Path = Path("runs/gateway")
    """Where groups are kept until they are trained on."""
    vocab_size: int = Field(ge=1)
    """Of the trained model: groups with other tokens are refused."""
    engine: EngineChoice | None = None
    """What `/generate` and `/v1` ask, its base model as it is; null: environments ask elsewhere."""
    key: str = Field(default="", repr=False, exclude=True)
    """What clients must send as a bearer token; needed beyond this machine's own address."""
    body_mib: float = Field(default=64.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "GatewayConfig":
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.key:
            raise ValueError(
                f"host is {self.host}, which others reach: give a key, or listen on 127.0.0.1"
            )
        return self

    def from_folder(self, folder: Path) -> "GatewayConfig":
        """With its paths taken from the folder of its file."""
        engine = None if self.engine is None else engine_from_folder(self.engine, folder)
        return self.model_copy(update={"folder": folder / self.folder, "engine": engine})


def serve_gateway(config: GatewayConfig, *, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `on_ready` is told the address."""
    if config.engine is not None:
        quiet_libraries()
    run_async(_serve(config, on_ready))


async def _serve(config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
    async with serving_gateway(config) as url:
        on_ready(url)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving_gateway(config: GatewayConfig) -> AsyncIterator[str]:
    """The gateway at its address, inside the block."""
    remedy = "Stop what listens there, or set `port` and `engine_ports`."
    ports = (config.port, *config.engine_ports)
    with listen_all(config.host, ports, remedy=remedy) as listeners, _own_run(config) as run:
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
    if not isinstance(engine, Fleet | EmbeddedEngine):
        raise ConfigError("The gateway's engine is embedded or a fleet.")
    return EngineSide(engine, codec=TemplateCodec(template), book=gateway.book)


@contextmanager
def _own_run(config: GatewayConfig) -> Iterator[Run]:
    """The gateway's folder, made when it is not there."""
    try:
        run = Run.open(config.folder)
    except RunError:
        if (config.folder / "events.db").exists():
            raise
        root, name = config.folder.parent, config.folder.name
        document = config.model_dump(mode="json")
        run = Run.create(root, kind="gateway", name=name, config=document)
    with run:
        yield run
