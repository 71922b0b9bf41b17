"""What `rookery fleet up | status | restore | down` do, as functions that return records.

await up(LaunchConfig(model="Qwen/Qwen3-8B"), on_ready=show)     # until stopped
await status()                                                   # all pools of this user
await asyncio.to_thread(down)
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.errors import FleetError, RookeryError, boundary
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.fleet.http.probe import UNREADABLE, read_metrics
from rookery.fleet.routing.paused import load_first_weights, name_first_weights
from rookery.fleet.servers.launch import LocalServer, Progress, keep_alive, open_servers
from rookery.fleet.servers.registry import (
    FoundRegistry,
    ServerRecord,
    find_registries,
    reap_orphans,
    state_folder,
    stop_processes,
)
from rookery.fleet.servers.settings import LaunchConfig

__all__ = ["ServerStatus", "Stopped", "down", "restore", "status", "up"]

logger = logging.getLogger(__name__)
STATUS_S = 5.0
"""How long a server may take to tell its status."""
STOP_S = 40.0
"""How long an owner may take to stop its servers before they are stopped for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One server now. What it does not tell is None."""

    url: str
    is_up: bool
    model: str = ""
    version: str = ""
    pid: int | None = None
    """Of servers that Rookery started on this machine."""
    num_restarts: int | None = None
    """The same: how often the pool started it again."""
    num_running: int | None = None
    num_waiting: int | None = None
    cache_usage: float | None = None
    hit_rate: float | None = None
    """Share of prompt tokens found in the prefix cache."""
    adapters: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What `down` stopped."""

    urls: tuple[str, ...]
    num_orphans: int
    """Servers among them whose owner had died before."""


async def up(
    config: LaunchConfig,
    *,
    on_ready: Callable[[Sequence[LocalServer]], None],
    progress: Progress | None = None,
) -> None:
    """Start servers for others to use and keep them up, until cancelled or told to terminate.

    A server that is given up leaves the others up; FleetError when all are.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_told = False

    def terminate() -> None:
        nonlocal is_told
        is_told = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        async with open_servers(config, progress=progress, purpose="up") as servers:
            on_ready(servers)
            reasons = await asyncio.gather(*(keep_alive(server) for server in servers))
            raise FleetError("No server is left.\n" + "\n".join(str(reason) for reason in reasons))
    except asyncio.CancelledError:
        if not is_told:
            raise
        task.uncancel()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def status(urls: Sequence[str] = (), *, api_key: str = "") -> tuple[ServerStatus, ...]:
    """The given servers, or all that this user's pools started on this machine."""
    records: dict[str, ServerRecord | None] = dict.fromkeys(urls)
    if not records:
        registries = await asyncio.to_thread(find_registries, state_folder())
        records = {r.url: r for registry in registries for r in registry.records if r.is_alive}
    limits = ClientConfig(connect_s=STATUS_S, control_s=STATUS_S)
    async with open_session() as session:
        looks = [
            _status(Client(url, session=session, config=limits, api_key=api_key), record)
            for url, record in records.items()
        ]
        return tuple(await asyncio.gather(*looks))


async def restore(url: str, *, api_key: str = "") -> None:
    """Have a server load the weights it was started with, whoever changed them."""
    async with open_session() as session:
        client = Client(url, session=session, api_key=api_key)
        await load_first_weights(client)
        await name_first_weights(client)


async def _status(client: Client, record: ServerRecord | None) -> ServerStatus:
    pid, num_restarts = (None, None) if record is None else (record.pid, record.num_restarts)
    known = ServerStatus(url=client.url, is_up=False, pid=pid, num_restarts=num_restarts)
    try:
        base, adapters = _models(await client.get("/v1/models"), client.url)
        metrics = await read_metrics(client)
        version = await _version(client)
    except RookeryError as error:
        return replace(known, error=str(error))
    return replace(
        known,
        is_up=await client.is_healthy(),
        model=base,
        version=version,
        num_running=metrics.num_running if metrics else None,
        num_waiting=metrics.num_waiting if metrics else None,
        cache_usage=metrics.cache_usage if metrics else None,
        hit_rate=metrics.hit_rate if metrics else None,
        adapters=adapters,
    )


def _models(answer: Any, url: str) -> tuple[str, tuple[str, ...]]:
    """The base model and the adapters."""
    with boundary(FleetError, f"{url}/v1/models answers no list of models", foreign=UNREADABLE):
        names = [(str(model["id"]), bool(model.get("parent"))) for model in answer["data"]]
    base = next((name for name, is_adapter in names if not is_adapter), "")
    return base, tuple(name for name, is_adapter in names if is_adapter)


async def _version(client: Client) -> str:
    try:
        answer = await client.get("/version")
    except RookeryError:
        return ""
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""


def down(root: Path | None = None, *, limit_s: float = STOP_S) -> Stopped:
    """Stop the pools that `up` started, and servers left by dead owners. Runs' own are left alone.

    The owner is asked first, so that it does not start them again. Blocks: call it in a thread.
    """
    folder = root or state_folder()
    urls: list[str] = []
    for registry in find_registries(folder):
        if registry.has_owner and registry.purpose == "up":
            urls += [record.url for record in registry.records]
            _end_owner(registry, limit_s)
        elif not registry.is_locked:
            urls += [record.url for record in registry.records if record.is_alive]
    return Stopped(urls=tuple(urls), num_orphans=reap_orphans(folder))


def _end_owner(left: FoundRegistry, limit_s: float) -> None:
    """Ask it to stop its servers and wait until it has; else stop them for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(left.owner_pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        registries = find_registries(left.folder.parent)
        if not any(registry.has_owner for registry in registries if registry.folder == left.folder):
            return
        time.sleep(0.05)
    if stop_processes(left.records):
        logger.warning("stopped servers that process %d did not", left.owner_pid)
        shutil.rmtree(left.folder, ignore_errors=True)
