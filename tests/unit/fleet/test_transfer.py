"""Weights that go to a server through a group of processes: the group is a queue here."""

import asyncio
import queue
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fleet.stub import Stub, logprobs_after, serve
from fleet.test_reload import Model, ask
from safetensors.torch import save_file

from rookery.errors import FleetError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.bridges.reload import update_weights
from rookery.fleet.bridges.transfer import CLOSE, FINISH, INIT, START, UPDATE, Meeting
from rookery.fleet.bridges.transfer import open_transfer as _open
from rookery.fleet.http.client import ClientConfig

PORT = 51216


class Saved(Model):
    """Its weights are the letters of their name, in two tensors."""

    def save_pretrained(self, folder: Path) -> None:
        letters = torch.tensor([float(ord(letter)) for letter in self.weights])
        tensors = {"one": letters[:2].half(), "two": letters[2:].reshape(1, -1)}
        save_file(tensors, folder / "model.safetensors")


@dataclass
class Server:
    """A stub with vLLM's weight transfer. Its end of the group is a queue."""

    backend: object = "nccl"
    fails_at: str = ""
    steps: list[str] = field(default_factory=list)
    paused_steps: list[str] = field(default_factory=list)
    meeting: Meeting | None = None
    is_left: bool = False
    is_cut: bool = False
    """This process's end fails."""
    _sent: "queue.Queue[torch.Tensor]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        posts = [web.post(path, self._answer) for path in (INIT, START, UPDATE, FINISH, CLOSE)]
        self.stub = Stub(
            routes=(*Stub().routes, INIT, CLOSE),
            further=[
                *posts,
                web.get("/get_world_size", self._world_size),
                web.get("/server_info", self._info),
            ],
        )

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 2})

    async def _info(self, _: web.Request) -> web.Response:
        config = self.backend and {"backend": self.backend}
        return web.json_response({"vllm_config": {"weight_transfer_config": config}})

    async def _answer(self, request: web.Request) -> web.Response:
        document = await request.json()
        self.steps.append(request.path)
        if self.stub.is_paused:
            self.paused_steps.append(request.path)
        if request.path == self.fails_at:
            return web.json_response({"error": {"message": "as asked"}}, status=500)
        if request.path == UPDATE:
            info = document["update_info"]
            tensors = [await asyncio.to_thread(self._sent.get, timeout=2.0) for _ in info["names"]]
            assert info["names"] == ["one", "two"] and info["dtype_names"] == ["float16", "float32"]
            assert info["shapes"] == [list(tensor.shape) for tensor in tensors]
            letters = torch.cat([tensor.float().flatten() for tensor in tensors]).tolist()
            self.stub.weights = "".join(chr(round(letter)) for letter in letters)
        if request.path == INIT:
            assert document["init_info"] == {
                "master_address": "127.0.0.1",
                "master_port": PORT,
                "rank_offset": 1,
                "world_size": 3,
            }
        return web.json_response({})

    def join(self, meeting: Meeting) -> "Server":
        self.meeting = meeting
        while self.fails_at == INIT:  # the others never come
            time.sleep(0.01)
        return self

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.is_cut:
            raise RuntimeError("NCCL error: remote process exited")
        self._sent.put(tensor)

    def close(self) -> None:
        self.is_left = True


async def open_transfer(fleet: Any, server: Server) -> Any:
    [replica] = fleet.pool.replicas
    return await _open(replica, port=PORT, device="cuda", join=server.join)


async def test_weights_go_through_the_group_and_are_proved() -> None:
    server = Server()
    async with serve(server.stub), open_fleet(FleetConfig(urls=(server.stub.url,))) as fleet:
        transfer = await open_transfer(fleet, server)
        assert server.meeting is not None and server.meeting.num_processes == 3
        for weights in ("newer", "newest"):
            assert await update_weights(fleet, Saved(weights), give_from=transfer.send_from) < 1e-5
            assert server.stub.weights == weights
            [[completion]] = await fleet.sample(ask(fleet.base))
            row = logprobs_after(f"tiny{weights}", (1, 2, 0))
            assert completion.tokens == (row.index(max(row)),)
        assert server.stub.num_resets == 2
        assert server.steps == [INIT, *[START, UPDATE, FINISH] * 2]
        await transfer.close()
        assert server.is_left and server.steps[-1] == CLOSE


@pytest.mark.parametrize("fails_at", ["", UPDATE])
async def test_a_server_that_others_use_computes_nothing_while_weights_come(fails_at: str) -> None:
    server = Server(fails_at=fails_at)
    server.stub.routes += ("/pause", "/resume")
    async with serve(server.stub), open_fleet(FleetConfig(urls=(server.stub.url,))) as fleet:
        transfer = await open_transfer(fleet, server)
        with pytest.raises(FleetError) if fails_at else nullcontext():
            await update_weights(fleet, Saved("newer"), give_from=transfer.send_from)
        assert server.paused_steps == ([START, UPDATE] if fails_at else [START, UPDATE, FINISH])
        assert not server.stub.is_paused


async def test_a_server_that_fails_ends_the_wait() -> None:
    for fails_at in (INIT, START, UPDATE, FINISH):
        server = Server(fails_at=fails_at)
        async with serve(server.stub):
            config = FleetConfig(urls=(server.stub.url,), client=ClientConfig(request_s=20))
            async with open_fleet(config) as fleet:
                with pytest.raises(FleetError, match="as asked"):
                    transfer = await open_transfer(fleet, server)
                    await update_weights(fleet, Saved("newer"), give_from=transfer.send_from)
        server.fails_at = ""  # ends the thread that waits


async def test_a_group_that_breaks_is_an_error_of_the_fleet() -> None:
    server = Server(is_cut=True)
    async with serve(server.stub), open_fleet(FleetConfig(urls=(server.stub.url,))) as fleet:
        transfer = await open_transfer(fleet, server)
        with pytest.raises(FleetError, match=r"Weights could not go to .* remote process exited"):
            await update_weights(fleet, Saved("newer"), give_from=transfer.send_from)


@pytest.mark.parametrize("backend", [None, "ipc"])
async def test_a_server_without_such_a_group_is_told_apart(backend: object) -> None:
    server = Server(backend=backend)
    async with serve(server.stub), open_fleet(FleetConfig(urls=(server.stub.url,))) as fleet:
        with pytest.raises(FleetError, match=rf"backend {backend}; start it with VLLM_SERVER_DEV"):
            await open_transfer(fleet, server)
    stub = Stub()
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        with pytest.raises(FleetError, match="takes no weights from another machine: start it"):
            await open_transfer(fleet, server)
