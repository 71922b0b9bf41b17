"""Servers on the nodes of a Ray cluster: Ray assigns the GPUs, Rookery runs the servers.

    async with place_on_ray(config, num=8, address="auto") as placed:
        placed.urls, placed.api_key

Room for all servers is requested together (a placement group), so that two fleets never wait for
each other with half of the cluster each. One actor per server then holds its GPUs, starts it on its
node, restarts it when it dies, and stops it when the block ends or the cluster loses this program.
The servers listen on their nodes' addresses and need a key, which is made here. Adapters need a
folder that all nodes see.

| waits for                 | at most                 | then                                      |
|---------------------------|-------------------------|-------------------------------------------|
| room on the cluster       | `launch.placement_s`    | FleetError: what was asked, what there is |
| all servers to be ready   | `startup_s`, a minute   | FleetError                                |
| all servers to be stopped | `STOP_S`                | the actors are killed, their servers end  |
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rookery.config import parse_config
from rookery.errors import FleetError, RookeryError, boundary
from rookery.executors.ray import connect_ray
from rookery.fleet.servers.launch import keep_alive, open_servers
from rookery.fleet.servers.settings import LaunchConfig, check_launch, gpus_each

__all__ = ["place_on_ray"]

STOP_S = 40.0
"""Longest time for all actors together to stop their servers."""
_ACTOR_S = 60.0
"""Longest time for an actor to start, on top of its server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """URLs of the servers, and the key they require."""

    urls: tuple[str, ...]
    api_key: str


class ServerHost:
    """Actor that runs one server on its node, in Ray's event loop."""

    def __init__(self, document: dict[str, Any], api_key: str) -> None:
        self._document = document
        self._api_key = api_key
        self._stack = AsyncExitStack()
        self._watching: asyncio.Task[FleetError] | None = None

    async def start(self) -> str:
        """Start the server and return its URL once it is ready."""
        import ray

        here = {
            "host": ray.util.get_node_ip_address(),
            "api_key": self._api_key,
            "replicas": 1,
        }
        config = parse_config(
            LaunchConfig, {**self._document, **here}, origin="On its node, launch"
        )
        [server] = await self._stack.enter_async_context(open_servers(config))
        self._watching = asyncio.create_task(keep_alive(server))
        return server.url

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._stack.aclose()


@asynccontextmanager
async def place_on_ray(config: LaunchConfig, *, num: int, address: str) -> AsyncIterator[Placed]:
    """Place `num` servers on the cluster at `address`, all at once, and stop them at the end."""
    check_launch(config)
    async with (
        connect_ray(address, error=FleetError),
        _room(config, num=num, address=address) as actor,
    ):
        key = secrets.token_urlsafe(32)
        document = config.model_dump(mode="json", exclude={"host", "replicas"})
        hosts = [actor.remote(document, key) for _ in range(num)]
        try:
            yield Placed(urls=await _start(hosts, config.startup_s + _ACTOR_S), api_key=key)
        finally:
            await _stop(hosts)


@asynccontextmanager
async def _room(config: LaunchConfig, *, num: int, address: str) -> AsyncIterator[Any]:
    """Reserve room for all servers and yield the actor to place there; free the room at the end."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num_gpus = 0 if config.device == "cpu" else gpus_each(config)
    each = {"CPU": 1, **({"GPU": num_gpus} if num_gpus else {})}
    group = placement_group([each] * num)
    try:
        try:
            with boundary(FleetError, f"Asking the Ray cluster at {address} for room"):
                await _wait(group.ready(), config.placement_s)
        except _Late:
            raise FleetError(_no_room(each, num, config.placement_s, address)) from None
        strategy = PlacementGroupSchedulingStrategy(placement_group=group)
        yield ray.remote(
            num_cpus=1, num_gpus=num_gpus, max_restarts=0, scheduling_strategy=strategy
        )(ServerHost)
    finally:
        remove_placement_group(group)


def _no_room(each: dict[str, int], num: int, limit_s: float, address: str) -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shape = " and ".join(f"{count} {kind}" for kind, count in each.items())
    there = ", ".join(
        f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free, "
        f"{max((node.get(kind, 0) for node in nodes), default=0):g} on its largest node)"
        for kind in each
    )
    return (
        f"The Ray cluster at {address} did not make room for {num} servers of {shape} each within "
        f"{limit_s:g} s (launch.placement_s). It has {len(nodes)} nodes with {there}. Lower "
        "launch.replicas or launch.tensor_parallel, write device: cpu for servers without a GPU, "
        "stop what holds the rest, or add nodes."
    )


async def _start(hosts: list[Any], limit_s: float) -> tuple[str, ...]:
    starts = [_wait(host.start.remote(), limit_s) for host in hosts]
    with boundary(FleetError, f"Starting {len(hosts)} servers on the Ray cluster"):
        return tuple(await asyncio.gather(*starts))


async def _stop(hosts: list[Any]) -> None:
    """Stop every server, then kill the actors, including those that do not answer."""
    import ray

    try:
        stops = [_wait(host.stop.remote(), STOP_S) for host in hosts]
        await asyncio.gather(*stops, return_exceptions=True)
    finally:
        for host in hosts:
            ray.kill(host)


class _Late(FleetError):
    """No answer came within the limit."""


async def _wait(reference: Any, limit_s: float) -> Any:
    """Return the result of a remote call; raise Rookery's own errors without Ray's traceback."""
    import ray

    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(reference.future())
    except TimeoutError:
        raise _Late(f"The Ray cluster did not answer within {limit_s:g} s.") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RookeryError):
            raise error.cause from None
        raise
