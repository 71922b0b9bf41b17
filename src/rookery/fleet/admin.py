"""The functions behind `rookery fleet up | status | restore | down | verify`; they return records.

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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.errors import FleetError, RookeryError, boundary
from rookery.fleet.http.capabilities import Capabilities, read_shapes
from rookery.fleet.http.client import Client, ClientConfig, is_local, open_session
from rookery.fleet.http.probe import UNREADABLE, is_far, probe, read_again, read_metrics
from rookery.fleet.http.wire import Fields, encode_body, read_choices, read_completion, read_reading
from rookery.fleet.residency import Residency
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
from rookery.fleet.staging import open_staging
from rookery.types import Adapter, Completion, LoraFactors, ModelRef

__all__ = [
    "Check",
    "ServerStatus",
    "down",
    "restore",
    "status",
    "up",
    "verify",
]


logger = logging.getLogger(__name__)
STATUS_S = 5.0
"""Longest time for a server to report its status."""
STOP_S = 40.0
"""Longest time for an owner to stop its servers before they are stopped from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """State of one server now; None for values it does not report."""

    url: str
    is_up: bool
    model: str = ""
    version: str = ""
    pid: int | None = None
    """Process id, if Rookery started the server on this machine."""
    num_restarts: int | None = None
    """Restarts by its pool, if Rookery started it on this machine."""
    num_running: int | None = None
    num_waiting: int | None = None
    cache_usage: float | None = None
    hit_rate: float | None = None
    """Share of prompt tokens found in the prefix cache."""
    adapters: tuple[str, ...] = ()
    error: str = ""


async def up(
    config: LaunchConfig,
    *,
    on_ready: Callable[[Sequence[LocalServer]], None],
    progress: Progress | None = None,
) -> None:
    """Start servers for other programs and keep them up, until cancelled or terminated by SIGTERM.
    If a server is given up, the others stay up; FleetError if all are."""
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
    """Return the state of the given servers, or of all that this user's pools started here."""
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
    """Make a server reload the weights it was started with, whichever program changed them."""
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
    """Return the base model and the adapters by name."""
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


def down(root: Path | None = None, *, limit_s: float = STOP_S) -> list[str]:
    """Stop pools that `up` started and servers of dead owners; return their URLs. Pools of running
    programs are left alone. The owner is asked first, so that it does not restart its servers.
    Blocks: call it in a thread."""
    folder = root or state_folder()
    urls: list[str] = []
    for registry in find_registries(folder):
        if registry.has_owner and registry.purpose == "up":
            urls += [record.url for record in registry.records]
            _end_owner(registry, limit_s)
        elif not registry.is_locked:
            urls += [record.url for record in registry.records if record.is_alive]
    reap_orphans(folder)
    return urls


def _end_owner(left: FoundRegistry, limit_s: float) -> None:
    """Ask an owner to stop its servers; stop them from here if it does not."""
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


_PROMPT = (1, 2, 3)
_BASE = ModelRef(name="base", version="verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One result: `Check(name="log-probs", is_fine=True, detail="of tokens drawn ...")`."""

    name: str
    is_fine: bool | None
    """None if not tested; `detail` says why."""
    detail: str


async def verify(
    url: str, *, api_key: str = "", adapter: Adapter | None = None
) -> tuple[Check, ...]:
    """Run all checks in order; if the server cannot be probed, return only that failure. Adapters
    are tested with the given one, else with zeros if the model's folder is here."""
    async with open_session() as session:
        client = Client(url, session=session, config=ClientConfig(), api_key=api_key)
        try:
            server = await probe(client)
        except RookeryError as error:
            return (Check(name="server", is_fine=False, detail=str(error)),)
        context = f"context {server.max_model_len}" if server.max_model_len else "context unknown"
        checks = [
            Check(name="server", is_fine=True, detail=f"{server.model}, {context}"),
            Check(name="version", is_fine=True, detail=f"vLLM {server.version}"),
        ]
        steps: list[tuple[str, Callable[[], Awaitable[tuple[bool | None, str]]]]] = [
            ("completion", lambda: _completion(client, server)),
            ("log-probs", lambda: _processed(server)),
            ("label log-probs", lambda: _labels(client, server)),
            ("prompt log-probs", lambda: _prompt_logprobs(client, server)),
            ("adapters", lambda: _adapters(client, server, adapter)),
            ("prefix cache", lambda: _prefix_cache(client, server)),
        ]
        for name, step in steps:
            try:
                is_fine, detail = await step()
            except RookeryError as error:
                is_fine, detail = False, str(error)
            checks.append(Check(name=name, is_fine=is_fine, detail=detail))
    return tuple(checks)


async def _sample(client: Client, model: str) -> Completion:
    body = encode_body(model, Fields(max_tokens=4), [_PROMPT])
    [[choice]] = read_choices(await client.complete(body), num_prompts=1, n=1)
    return read_completion(choice, model=_BASE, num_top=0)


async def _completion(client: Client, server: Capabilities) -> tuple[bool, str]:
    completion = await _sample(client, server.model)
    return True, f"{len(completion.tokens)} tokens with ids and log-probabilities"


async def _processed(server: Capabilities) -> tuple[bool, str]:
    if server.has_processed_logprobs:
        return True, "of the distribution drawn from"
    return False, (
        "before temperature and cuts: start the server with --logprobs-mode processed_logprobs to "
        "sample at temperatures other than 0 and 1"
    )


async def _labels(client: Client, server: Capabilities) -> tuple[bool, str]:
    if not server.has_label_logprobs:
        return False, (
            f"only the {server.max_logprobs} likeliest tokens: labels beyond them are an error; "
            "use a vLLM with logprob_token_ids, or raise --max-logprobs"
        )
    body = encode_body(server.model, Fields(ids=(5, 6, 7)), [_PROMPT])
    [[choice]] = read_choices(await client.complete(body), num_prompts=1, n=1)
    after = read_reading(choice).after
    return all(token in after for token in (5, 6, 7)), "of any token, exactly"


async def _prompt_logprobs(client: Client, server: Capabilities) -> tuple[bool | None, str]:
    if not server.has_prompt_logprobs and server.has_label_logprobs:
        return None, "not used: not offered, or deadly there; texts are scored token by token"
    if not server.has_prompt_logprobs:
        return False, "not offered: texts cannot be scored; use a vLLM server"
    apart = await read_again(client, server)
    if is_far(apart):
        return False, (
            f"{apart:.2f} nats from the values when the same tokens were drawn: the server "
            "computes wrongly. vLLM does so with cudagraph_mode FULL; else try --enforce-eager"
        )
    return True, f"as when the same tokens were drawn ({apart:.2g} nats apart)"


async def _adapters(
    client: Client, server: Capabilities, adapter: Adapter | None
) -> tuple[bool | None, str]:
    if not server.has_lora_loading:
        return False, (
            "not loaded at run time: start the server with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if not is_local(client.url):
        return None, "not tested: the server is on another machine and cannot read files here"
    chosen = adapter or await asyncio.to_thread(_zeros, Path(server.root))
    if chosen is None:
        return None, "not tested: the model's folder is not here; give an adapter to test with"
    ref = ModelRef(name=f"verify-{chosen.name}", version=chosen.version)
    with open_staging(None) as staging:
        folder = await asyncio.to_thread(staging.peft_folder, ref, chosen, base=server.root)
        name = staging.wire_name(ref)
        residency = Residency(client, owner=staging.owner, is_own=False)
        try:
            await residency.load(name, path=folder)
            changed = await _sample(client, name)
        finally:
            await residency.leave(model=server.model)
    if adapter is None and changed.tokens != (await _sample(client, server.model)).tokens:
        return False, "an adapter of zeros changes what the model says"
    limits = f"at most {server.max_loras} at a time" if server.max_loras else "number unknown"
    rank = f", rank {server.max_lora_rank}" if server.max_lora_rank else ""
    return True, f"loaded, sampled, unloaded; {limits}{rank}"


def _zeros(folder: Path) -> Adapter | None:
    """Make an adapter of zeros for one query projection; None if the model has none."""
    shapes = read_shapes(folder)
    layer = next((name for name in shapes if name.endswith("q_proj")), None)
    if layer is None:
        return None
    # Imported here, as only this check needs torch.
    import torch

    size_in, size_out = shapes[layer]
    factors = LoraFactors(a=torch.zeros(8, size_in), b=torch.zeros(size_out, 8), scale=1.0)
    return Adapter(name="zeros", base="", factors={layer: factors}, version="0")


async def _prefix_cache(client: Client, server: Capabilities) -> tuple[bool | None, str]:
    before = await read_metrics(client)
    if before is None:
        return None, "not tested: the server has no /metrics"
    if not server.has_prefix_cache:
        return False, "off: start the server with --enable-prefix-caching"
    limit = server.max_model_len or 4 * server.block_tokens + 2
    prompt = tuple(_PROMPT[i % 3] for i in range(min(4 * server.block_tokens + 1, limit - 2)))
    if len(prompt) <= server.block_tokens:
        return None, f"not tested: the context is shorter than a block of {server.block_tokens}"
    for _ in range(2):
        await client.complete(encode_body(server.model, Fields(), [prompt]))
    after = await read_metrics(client)
    hits = after.prefix_hits - before.prefix_hits if after is not None else 0
    rate = after.hit_rate if after is not None else None
    shown = "" if rate is None else f"; {rate:.0%} of all prompt tokens so far"
    return (
        hits >= server.block_tokens,
        f"{hits} tokens of a repeated prompt were not computed{shown}",
    )
