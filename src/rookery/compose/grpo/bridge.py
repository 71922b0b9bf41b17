"""How the weights of a grpo run reach its servers: which bridge, and the parts that it needs.

| bridge    | weights | servers                              | auto takes it                       |
|-----------|---------|--------------------------------------|-------------------------------------|
| `alias`   | all     | of this machine and device, extended | when all weights can be views       |
| `copy`    | all     | of this machine, extended            | when `alias` says why it cannot     |
| `reload`  | all     | that see a folder of this machine    | when a server is not extended       |
| `restart` | all     | started here                         | never                               |
| `merge`   | LoRA    | one, started on the trainer's GPU    | when nothing else is served there   |
| `slot`    | LoRA    | of this machine, extended            | when all servers are                |
| `adapter` | LoRA    | that see a folder of this machine    | else                                |

A server is extended when it was started with `fleet/vllm_plugin`.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from rookery.compat.atropos.engine_side import ServingEngine
from rookery.compose.grpo.files import GrpoFiles
from rookery.compose.running import num_processes
from rookery.concurrency import run_in_thread
from rookery.embedded import EmbeddedEngine
from rookery.embedded.folders import ModelFolder
from rookery.errors import ConfigError, FleetError, TrainError
from rookery.fleet import Fleet, FleetConfig
from rookery.fleet.bridges.adapter import AdapterBridge, CopyBridge, FolderBridge
from rookery.fleet.bridges.alias import UNFINISHED, AliasBridge, MergeBridge, SharedBase, share_base
from rookery.fleet.bridges.reload import (
    reload_from,
    require_own_servers,
    require_updates,
    restart_on,
)
from rookery.fleet.bridges.update import Canary, paused
from rookery.fleet.http.client import is_local
from rookery.fleet.routing.paused import TrainerLock
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.config import BridgeName
from rookery.loops.grpo.policy_weights import POLICY
from rookery.ports import Publisher, Trainer
from rookery.slots import FixedText, SlottedModel
from rookery.slots.loading import attach_model, read_weights, weight_shapes
from rookery.train import AdapterPublisher, FullTrainer, LoraTrainer, ModelPublisher
from rookery.train.full import write_model_folder
from rookery.types import Adapter, ModelRef, ModelWeights, TrainRequest, Weights

__all__ = [
    "Bridge",
    "Bridged",
    "InProcess",
    "Opened",
    "adapter_publisher",
    "attach",
    "bridged_engine",
    "choose_bridge",
    "is_merged",
]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs call the number of experts."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """Which one, why, and the memory that servers share with this process, if they do."""

    name: BridgeName
    why: str
    shared: SharedBase | None = None
    locks: tuple[TrainerLock, ...] = ()
    """Nobody else trains these servers' weights until `release`."""

    def release(self) -> None:
        """Called once, when nothing is published any more."""
        for lock in self.locks:
            lock.release()


class Opened(Protocol):
    """An engine, the model that the trainer computes with, and what is between them."""

    @property
    def engine(self) -> ServingEngine: ...

    @property
    def model(self) -> SlottedModel: ...

    @property
    def bridge(self) -> Bridge: ...

    @property
    def max_kept(self) -> int | None:
        """Of how many tokens the engine can tell that one was drawn from them; None: of any."""
        ...

    def publish_adapters(self, trainer: LoraTrainer) -> None:
        """Have the trainer publish its adapters to the engine."""
        ...

    def publish_model(self, trainer: FullTrainer, *, like: Path) -> Publisher:
        """Have the trainer publish its weights to the engine; the publisher of other weights,
        which are measured when the training is over. `like` is the model's folder."""
        ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """The embedded engine, beside the trainer's model or over it."""

    engine: EmbeddedEngine
    model: SlottedModel
    is_shared: bool = False
    bridge: Bridge = Bridge("auto", "the engine is in this process")
    max_kept: int | None = None

    def publish_adapters(self, trainer: LoraTrainer) -> None:
        trainer.publish_to(AdapterPublisher(self.engine))

    def publish_model(self, trainer: FullTrainer, *, like: Path) -> Publisher:
        del like
        publisher = ModelPublisher(self.engine.replace_base)
        trainer.publish_to(publisher)
        if self.is_shared:
            trainer.share_with(self.engine)
        return publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridged:
    """Servers, which get the trainer's weights over a bridge."""

    engine: Fleet
    model: SlottedModel
    bridge: Bridge
    folder: Path
    """Where models may be put for servers; it goes with the run's process."""

    @property
    def max_kept(self) -> int | None:
        return self.engine.capabilities.max_logprobs

    def publish_adapters(self, trainer: LoraTrainer) -> None:
        shared = self.bridge.shared
        trainer.publish_to(adapter_publisher(self.engine, trainer, model=self.model, shared=shared))

    def publish_model(self, trainer: FullTrainer, *, like: Path) -> Publisher:
        canary = _canary(self.engine, self.model)
        if self.bridge.shared is not None:
            text = FixedText(self.model, tokens=canary.tokens, ids=canary.ids)
            logprobs = partial(_shared_logprobs, text)
            alias = AliasBridge(self.engine, self.bridge.shared, canary=canary, logprobs=logprobs)
            trainer.share_with(alias)
            return ModelPublisher(partial(_write_shared, alias, self.model))
        models = self._whole_models(canary, like)

        async def publish(weights: ModelWeights) -> ModelRef:
            return await models.replace_base(weights, partial(_trainer_logprobs, trainer))

        async def measure(weights: ModelWeights) -> ModelRef:
            return await models.replace_base(weights, partial(_tensor_logprobs, like, weights))

        trainer.publish_to(ModelPublisher(publish))
        return ModelPublisher(measure)

    def _whole_models(self, canary: Canary, like: Path) -> CopyBridge | FolderBridge:
        if self.bridge.name == "copy":
            return CopyBridge(self.engine, canary=canary)
        is_restart = self.bridge.name == "restart"
        (require_own_servers if is_restart else require_updates)(self.engine)
        return FolderBridge(
            self.engine,
            canary=canary,
            write=lambda folder, tensors: write_model_folder(
                self.model, folder, like=like, tensors=tensors
            ),
            folder=self.folder,
            give_from=restart_on if is_restart else reload_from,
        )


def is_merged(config: GrpoConfig, files: GrpoFiles, *, is_beside: bool) -> bool:
    """Whether an adapter is added to the weights of its server. It is known before a server starts,
    which then has no room for adapters. `is_beside`: there is one, on the trainer's GPU."""
    layers = config.lora.targets if files.init is None else files.init.factors
    has_head = any(layer.endswith("lm_head") for layer in layers)
    if config.bridge == "merge" and has_head:
        raise ConfigError(
            "bridge is merge and the adapter adapts lm_head, whose weights the embeddings may "
            "share: write bridge: slot, or leave lm_head out of lora.targets."
        )
    if config.full is not None or config.bridge != "auto" or has_head:
        return config.bridge == "merge"
    is_only = config.sweep is None and config.atropos is None
    return is_beside and is_only and not _has_own_layout(files.folder.path)


def _has_own_layout(folder: Path) -> bool:
    """Whether vLLM computes with other numbers than those of the model's folder: quantised ones,
    experts in one tensor, products of weights."""
    document = json.loads((folder / "config.json").read_bytes())
    sizes = document.get("text_config") or document
    has_experts = any(sizes.get(key) for key in _EXPERTS)
    return "quantization_config" in document or has_experts or bool(sizes.get("kv_lora_rank"))


def bridged_engine(
    config: GrpoConfig,
    *,
    gpu_share: float | None = None,
    is_beside: bool = False,
    is_merged: bool = False,
) -> FleetConfig:
    """The engine as the bridge needs it: servers that are started here can be told. `gpu_share` is
    what the trainer leaves to them of its GPU; `is_beside`: there is one, on the trainer's GPU."""
    engine = config.engine
    assert engine.type == "fleet", "only servers have a bridge"
    update: dict[str, object] = {}
    if config.bridge == "adapter":
        update["peft_folders"] = True
    elif config.full is None and is_beside:
        update["in_place"] = True
    if engine.launch is not None:
        changed: dict[str, object] = {}
        if config.full is not None or is_merged:
            # No adapter can be served beside weights that change.
            changed = {"live_weights": config.bridge != "restart", "max_loras": 0}
        if config.num_policies > engine.launch.max_loras and config.full is None:
            # One more: a version is read while those before it answer.
            num = config.num_policies + 1
            most = max(engine.launch.max_cpu_loras, 3 * num)
            changed |= {"max_loras": num, "max_cpu_loras": most}
        if is_beside and engine.launch.compile is None:
            changed["compile"] = False
        if gpu_share is not None:
            changed["gpu_memory_utilization"] = gpu_share
        update["launch"] = engine.launch.model_copy(update=changed)
    return engine.model_copy(update=update)


async def choose_bridge(
    config: GrpoConfig, engine: Fleet, *, folder: Path | None = None, is_merged: bool = False
) -> Bridge:
    """The bridge of the config; for `auto` the first that fits. `folder` is the model's: `alias`
    fits when servers have all weights of it. The caller releases it."""
    if config.full is None and not is_merged:
        return _choose_for_adapters(config, engine)
    with ExitStack() as stack:
        locks = _lock_weights(engine, stack)
        if is_merged:
            bridge = await _share_for_merging(config, engine, folder)
        else:
            bridge = await _choose_for_weights(config, engine, folder)
        stack.pop_all()
    return replace(bridge, locks=locks)


async def _share_for_merging(config: GrpoConfig, engine: Fleet, folder: Path | None) -> Bridge:
    assert folder is not None, "servers have the model of a folder"
    try:
        shared = await share_base(engine)
        await asyncio.to_thread(lambda: shared.find(weight_shapes(folder)))
    except FleetError as error:
        raise FleetError(f"bridge is merge, and {error} Or write bridge: slot.") from error
    why = "as configured" if config.bridge == "merge" else "one server, for this policy alone"
    return Bridge("merge", why, shared)


def _lock_weights(fleet: Fleet, stack: ExitStack) -> tuple[TrainerLock, ...]:
    """Released with the stack."""
    locks = []
    for replica in fleet.pool.replicas:
        if is_local(replica.url) and (lock := TrainerLock.take(replica.url)) is not None:
            stack.callback(lock.release)
            locks.append(lock)
    return tuple(locks)


async def _choose_for_weights(config: GrpoConfig, engine: Fleet, folder: Path | None) -> Bridge:
    if config.bridge not in ("auto", "alias"):
        return Bridge(config.bridge, "as configured")
    apart = _why_apart(config, engine)
    if apart and config.bridge == "alias":
        raise ConfigError(f"bridge is alias, and {apart}: write bridge: copy.")
    if apart:
        return _choose_copy(engine, apart)
    try:
        shared = await share_base(engine)
        if folder is not None:
            await asyncio.to_thread(lambda: shared.find(weight_shapes(folder)))
    except FleetError as error:
        if config.bridge == "alias":
            raise
        return _choose_copy(engine, str(error))
    why = (
        "as configured" if config.bridge == "alias" else "all weights can be views of the servers'"
    )
    return Bridge("alias", why, shared)


def _why_apart(config: GrpoConfig, fleet: Fleet) -> str:
    """Why trainer and servers cannot have one copy, whatever the servers are; empty: they can."""
    launch = fleet.config.launch
    if num_processes() > 1:
        return f"each of {num_processes()} processes of torchrun has a part of the weights"
    if launch is not None and launch.spare_gpus:
        return "the trainer has a GPU of its own (launch.spare_gpus)"
    return "publish_every is above 1" if config.publish_every > 1 else ""


async def attach(
    folder: ModelFolder, fleet: Fleet, shared: SharedBase, *, start: Path
) -> SlottedModel:
    """The trainer's model over the servers' memory, which gets the weights that training begins
    with: a server that ran before may have others."""
    model = await asyncio.to_thread(attach_model, folder.path, shared.find, names=folder.names)
    weights = await asyncio.to_thread(read_weights, start, dtype=model.dtype)
    async with paused(fleet.pool.replicas):
        for replica in fleet.pool.replicas:
            await replica.mark(UNFINISHED)
        await run_in_thread(model.set_weights, weights)
    return model


def _choose_copy(fleet: Fleet, why: str) -> Bridge:
    launched = [replica.local for replica in fleet.pool.replicas]
    if all(local is not None and local.config.has_extension for local in launched):
        return Bridge("copy", f"not alias: {why}")
    return Bridge("reload", f"not alias and not copy: {why}")


def _choose_for_adapters(config: GrpoConfig, fleet: Fleet) -> Bridge:
    without = [r.url for r in fleet.pool.replicas if r.route != "extension"]
    if config.bridge == "adapter":
        return Bridge("adapter", "as configured")
    if config.bridge == "slot" and without:
        raise FleetError(
            f"bridge is slot, and {without[0]} takes no adapters from memory: start it here with "
            "launch.extension: true, or write bridge: adapter."
        )
    if without:
        return Bridge("adapter", f"not slot: {without[0]} takes no adapters from memory")
    return Bridge("slot", "all servers take adapters from memory")


def adapter_publisher(
    engine: Fleet, trainer: LoraTrainer, *, model: SlottedModel, shared: SharedBase | None = None
) -> Publisher:
    """Where an adapter in training goes; it is read on the trainer's GPU where servers can. `model`
    is what the trainer computes with, `shared` the servers' memory for `merge`."""
    if engine.config.in_place:
        trainer.publish_in_place()
    canary = _canary(engine, model)
    text = FixedText(model, tokens=canary.tokens, ids=canary.ids)
    if shared is not None:
        return _merging(engine, shared, model, canary=canary, text=text)
    return _ProvedAdapters(AdapterBridge(engine, canary=canary), trainer, text)


class _ProvedAdapters:
    """A Publisher of a trainer's adapters: what each must say after a text comes from its own
    trainee, which has its name."""

    def __init__(self, bridge: AdapterBridge, trainer: LoraTrainer, text: FixedText) -> None:
        self._bridge, self._trainer, self._text = bridge, trainer, text

    async def publish(self, weights: Weights) -> ModelRef:
        async def logprobs(_canary: Canary) -> Sequence[float]:
            return await self._trainer.read_text(weights.name, self._text)

        return await self._bridge.publish_with(weights, logprobs)


def _merging(
    fleet: Fleet, shared: SharedBase, model: SlottedModel, *, canary: Canary, text: FixedText
) -> MergeBridge:
    async def logprobs(adapter: Adapter) -> Sequence[float]:
        return await run_in_thread(text.logprobs, adapter.factors)

    base = {
        name: linear.weight
        for name, linear in model.linears.items()
        if linear.weight is not None and f"{name}.weight" in shared.views
    }
    served = {name: shared.views[f"{name}.weight"] for name in base}
    return MergeBridge(fleet, shared, base=base, served=served, canary=canary, logprobs=logprobs)


def _canary(fleet: Fleet, model: SlottedModel) -> Canary:
    return Canary.of(
        fleet.capabilities,
        is_float32=fleet.capabilities.is_float32 and model.dtype == torch.float32,
        vocab_size=model.shape.vocab_size,
    )


async def _trainer_logprobs(trainer: Trainer, canary: Canary) -> Sequence[float]:
    """What the trainer computes with its weights of now."""
    [output] = await trainer.forward([TrainRequest(trainee=POLICY, data=(canary.datum,))])
    if output.error:
        raise TrainError(f"The trainer cannot read the canary: {output.error}")
    return output.logprobs[0]


async def _shared_logprobs(text: FixedText, _canary: Canary) -> Sequence[float]:
    """What the trainer's model computes with the memory that it shares."""
    return await run_in_thread(text.logprobs)


async def _tensor_logprobs(folder: Path, weights: ModelWeights, canary: Canary) -> Sequence[float]:
    """What a model with these weights computes, on the CPU."""

    def compute() -> Sequence[float]:
        model = attach_model(folder, lambda shapes: {n: weights.tensors[n] for n in shapes})
        return FixedText(model, tokens=canary.tokens, ids=canary.ids).logprobs()

    return await asyncio.to_thread(compute)


async def _write_shared(
    bridge: AliasBridge, model: SlottedModel, weights: ModelWeights
) -> ModelRef:
    """Put other weights into the shared memory: the trainer's are gone then."""
    async with bridge.changing_base() as rename:
        await run_in_thread(model.set_weights, weights.tensors)
        rename(ModelRef(name=weights.name, version=weights.version))
    return ModelRef(name=weights.name, version=weights.version)
