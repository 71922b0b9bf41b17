"""Atropos environments for a training: the gateway with its engine routes, or a client of one."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import quote

from rookery.compose.backends import TemplateCodec
from rookery.compose.grpo_files import GrpoFiles
from rookery.compose.http_server import answering, listen_all
from rookery.environments.atropos.client import open_client
from rookery.environments.atropos.config import AtroposConfig
from rookery.environments.atropos.delivery import trained_groups
from rookery.environments.atropos.engine_side import EngineSide, ServingEngine
from rookery.environments.atropos.feed import ClientFeed, Feed, GatewayFeed
from rookery.environments.atropos.gateway import Gateway
from rookery.environments.atropos.programs import running
from rookery.environments.atropos.registry import TrainerRegistration
from rookery.errors import ConfigError
from rookery.fleet import Fleet
from rookery.loops.grpo import GrpoConfig
from rookery.runs import Run
from rookery.service.atropos import make_atropos_app
from rookery.slots.model import ModelShape

__all__ = ["PORT_REMEDY", "gateway_key", "open_feed"]

PORT_REMEDY = "Stop what listens there, or write environment.port and environment.engine_ports."


def gateway_key(config: AtroposConfig) -> str:
    """The key that clients must send; ConfigError when its variable is empty."""
    key = os.environ.get(config.key_env, "") if config.key_env else ""
    if config.key_env and not key:
        raise ConfigError(
            f"environment.key_env is {config.key_env}, which is not set: export it with a key."
        )
    return key


@asynccontextmanager
async def open_feed(
    config: GrpoConfig,
    files: GrpoFiles,
    *,
    engine: ServingEngine,
    shape: ModelShape,
    run: Run,
    say: Callable[[str], None],
) -> AsyncIterator[Feed]:
    """Where the batches of the run come from, while the block runs. `shape` is the trainer's; `say`
    is told how far a batch is."""
    own = config.atropos
    assert own is not None
    # What the trainer cannot read would end the run again and again: a batch is durable.
    longest = min(own.max_token_len, shape.context_tokens)
    registration = _registration(config, run, longest=longest)
    key = gateway_key(own)
    if own.url:
        async with open_client(own.url, key=key) as client:
            await client.register(registration)
            yield ClientFeed(
                client, vocab_size=shape.vocab_size, max_tokens=longest, limit_s=own.batch_s
            )
        return
    gateway = await Gateway.open(
        run, trainer=registration, vocab_size=shape.vocab_size, trained=trained_groups(run)
    )
    num_kept = engine.capabilities.max_logprobs if isinstance(engine, Fleet) else None
    codec = TemplateCodec(files.template)
    side = EngineSide(engine, codec=codec, book=gateway.book, num_kept=num_kept)
    app = make_atropos_app(
        gateway, delivery=None, side=side, key=key, limit_bytes=int(own.body_mib * 2**20)
    )
    async with AsyncExitStack() as stack:
        ports = (own.port, *own.engine_ports)
        listeners = stack.enter_context(listen_all(own.host, ports, remedy=PORT_REMEDY))
        url = await stack.enter_async_context(answering(app, listeners))
        words = {
            "gateway": _with_key(url, key),
            "engine": f"{url}/v1",
            "model": str(files.folder.path),
            "key": key,
        }
        logs = run.path / "logs"
        await asyncio.to_thread(logs.mkdir, exist_ok=True)
        programs = await stack.enter_async_context(
            running(own.environments, words=words, logs=logs)
        )
        yield GatewayFeed(gateway, side, programs=programs, limit_s=own.batch_s, say=say)


def _with_key(url: str, key: str) -> str:
    """The address that clients without a way to send a key are given."""
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
