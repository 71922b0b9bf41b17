"""`rookery fleet up | status | verify | restore | down`: vLLM servers for all loops to use."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter
from rich.markup import escape

from rookery.cli.terminal import check_flags, console, display, fail, log_warnings, say
from rookery.config import check_url, load_config
from rookery.errors import ConfigError

if TYPE_CHECKING:
    from rookery.fleet import LaunchConfig, LocalServer
    from rookery.fleet.admin import Check, ServerStatus
    from rookery.types import Adapter

__all__ = ["fleet"]

_FILES = {".yaml", ".yml", ".toml", ".json"}
_KEY = "VLLM_API_KEY"

fleet = cyclopts.App(name="fleet", help="Start, inspect, check and stop vLLM servers.")


@fleet.command
def up(
    config: str,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    placement: Literal["here", "ray"] | None = None,
) -> int:
    """Start vLLM servers and keep them up until Ctrl-C or `rookery fleet down`.

    Starts one server per GPU (or one on the CPU) on free ports of 127.0.0.1. Adapters load at run
    time. A server that dies is restarted.

        rookery fleet up configs/fleet/8b.yaml
        rookery fleet up configs/fleet/8b.yaml --launch.model Qwen/Qwen3-8B --launch.max-loras 8
        rookery fleet up smollm2 --launch.python ~/vllm/bin/python

    Any value of the config is a flag with a dotted name.

    Parameters
    ----------
    config
        A YAML or TOML file with a launch section, or a model: a Hugging Face id, a folder, or
        `smollm2`.
    placement
        `ray` places the servers on the nodes of a Ray cluster; needs launch.replicas.
    """
    from rookery.compose.running import run_async

    log_warnings()
    launch = _read_launch(config, overrides, placement)
    if launch.placement == "ray":
        return run_async(_up_on_ray(launch))
    return run_async(_up(launch))


@fleet.command
def status(
    *urls: str, json_out: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> int:
    """Show servers: their load, their adapters, and the hit rate of the prefix cache.

    The exit code is 2 if a server does not answer. If servers need a key, set VLLM_API_KEY.

        rookery fleet status
        rookery fleet status http://gpu1:8000 http://gpu2:8000

    Parameters
    ----------
    urls
        Servers to show; by default all that Rookery started on this machine.
    json_out
        Print JSON instead of a table.
    """
    from rookery.compose.running import run_async
    from rookery.fleet.admin import status as look

    log_warnings()
    _check_urls(urls)
    servers = run_async(look(urls, api_key=os.environ.get(_KEY, "")))
    if json_out:
        console.print_json(json.dumps([asdict(server) for server in servers]))
    elif servers:
        _print_servers(servers)
    else:
        console.print("No servers. Start some with `rookery fleet up MODEL`.", highlight=False)
    for server in servers:
        if not server.is_up:
            fail(server.error or f"{server.url} is not ready.")
    return 0 if all(server.is_up for server in servers) else 2


@fleet.command
def verify(url: str, *, adapter: Path | None = None) -> int:
    """Check that a server has what Rookery needs. If not, print what to change.

    Prints one line each for completions, log-probabilities, labels, adapters, the prefix cache and
    the version. The exit code is 2 if one is wrong. If the server needs a key, set VLLM_API_KEY.

        rookery fleet verify http://127.0.0.1:8000
        rookery fleet verify http://gpu1:8000 --adapter out/poet

    Parameters
    ----------
    url
        The server, without /v1.
    adapter
        A PEFT folder to load, sample with and unload; by default an adapter that changes nothing.
    """
    from rookery.compose.running import run_async
    from rookery.fleet.admin import verify as examine

    log_warnings()
    tested = _read_adapter(adapter) if adapter is not None else None
    _check_urls([url])
    server = url.rstrip("/").removesuffix("/v1")
    checks = run_async(examine(server, api_key=os.environ.get(_KEY, ""), adapter=tested))
    _print_checks(checks)
    is_fine = all(check.is_fine is not False for check in checks)
    if not is_fine:
        fail(f"{server} lacks something. The lines marked ✗ say what to change.")
    return 0 if is_fine else 2


@fleet.command
def restore(*urls: str) -> int:
    """Reload the weights that servers were started with, after a killed training.

        rookery fleet restore http://127.0.0.1:18000

    Servers need VLLM_SERVER_DEV_MODE=1, as for training. Do not restore servers while they are
    trained. If servers need a key, set VLLM_API_KEY.

    Parameters
    ----------
    urls
        The servers, without /v1.
    """
    from rookery.compose.running import run_async
    from rookery.fleet.admin import restore as load_first

    log_warnings()
    if not urls:
        raise ConfigError("No server is named: write `rookery fleet restore http://host:8000`.")
    _check_urls(urls)
    for url in urls:
        run_async(load_first(url, api_key=os.environ.get(_KEY, "")))
        say(f"{url} has the weights it was started with.")
    return 0


def _check_urls(urls: Sequence[str]) -> None:
    for url in urls:
        try:
            check_url(url, named="Got the address")
        except ValueError as error:
            raise ConfigError(str(error)) from None


@fleet.command
def down() -> int:
    """Stop the servers that `rookery fleet up` started, and servers whose owner died.

    Servers that a run started for itself keep running. Only processes that Rookery started are
    stopped, by their ids.
    """
    from rookery.fleet.admin import down as stop

    log_warnings()
    urls = stop()
    if not urls:
        console.print("No servers to stop.")
        return 0
    console.print(f"Stopped {_count(len(urls))}:", *urls, highlight=False)
    return 0


def _read_launch(
    config: str, overrides: Sequence[str], placement: Literal["here", "ray"] | None
) -> "LaunchConfig":
    from rookery.fleet import FleetConfig
    from rookery.runs.run_folder import in_folder, resolve_references

    resolve = partial(resolve_references, find=in_folder("runs"))
    check_flags(overrides, fields=FleetConfig.model_fields, own_flags=("placement",))
    words = [*overrides, *(["--launch.placement", placement] if placement else [])]
    if Path(config).suffix in _FILES:
        loaded = load_config(FleetConfig, Path(config), overrides=words, resolve=resolve)
    else:
        words = ["--launch.model", _loadable(config), *words]
        loaded = load_config(FleetConfig, overrides=words, resolve=resolve)
    if loaded.launch is None:
        raise ConfigError(
            f"{config} has no launch section, so there is nothing to start: write launch with a "
            "model, or use the servers in urls as they are."
        )
    return loaded.launch


def _loadable(model: str) -> str:
    """Return `smollm2` as a folder that vLLM can load, and other names unchanged."""
    if model.lower() != "smollm2":
        return model
    from rookery.engines import resolve_smollm2

    return resolve_smollm2(model)


def _read_adapter(path: Path) -> "Adapter":
    from rookery.runs.run_folder import in_folder, resolve_text
    from rookery.weights import read_adapter

    return read_adapter(resolve_text(str(path), find=in_folder("runs"), key="--adapter"))


async def _up(launch: "LaunchConfig") -> int:
    from rookery.fleet.admin import up as serve

    def ready(servers: "Sequence[LocalServer]") -> None:
        urls = [server.url for server in servers]
        for server in servers:
            say(f"{server.url}   process {server.pid}   log {server.log}")
        _print_ready(launch, urls)
        if servers[0].config.api_key:
            console.print(f"They ask for the key that {_KEY} or launch.api_key holds.")
        console.print("Ctrl-C or `rookery fleet down` stops them.", highlight=False)

    with display.launching() as show:
        await serve(launch, on_ready=ready, progress=show)
    console.print("Stopped.")
    return 0


async def _up_on_ray(launch: "LaunchConfig") -> int:
    from asyncio import Event

    from rookery.fleet.servers.ray_placement import place_on_ray

    num = launch.replicas or 1
    console.print(f"Placing {_count(num)} on the Ray cluster at {launch.ray_address}.")
    async with place_on_ray(launch, num=num, address=launch.ray_address) as placed:
        for url in placed.urls:
            say(url)
        _print_ready(launch, placed.urls)
        console.print(f"They ask for a key: export {_KEY}={placed.api_key}", soft_wrap=True)
        console.print("Ctrl-C stops them.")
        await Event().wait()
    return 0


def _print_ready(launch: "LaunchConfig", urls: Sequence[str]) -> None:
    say(
        f"{_count(len(urls))} of {launch.model} ready. In a config:\n"
        f"  engine: {{type: fleet, urls: [{', '.join(urls)}]}}",
    )


def _print_servers(servers: "Sequence[ServerStatus]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def show(value: float | None, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    table = Table(box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column("server", no_wrap=True)
    table.add_column("model", overflow="fold")
    for column in ("vLLM", "run", "wait", "cache", "hits", "adapters", "pid"):
        table.add_column(column, justify="right", no_wrap=True)
    for server in servers:
        mark = "[green]✓[/green]" if server.is_up else "[red]✗[/red]"
        table.add_row(
            f"{mark} {escape(server.url)}",
            escape(Path(server.model).name if server.model else "-"),
            server.version or "-",
            show(server.num_running),
            show(server.num_waiting),
            show(server.cache_usage, ".0%"),
            show(server.hit_rate, ".0%"),
            str(len(server.adapters)),
            show(server.pid),
        )
    console.print(table)
    for server in servers:
        for name in server.adapters:
            say(f"{server.url}   {name}")


def _print_checks(checks: "Sequence[Check]") -> None:
    marks = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "[yellow]·[/yellow]"}
    for check in checks:
        line = f"{marks[check.is_fine]} {check.name:<17} {escape(check.detail)}"
        console.print(line, highlight=False, soft_wrap=True)


def _count(num: int) -> str:
    return "1 server" if num == 1 else f"{num} servers"
