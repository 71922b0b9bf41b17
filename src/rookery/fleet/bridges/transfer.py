"""Sends new base weights to a server on another machine by vLLM's own weight transfer.

    transfer = await open_transfer(replica, port=51216, device="cuda")
    await update_weights(fleet, model, give_from=transfer.send_from)
    await transfer.close()

HTTP announces the weights; the weights themselves go through a group of processes: this one is the
first, the server's workers are the others. They meet at `port` of this machine. Between machines
vLLM supports only NCCL groups, for which both sides need a GPU and vLLM.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from safetensors import safe_open

from rookery.errors import FleetError, boundary
from rookery.fleet.bridges.update import PAUSE_ROUTE, Give, paused
from rookery.fleet.routing.replica import Replica

if TYPE_CHECKING:
    import torch

__all__ = ["Meeting", "TransferGroup", "WeightTransfer", "open_transfer"]

INIT, CLOSE = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
CLOSE_S = 5.0
"""Longest wait for a server to leave the group, so that a hanging one cannot block the exit."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the processes of a group meet, and how many they are; this one is the first."""

    address: str
    port: int
    num_processes: int
    device: str


class TransferGroup(Protocol):
    """This process's end of the group. Both calls wait for the other processes."""

    def broadcast(self, tensor: "torch.Tensor") -> None: ...

    def close(self) -> None: ...


Join = Callable[[Meeting], TransferGroup]


async def open_transfer(
    replica: Replica, *, port: int, device: str, join: Join | None = None
) -> "WeightTransfer":
    """Form a group with a server's workers; FleetError if the server does not take part."""
    await _require_transfer(replica)
    answer = await replica.client.get("/get_world_size")
    meeting = Meeting(
        address=_own_address(replica.url),
        port=port,
        num_processes=int(answer["world_size"]) + 1,
        device=device,
    )
    info = {
        "master_address": meeting.address,
        "master_port": meeting.port,
        "rank_offset": 1,
        "world_size": meeting.num_processes,
    }
    work = partial(join or join_nccl, meeting)
    return WeightTransfer(replica, await _beside(replica, INIT, {"init_info": info}, work))


class WeightTransfer:
    """A group with one server."""

    def __init__(self, replica: Replica, group: TransferGroup) -> None:
        self._replica = replica
        self._group = group

    def send_from(self, folder: Path) -> Give:
        """Return a `Give` that sends a server the weights of a model folder."""

        async def give(replica: Replica) -> None:
            info = await asyncio.to_thread(_describe, folder)
            # Requests of other clients must not meet weights that are partly written.
            async with paused([replica] if PAUSE_ROUTE in replica.capabilities.routes else []):
                # Versions that also take weights in their memory layout need the flag.
                await _post(replica, START, {"is_checkpoint_format": True})
                send = partial(self._broadcast, folder)
                await _beside(replica, UPDATE, {"update_info": info}, send)
                await _post(replica, FINISH, {})
            await replica.client.reset_prefix_cache()

        return give

    async def close(self) -> None:
        """Leave the group, and tell the server if it can be reached."""
        with suppress(FleetError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if CLOSE in self._replica.capabilities.routes:
                    await self._replica.client.post_json(CLOSE, {})
                await _in_thread(self._group.close)

    def _broadcast(self, folder: Path) -> None:
        for _, tensor in _weights(folder):
            self._group.broadcast(tensor)


def join_nccl(meeting: Meeting) -> TransferGroup:
    """Join the group that vLLM's `nccl` backend waits for."""
    try:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
    except ImportError as error:
        raise ImportError(
            "vLLM is not available here, and weights go to a server on another machine through it: "
            "pip install vllm, or set VLLM_ADAPTER_FOLDER to a folder that both machines see."
        ) from error
    store = StatelessProcessGroup.create(
        host=meeting.address, port=meeting.port, rank=0, world_size=meeting.num_processes
    )
    device = torch.device(meeting.device)
    return _NcclGroup(PyNcclCommunicator(store, device=device.index or 0), device)


class _NcclGroup:
    def __init__(self, communicator: Any, device: "torch.device") -> None:
        self._communicator = communicator
        self._device = device

    def broadcast(self, tensor: "torch.Tensor") -> None:
        import torch

        stream = torch.cuda.current_stream(self._device)
        sent = tensor.to(self._device)
        self._communicator.broadcast(sent, src=0, stream=stream)
        stream.synchronize()  # `sent` must not be freed before

    def close(self) -> None:
        self._communicator.destroy()


async def _require_transfer(replica: Replica) -> None:
    start = 'VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
    remedy = f"start it with {start}, or set VLLM_ADAPTER_FOLDER to a folder that both machines see"
    if INIT not in replica.capabilities.routes:
        raise FleetError(f"{replica.url} takes no weights from another machine: {remedy}.")
    info = await replica.client.get("/server_info?config_format=json")
    config = info.get("vllm_config", {}).get("weight_transfer_config")
    backend = config.get("backend") if isinstance(config, dict) else None
    if backend != "nccl":
        raise FleetError(
            f"{replica.url} was started with the weight transfer backend {backend}; {remedy}."
        )


async def _post(replica: Replica, path: str, document: Mapping[str, Any]) -> None:
    client = replica.client
    await client.post(path, json.dumps(document).encode(), limit_s=client.config.request_s)


async def _beside(
    replica: Replica, path: str, document: Mapping[str, Any], work: Callable[[], Result]
) -> Result:
    """Run `work` in this process while the server does its part of `path`; return its result."""
    limit_s = replica.client.config.request_s
    request = asyncio.create_task(_post(replica, path, document))
    done = _in_thread(work)
    lost = boundary(FleetError, f"Weights could not go to {replica.url}", foreign=(RuntimeError,))
    try:
        with lost:
            async with asyncio.timeout(limit_s):
                return (await asyncio.gather(done, request))[0]
    except TimeoutError as error:
        raise FleetError(f"{replica.url}{path} took more than request_s, {limit_s:g} s.") from error
    finally:
        request.cancel()
        done.cancel()


def _in_thread(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Run `work` in a daemon thread: if it waits forever, the program can still end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: None if done.done() else settle())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            tell(partial(done.set_exception, error))
        else:
            tell(partial(done.set_result, result))

    threading.Thread(target=run, name="rookery-weights", daemon=True).start()
    return done


def _own_address(url: str) -> str:
    """Return this machine's address on the route to a server."""
    parts = urlsplit(url)
    addresses = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _weights(folder: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield the tensors by their names in the folder, which vLLM knows."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def _describe(folder: Path) -> dict[str, list[Any]]:
    """Return names, dtypes and shapes that the server must expect, in order."""
    rows = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in _weights(folder)
    ]
    names, dtypes, shapes = zip(*rows, strict=True)
    return {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}
