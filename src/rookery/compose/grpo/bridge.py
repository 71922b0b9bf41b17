"""Opens the engine of a grpo run beside the trainer's model, and the bridge between them.

| bridge    | weights | servers                              | `auto` takes it                     |
|-----------|---------|--------------------------------------|-------------------------------------|
| `alias`   | all     | extended, on this machine and device | if all weights can be views         |
| `copy`    | all     | extended, on this machine            | if `alias` is not possible          |
| `reload`  | all     | that see a folder of this machine    | if a server is not extended         |
| `restart` | all     | started here                         | never                               |
| `merge`   | LoRA    | all started on the trainer's GPU     | if nothing else is served there     |
| `slot`    | LoRA    | extended, on this machine            | if all servers are                  |
| `adapter` | LoRA    | that see a folder of this machine    | otherwise                           |

An extended server was started with `fleet/vllm_plugin`. `setup.plan_bridge` decides what is known
before servers start, `choose_bridge` the rest.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from rookery.compat.atropos.engine_side import ServingEngine
from rookery.compose.grpo.setup import BridgePlan, GrpoSetup, LaunchSettings
from rookery.embedded import EmbeddedEngine, run_engine
from rookery.embedded import open_engine as open_embedded
from rookery.embedded.folders import ModelFolder
from rookery.engines import OnLaunch, open_servers
from rookery.errors import ConfigError, FleetError, TrainError
from rookery.fleet import Fleet
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
from rookery.fleet.residency import claim_folder
from rookery.fleet.routing.paused import TrainerLock
from rookery.fleet.staging import memory_folder
from rookery.loops.grpo.config import BridgeName
from rookery.loops.grpo.policy_weights import POLICY
from rookery.ports import Publisher, Trainer
from rookery.runtime.concurrency import run_in_thread, task_group
from rookery.slots import FixedText, SlottedModel, load_model
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
    "choose_bridge",
    "open_beside",
]


@dataclass(frozen=True, slots=True)
class Bridge:
    """A bridge, the reason for its choice, and memory shared with servers, if any."""

    name: BridgeName
    why: str
    shared: SharedBase | None = None
    locks: tuple[TrainerLock, ...] = ()
    """Locks on the servers' weights: no other process trains them until `release`."""

    @property
    def is_merge(self) -> bool:
        """True if adapters are merged into the weights of servers, which then take any rank."""
        return self.name == "merge"

    def release(self) -> None:
        """Release the locks. Call once, after the last publication."""
        for lock in self.locks:
            lock.release()


class Opened(Protocol):
    """An open engine, the trainer's model, and the bridge between them."""

    @property
    def engine(self) -> ServingEngine: ...

    @property
    def model(self) -> SlottedModel: ...

    @property
    def bridge(self) -> Bridge: ...

    @property
    def max_kept(self) -> int | None:
        """Maximum number of kept tokens (top_k) that the engine can report; None: any number."""
        ...

    def publish_adapters(self, trainer: LoraTrainer) -> None:
        """Make the trainer publish its adapters to the engine."""
        ...

    def publish_model(self, trainer: FullTrainer, *, like: Path) -> Publisher:
        """Make the trainer publish its weights to the engine. The returned publisher is for other
        weights, measured after the training. `like` is the model's folder."""
        ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """The embedded engine, beside the trainer's model or sharing it."""

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
    """Servers that get the trainer's weights over a bridge."""

    engine: Fleet
    model: SlottedModel
    bridge: Bridge
    folder: Path
    """Folder for models that servers load; deleted when the process of the run ends."""

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


# Opening the engine and the model.


@asynccontextmanager
async def open_beside(
    setup: GrpoSetup, *, launch: LaunchSettings, on_launch: OnLaunch
) -> AsyncIterator[Opened]:
    """Open the engine and the trainer's model, which may be the same. `launch` are settings of
    servers on the trainer's GPU (`plan_servers`)."""
    engine = setup.engine
    if engine.type == "fleet":
        assert setup.bridge is not None, "a fleet has one"
        with claim_folder(engine.adapter_folder or memory_folder()) as owner:
            async with _open_bridged(setup, setup.bridge, launch, on_launch, owner.folder) as it:
                yield it
        return
    assert engine.type == "embedded", "a service trains by itself"
    if not setup.is_shared:
        async with _loading(setup) as load, open_embedded(engine) as embedded:
            yield InProcess(embedded, await load())
        return
    model = await _load(setup)
    async with run_engine(
        model,
        config=engine,
        detokenize=lambda tokens: setup.template.decode(tuple(tokens)),
        name=setup.folder.name,
    ) as shared:
        yield InProcess(shared, model, is_shared=True)


@asynccontextmanager
async def _open_bridged(
    setup: GrpoSetup, plan: BridgePlan, launch: LaunchSettings, on_launch: OnLaunch, folder: Path
) -> AsyncIterator[Bridged]:
    engine = plan.engine
    if engine.launch is not None:
        engine = engine.model_copy(update={"launch": engine.launch.model_copy(update=launch)})
    async with _loading(setup) as load, open_servers(engine, on_launch=on_launch) as fleet:
        bridge = await choose_bridge(plan, fleet)
        try:
            if plan.is_full and bridge.shared is not None:
                model = await attach(setup.folder, fleet, bridge.shared, start=setup.start)
            else:
                model = await load()
            yield Bridged(engine=fleet, model=model, bridge=bridge, folder=folder)
        finally:
            bridge.release()


@asynccontextmanager
async def _loading(setup: GrpoSetup) -> AsyncIterator[Callable[[], Awaitable[SlottedModel]]]:
    """Yield a function that returns the trainer's own copy of the model. For an adapter, loading
    starts beside the engine's start. All weights may be shared by servers, so loading waits."""
    async with task_group() as tasks:
        loading = None if setup.full is not None else tasks.create_task(_load(setup))

        async def load() -> SlottedModel:
            return await (loading or _load(setup))

        yield load


async def _load(setup: GrpoSetup) -> SlottedModel:
    place, names = setup.place, setup.folder.names
    return await asyncio.to_thread(
        load_model,
        setup.start,
        device=place.device,
        dtype=place.dtype,
        names=names,
        is_exact=setup.is_shared,
    )


# Choosing the bridge after servers have started.


async def choose_bridge(plan: BridgePlan, engine: Fleet) -> Bridge:
    """Return the plan's bridge or, for `auto`, the first that fits. The caller releases it."""
    if not plan.is_full and not plan.is_merged:
        return _choose_for_adapters(plan, engine)
    with ExitStack() as stack:
        locks = _lock_weights(engine, stack)
        choose = _share_for_merging if plan.is_merged else _choose_for_weights
        bridge = await choose(plan, engine)
        stack.pop_all()
    return replace(bridge, locks=locks)


async def _share_for_merging(plan: BridgePlan, engine: Fleet) -> Bridge:
    assert plan.folder is not None, "servers have the model of a folder"
    try:
        shared = await _share(plan, engine, may_copy=True)
    except FleetError as error:
        raise FleetError(f"bridge is merge, and {error} Or write bridge: slot.") from error
    why = "as configured" if plan.name == "merge" else "servers on this GPU, for this policy alone"
    return Bridge("merge", why, shared)


async def _share(plan: BridgePlan, engine: Fleet, *, may_copy: bool = False) -> SharedBase:
    """Map the servers' memory. Raises FleetError if it lacks weights of the model."""
    shared, folder = await share_base(engine, may_copy=may_copy), plan.folder
    if folder is not None:
        await asyncio.to_thread(lambda: shared.find(weight_shapes(folder)))
    return shared


def _lock_weights(fleet: Fleet, stack: ExitStack) -> tuple[TrainerLock, ...]:
    """Lock the weights of local servers. The stack releases the locks."""
    locks = []
    for replica in fleet.pool.replicas:
        if is_local(replica.url) and (lock := TrainerLock.take(replica.url)) is not None:
            stack.callback(lock.release)
            locks.append(lock)
    return tuple(locks)


async def _choose_for_weights(plan: BridgePlan, engine: Fleet) -> Bridge:
    if plan.name not in ("auto", "alias"):
        return Bridge(plan.name, "as configured")
    if plan.why_apart and plan.name == "alias":
        raise ConfigError(f"bridge is alias, and {plan.why_apart}: write bridge: copy.")
    if plan.why_apart:
        return _choose_copy(engine, plan.why_apart)
    try:
        shared = await _share(plan, engine)
    except FleetError as error:
        if plan.name == "alias":
            raise
        return _choose_copy(engine, str(error))
    why = "as configured" if plan.name == "alias" else "all weights can be views of the servers'"
    return Bridge("alias", why, shared)


async def attach(
    folder: ModelFolder, fleet: Fleet, shared: SharedBase, *, start: Path
) -> SlottedModel:
    """Make the trainer's model over the servers' memory, and write the starting weights into it: a
    server that ran before may have others."""
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


def _choose_for_adapters(plan: BridgePlan, fleet: Fleet) -> Bridge:
    without = [r.url for r in fleet.pool.replicas if r.route != "extension"]
    if plan.name == "adapter":
        return Bridge("adapter", "as configured")
    if plan.name == "slot" and without:
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
    """Return the publisher of adapters. If possible, servers read them on the trainer's GPU.
    `model` is the trainer's. `shared` is the servers' memory, for `merge`."""
    if engine.config.in_place:
        trainer.publish_in_place()
    canary = _canary(engine, model)
    text = FixedText(model, tokens=canary.tokens, ids=canary.ids)
    if shared is not None:
        return _merging(engine, shared, model, canary=canary, text=text)
    return _ProvedAdapters(AdapterBridge(engine, canary=canary), trainer, text)


class _ProvedAdapters:
    """Publishes a trainer's adapters. The trainee with the adapter's name computes the expected
    log-probabilities of the canary."""

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
    return MergeBridge(fleet, shared, base=base, canary=canary, logprobs=logprobs)


def _canary(fleet: Fleet, model: SlottedModel) -> Canary:
    return Canary.of(
        fleet.capabilities,
        is_float32=fleet.capabilities.is_float32 and model.dtype == torch.float32,
        vocab_size=model.shape.vocab_size,
    )


async def _trainer_logprobs(trainer: Trainer, canary: Canary) -> Sequence[float]:
    """Return the log-probabilities of the canary with the trainer's current weights."""
    [output] = await trainer.forward([TrainRequest(trainee=POLICY, data=(canary.datum,))])
    if output.error:
        raise TrainError(f"The trainer cannot read the canary: {output.error}")
    return output.logprobs[0]


async def _shared_logprobs(text: FixedText, _canary: Canary) -> Sequence[float]:
    """Return the log-probabilities of the canary with the memory shared by trainer and servers."""
    return await run_in_thread(text.logprobs)


async def _tensor_logprobs(folder: Path, weights: ModelWeights, canary: Canary) -> Sequence[float]:
    """Return the log-probabilities of the canary with these weights, on the CPU."""

    def compute() -> Sequence[float]:
        model = attach_model(folder, lambda shapes: {n: weights.tensors[n] for n in shapes})
        return FixedText(model, tokens=canary.tokens, ids=canary.ids).logprobs()

    return await asyncio.to_thread(compute)


async def _write_shared(
    bridge: AliasBridge, model: SlottedModel, weights: ModelWeights
) -> ModelRef:
    """Write other weights into the shared memory. This overwrites the trainer's weights."""
    async with bridge.changing_base() as rename:
        await run_in_thread(model.set_weights, weights.tensors)
        rename(ModelRef(name=weights.name, version=weights.version))
    return ModelRef(name=weights.name, version=weights.version)
