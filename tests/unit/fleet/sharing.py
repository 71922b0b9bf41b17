"""A stub server whose base weights are real tensors in shared memory, and its faults; and a trainer
that changes them."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from fleet.stub import Stub, logprobs_after

from rookery.fleet import Fleet, FleetConfig
from rookery.fleet.bridges.alias import AliasBridge, share_base
from rookery.fleet.bridges.update import Canary
from rookery.fleet.routing.paused import VERSION
from rookery.fleet.vllm_plugin.shared_memory import (
    SharedFile,
    bit_sum,
    lay_out,
    open_tensors,
    view,
)
from rookery.types import ModelRef, SampleRequest, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0)
ROUTES = (*Stub().routes, "/collective_rpc", "/pause", "/resume", VERSION)
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
SHAPES = {f"layers.0.{part}.weight": (2, 3) for part in PACKED["qkv_proj"]} | {
    "lm_head.weight": (3,)
}


def first_weights() -> dict[str, torch.Tensor]:
    """As a server has them: q, k and v in one."""
    return {
        "layers.0.qkv_proj.weight": torch.arange(18.0).view(6, 3),
        "lm_head.weight": torch.ones(3),
    }


def said_of(weights: Mapping[str, torch.Tensor]) -> str:
    """What a model with these weights is called by `logprobs_after`: other weights, other words."""
    return str(sum(bit_sum(tensor) for tensor in weights.values()))


@dataclass
class SharingStub(Stub):
    """Computes with its tensors as they are when it is asked."""

    routes: tuple[str, ...] = ROUTES
    tensors: dict[str, torch.Tensor] = field(default_factory=first_weights)
    refusal: str = ""
    packed_copy: str = ""
    """It goes on to compute with what it had under this name."""
    keeps_prefixes: bool = False
    """Prompts of a block or more are answered as they were the first time."""
    ignores_loads: bool = False
    fails_resume: bool = False
    num_shares: int = 0
    _file: SharedFile | None = None
    _manifest: dict[str, Any] = field(default_factory=dict)
    _prefixes: dict[tuple[int, ...], str] = field(default_factory=dict)
    _old: dict[str, torch.Tensor] = field(default_factory=dict)

    def restart(self) -> None:
        """As a new process: with its first weights, in memory of its own."""
        self.tensors, self._file, self.started_s = first_weights(), None, (self.started_s or 0) + 1
        self.weight_version = "default"

    async def _call_workers(self, request: web.Request) -> web.Response:
        document = await request.json()
        arguments = document["kwargs"]
        match document["method"]:
            case "rookery_share":
                result: object = self._share(arguments.get("source", ""))
            case "rookery_load":
                self._load_weights(json.loads(arguments["manifest"]))
                result = None
            case "reload_weights":
                for name, tensor in first_weights().items():
                    self.tensors[name].copy_(tensor)
                result = None
            case "rookery_sums":
                result = {name: bit_sum(tensor) for name, tensor in self.tensors.items()}
            case _:
                return web.json_response({"error": {"message": "unknown"}}, status=500)
        return web.json_response({"results": [result]})

    def _share(self, source: str) -> dict[str, Any]:
        if self.refusal:
            return {"refusal": self.refusal}
        self.num_shares += 1
        if self._file is None or source:
            manifest = lay_out(self.tensors)
            self._file = SharedFile(source, num_bytes=manifest["bytes"])
            for name, tensor in list(self.tensors.items()):
                own = view(self._file.memory, manifest["tensors"][name])
                if not source:
                    own.copy_(tensor)
                if name == self.packed_copy:
                    self._old[name] = tensor
                self.tensors[name] = own
            self._manifest = manifest | {"path": self._file.path, "packed": PACKED}
        return self._manifest

    def _load_weights(self, manifest: dict[str, Any]) -> None:
        if self.ignores_loads:
            return
        given = open_tensors(manifest)
        parts = [given[f"layers.0.{part}.weight"] for part in PACKED["qkv_proj"]]
        self.tensors = {
            "layers.0.qkv_proj.weight": torch.cat(parts),
            "lm_head.weight": given["lm_head.weight"].clone(),
        }

    async def _pause(self, request: web.Request) -> web.Response:
        if not self.keeps_prefixes:
            self._prefixes.clear()
        return await super()._pause(request)

    async def _resume(self, request: web.Request) -> web.Response:
        if self.fails_resume:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return await super()._resume(request)

    async def _reset(self, request: web.Request) -> web.Response:
        """As in vLLM: nothing is forgotten while requests run, unless they may begin anew."""
        can_reset = "reset_running_requests" in request.query or not any(self.in_flight.values())
        if can_reset and not self.keeps_prefixes:
            self._prefixes.clear()
        return await super()._reset(request)

    def _choice(self, body: dict[str, Any], prompt: list[int], sample: int) -> dict[str, Any]:
        now = said_of(self.tensors | self._old)
        is_long = len(prompt) >= self.block
        self.weights = self._prefixes.setdefault(tuple(prompt), now) if is_long else now
        return super()._choice(body, prompt, sample)


@dataclass
class Trainer:
    """A bridge with the weights that a trainer changes through it."""

    bridge: AliasBridge
    weights: Mapping[str, torch.Tensor]
    num_steps: int = 0

    async def step(self) -> ModelRef:
        self.num_steps += 1
        ref = ModelRef(name="policy", version=f"step-{self.num_steps}")
        async with self.bridge.changing_base() as rename:
            for tensor in self.weights.values():
                tensor += 0.5
            rename(ref)
        return ref


def expected(weights: Mapping[str, torch.Tensor], canary: Canary) -> Sequence[float]:
    name = "tiny" + said_of(weights)
    row = logprobs_after(name, canary.tokens)
    return [row[token] for token in canary.ids]


@asynccontextmanager
async def training(fleet: Fleet) -> AsyncIterator[Trainer]:
    shared = await share_base(fleet)
    views = shared.find(SHAPES)

    async def logprobs(canary: Canary) -> Sequence[float]:
        return expected(views, canary)

    canary = Canary.of(fleet.capabilities, is_float32=True)
    yield Trainer(AliasBridge(fleet, shared, canary=canary, logprobs=logprobs), views)


def fleet_of(*stubs: SharingStub) -> FleetConfig:
    return FleetConfig(urls=tuple(stub.url for stub in stubs), all_down_timeout_s=5)


async def ask(fleet: Fleet, ref: ModelRef) -> int:
    [[completion]] = await fleet.sample([SampleRequest(model=ref, prompt=(1, 2), params=GREEDY)])
    return completion.tokens[0]
