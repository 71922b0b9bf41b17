"""The `alias` bridge: trainer and servers on one machine compute with one copy of the weights.

    shared = await share_base(fleet)
    model = attach_model(folder, shared.find)            # the trainer's model: views of the memory
    async with paused(fleet.pool.replicas):              # what training begins with
        model.set_weights(weights)
    bridge = AliasBridge(fleet, shared, canary=canary, logprobs=trainer_logprobs)
    trainer.share_with(bridge)

| stage   | what happens                                                               |
|---------|----------------------------------------------------------------------------|
| pause   | no call is sent; calls in flight are kept at the servers, caches emptied   |
| ask     | the canary is sent to each server and waits there                          |
| change  | the trainer writes the memory that it shares with the servers              |
| resume  | calls in flight and the canary continue with the new weights               |
| prove   | each server whose canary is right takes calls again                        |
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rookery.errors import FleetError, RookeryError, boundary
from rookery.fleet.bridges.update import (
    PAUSE,
    BaseUpdate,
    Canary,
    Logprobs,
    first_wrong,
    resume,
    resume_all,
)
from rookery.fleet.fleet import Fleet
from rookery.fleet.residency import require_adapter
from rookery.fleet.routing.replica import Replica
from rookery.fleet.vllm_plugin.shared_memory import SharedFile, bit_sum, open_tensors, view
from rookery.runtime.concurrency import run_in_thread, run_to_end
from rookery.types import Adapter, LoraFactors, ModelRef, Weights

__all__ = ["UNFINISHED", "AliasBridge", "MergeBridge", "SharedBase", "alias_weights", "share_base"]


if TYPE_CHECKING:
    import torch


# Views of a server's own weights by their names in the model's folder, without copies.
#
# | in the folder               | on the server          | view                                    |
# |-----------------------------|------------------------|-----------------------------------------|
# | q_proj, k_proj, v_proj      | qkv_proj               | rows, in this order                     |
# | gate_proj, up_proj          | gate_up_proj           | rows, in this order                     |
# | embed_tokens, lm_head       | the same, maybe padded | the first rows                          |
# | the rest                    | the same               | whole                                   |


Shapes = Mapping[str, Sequence[int]]


def alias_weights(
    served: Mapping[str, "torch.Tensor"], packed: Mapping[str, Sequence[str]], shapes: Shapes
) -> dict[str, "torch.Tensor"]:
    """Return a view for each name in `shapes`. FleetError if a weight has no view, or if no view
    covers one of the server's weights, which would never change."""
    views = {name: _view(name, served, packed, shapes) for name in shapes}
    covered = {view.untyped_storage().data_ptr() + _begin(view) for view in views.values()}
    for name, tensor in served.items():
        if tensor.untyped_storage().data_ptr() + _begin(tensor) not in covered:
            raise FleetError(
                f"The server's weight {name} {tuple(tensor.shape)} is not in the model's folder: "
                "write bridge: copy."
            )
    return views


def fused_name(name: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, Sequence[str]] | None:
    """Return the server's name of this weight's fused layer with its parts; None if unfused."""
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    for fused, parts in packed.items():
        if leaf in parts and fused != leaf:
            return f"{parent}.{fused}.{kind}", [f"{parent}.{part}.{kind}" for part in parts]
    return None


def _view(
    name: str,
    served: Mapping[str, "torch.Tensor"],
    packed: Mapping[str, Sequence[str]],
    shapes: Shapes,
) -> "torch.Tensor":
    shape = tuple(shapes[name])
    if name in served:
        whole = served[name][: shape[0]] if shape else served[name]
        return _checked(name, whole, shape)
    fused = fused_name(name, packed)
    if fused is None or fused[0] not in served:
        raise FleetError(
            f"The server has no weight that is {name} {shape} of the model's folder: write "
            "bridge: copy."
        )
    server_name, parts = fused
    rows = {part: shapes[part][0] for part in parts if part in shapes}
    if sum(rows.values()) != served[server_name].shape[0]:
        raise FleetError(
            f"The server's weight {server_name} has {served[server_name].shape[0]} rows, and "
            f"{', '.join(rows)} have {sum(rows.values())}: write bridge: copy."
        )
    begin = sum(rows[part] for part in parts[: list(parts).index(name)])
    return _checked(name, served[server_name][begin : begin + shape[0]], shape)


def _checked(name: str, view: "torch.Tensor", shape: tuple[int, ...]) -> "torch.Tensor":
    if tuple(view.shape) != shape:
        raise FleetError(
            f"{name} is {shape} in the model's folder and {tuple(view.shape)} on the server: write "
            "bridge: copy."
        )
    return view


def _begin(tensor: "torch.Tensor") -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


UNFINISHED = "unfinished"
"""Version of weights that are being written for the first time."""


class SharedBase:
    """Memory of a fleet's base model, mapped into this process."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._packed: Mapping[str, Sequence[str]] = manifest["packed"]
        self.file: SharedFile | None = None
        with boundary(
            FleetError,
            "The servers' weights cannot be opened here",
            remedy={Exception: "Start both on the same machine and device, or write bridge: copy."},
        ):
            if "path" in manifest:
                self.file = SharedFile(manifest["path"], num_bytes=manifest["bytes"])
                memory = self.file.memory
                entries = manifest["tensors"].items()
                self.served = {name: view(memory, entry) for name, entry in entries}
            else:
                self.served = open_tensors(manifest)
        self.copies: tuple[SharedBase, ...] = ()
        """Memory of the other servers on the same GPU: each has its own weights."""
        self.views: Mapping[str, torch.Tensor] = {}
        """Result of the last `find`."""

    def find(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, "torch.Tensor"]:
        """Return views of the weights by their names in the model's folder."""
        self.views = alias_weights(self.served, self._packed, shapes)
        for copy in self.copies:
            copy.find(shapes)
        return self.views

    def sums(self) -> dict[str, int]:
        """Return the expected bit sums of a server's weights, by its own names."""
        totals: dict[str, int] = {}
        for name, weight in self.views.items():
            fused = None if name in self.served else fused_name(name, self._packed)
            key = name if fused is None else fused[0]
            totals[key] = totals.get(key, 0) + bit_sum(weight)
        return totals


async def share_base(fleet: Fleet, *, may_copy: bool = False) -> SharedBase:
    """Have all servers compute with one memory, and map it here; FleetError says why not. Servers
    on a GPU have their own: with `may_copy`, those of the others are mapped as `copies`."""
    first, *others = fleet.pool.replicas
    await first.client.post("/resume", b"")  # A killed trainer may have paused it.
    shared = SharedBase(await _share(first, source=""))
    if shared.file is None and others and not may_copy:
        raise FleetError(
            f"alias is for one server on a GPU, and the fleet has {len(others) + 1}, each with its "
            "own memory: write bridge: copy, or launch.replicas: 1."
        )
    for replica in others:
        await replica.client.post("/resume", b"")
        manifest = await _share(replica, source=shared.file.path if shared.file else "")
        if shared.file is None:
            shared.copies = (*shared.copies, SharedBase(manifest))
    return shared


async def _share(replica: Replica, *, source: str) -> Mapping[str, Any]:
    problem = f"{replica.url} does not share its weights"
    remedy = (
        "Start it here (launch, or `rookery fleet up`) with live_weights: true, or write bridge: "
        "reload."
    )
    try:
        manifests = await replica.client.call_workers("rookery_share", source=source)
    except FleetError as error:
        raise FleetError(f"{problem}: {error} {remedy}") from error
    refusals = [m["refusal"] for m in manifests if "refusal" in m]
    if refusals:
        raise FleetError(f"{problem}: {refusals[0]}. Write bridge: copy.")
    manifest: Mapping[str, Any] = manifests[0]
    return manifest


class AliasBridge:
    """Changes the base weights in the memory that trainer and servers share."""

    def __init__(
        self, fleet: Fleet, shared: SharedBase, *, canary: Canary, logprobs: Logprobs
    ) -> None:
        """`logprobs` computes with the shared memory."""
        self._fleet = fleet
        self._shared = shared
        self._canary = canary
        self._logprobs = logprobs
        has_weights = shared.file is not None  # A GPU's memory goes with the server.
        self._update = BaseUpdate(fleet, canary, explain=self._explain, can_renew=has_weights)

    @asynccontextmanager
    async def changing_base(self) -> AsyncIterator[Callable[[ModelRef], None]]:
        """Pause the servers inside the block, which may change the weights and names them by the
        function it is given. At the end all servers must prove that they have them."""
        named = [self._fleet.base]
        replicas = self._fleet.pool.replicas
        async with self._update.lock:
            try:
                await asyncio.gather(*map(self._pause, replicas))
                yield named.append
                give = partial(self._name_and_resume, named[-1])
                await self._update.publish(give, self._logprobs, named[-1], again=self._attach)
            except BaseException:  # Weights may have changed in part: the servers stay out.
                await run_to_end(self._give_up(replicas))
                raise

    async def _give_up(self, replicas: Sequence[Replica]) -> None:
        """Resume what waits at the servers, including other clients' requests."""
        await self._update.forget_asked()
        await resume_all(replicas)

    async def _pause(self, replica: Replica) -> None:
        replica.exclude(f"{replica.url} waits for new weights.")
        try:
            await replica.client.post(PAUSE, b"")
            if not replica.is_marked:
                await replica.mark(UNFINISHED)
            await self._update.ask_ahead(replica)
        except RookeryError as error:
            # It computes nothing now, or is checked when it is back.
            replica.exclude(f"{replica.url} could not be paused for new weights: {error}")

    async def _name_and_resume(self, ref: ModelRef, replica: Replica) -> None:
        """Name the weights first, so that resumed requests report which weights drew a token."""
        try:
            await self._update.name(replica, ref)
        finally:
            await resume(replica)

    async def _attach(self, replica: Replica) -> None:
        """Attach a restarted server to the memory here; it may have been paused since."""
        if self._shared.file is None:
            raise FleetError(
                f"{replica.url} was started again, and the weights went with the memory of its "
                "GPU: resume the run, which goes on from its last checkpoint."
            )
        try:
            await _share(replica, source=self._shared.file.path)
            await replica.client.reset_prefix_cache()
        finally:
            await resume(replica)

    async def _explain(self, replica: Replica) -> str:
        sums = await replica.client.call_workers("rookery_sums")
        return first_wrong(sums, await asyncio.to_thread(self._shared.sums))


if TYPE_CHECKING:
    import torch


# The `merge` bridge: adds an adapter in training to the weights that a server computes with.
#
#     bridge = MergeBridge(fleet, shared, base=base, canary=canary, logprobs=read)
#     ref = await bridge.publish(adapter)         # the base model is W + scale * B A from here on
#
# The servers have one policy and no others, so no kernels for several adapters are needed. Sums are
# made in float32 and rounded once to the servers' type: a server differs from base and adapter
# computed apart by the rounding of its weights.


Linears = Mapping[str, "torch.Tensor"]
"""Weights of linear layers, by layer name."""
Expected = Callable[[Adapter], Awaitable[Sequence[float]]]
"""Returns the log-probabilities of base and adapter, computed apart, after the canary's text."""


class MergeBridge:
    """A Publisher. An adapter without factors stands for the base model."""

    def __init__(
        self,
        fleet: Fleet,
        shared: SharedBase,
        *,
        base: Linears,
        canary: Canary,
        logprobs: Expected,
    ) -> None:
        """`base` is a copy of the weights without an adapter, `shared` the servers' memory."""
        self._base = base
        self._served = [
            {layer: memory.views[f"{layer}.weight"] for layer in base}
            for memory in (shared, *shared.copies)
        ]
        self._logprobs = logprobs
        self._adapter: Adapter | None = None
        self._changed = frozenset(base)
        """Layers that may differ from the base model; at first all, as an earlier run may have."""
        self._alias = AliasBridge(fleet, shared, canary=canary, logprobs=self._expected)

    async def publish(self, weights: Weights) -> ModelRef:
        adapter = self._adapter = require_adapter(weights)
        ref = ModelRef(name=adapter.name, version=adapter.version)
        async with self._alias.changing_base() as rename:
            await run_in_thread(self._merge, adapter.factors)
            rename(ref)
        return ref

    async def _expected(self, _canary: Canary) -> Sequence[float]:
        assert self._adapter is not None, "servers are proved after a publication"
        return await self._logprobs(self._adapter)

    def _merge(self, factors: Mapping[str, LoraFactors]) -> None:
        import torch

        with torch.no_grad():
            for layer in self._changed | factors.keys():
                merged = base = self._base[layer]
                if lora := factors.get(layer):
                    a, b = (factor.to(base.device, torch.float32) for factor in (lora.a, lora.b))
                    merged = torch.addmm(base.float(), b, a, alpha=lora.scale)
                for served in self._served:
                    served[layer].copy_(merged)
            if any(weight.is_cuda for weight in self._base.values()):
                torch.cuda.synchronize()
        self._changed = frozenset(factors)
