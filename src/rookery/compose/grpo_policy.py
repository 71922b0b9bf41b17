"""What a grpo run trains, made as its config says: an adapter, or all weights of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.compose.grpo_bridge import Opened, adapter_publisher, full_publisher
from rookery.compose.grpo_files import GrpoFiles
from rookery.compose.grpo_reference import needs_reference
from rookery.embedded import EmbeddedEngine
from rookery.errors import ConfigError, ModelError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.adapter_policy import AdapterPolicy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.full_policy import BaseModel, FullPolicy
from rookery.loops.grpo.policy_weights import POLICY, PolicyWeights
from rookery.ports import Engine
from rookery.runs import Run
from rookery.slots import SlottedModel
from rookery.train import (
    FullConfig,
    FullTrainer,
    FullWeights,
    LoraTrainer,
)
from rookery.train.processes import Processes
from rookery.train.sharded import ShardedTrainer
from rookery.train.slotted_trainer import SlottedTrainer
from rookery.types import Adapter

__all__ = [
    "MakePolicy",
    "PolicyParts",
    "adapter_policy",
    "full_policy",
    "make_trainer",
]

MakePolicy = Callable[[Run], PolicyWeights]
"""The weights of a run, when all that can be refused has been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """What any policy is made of, besides its weights."""

    opened: Opened
    processes: Processes
    reference: Adapter | LoraTrainer | None
    """See `make_reference`."""


def adapter_policy(config: GrpoConfig, start: Adapter, parts: PolicyParts) -> MakePolicy:
    """An adapter. A run that goes on begins with the one in its own folder."""
    engine, model = parts.opened.engine, parts.opened.model
    trainer = LoraTrainer(model, config=config.trainer, processes=parts.processes)
    trainer.publish_to(adapter_publisher(engine, trainer, model=model))

    def make(run: Run) -> PolicyWeights:
        own = replace(read_start(run) or start, name=POLICY)
        reference = parts.reference
        if reference is None and needs_reference(config):
            reference = own
        return AdapterPolicy(trainer, start=own, engine=engine, reference=reference)

    return make


def make_trainer(
    config: GrpoConfig, start: Path, *, model: SlottedModel, processes: Processes
) -> SlottedTrainer[Any]:
    """The trainer of a process that is not the first."""
    if config.full is None:
        return LoraTrainer(model, config=config.trainer, processes=processes)
    return _full_trainer(config, start, model=model, processes=processes)


def _full_trainer(
    config: GrpoConfig, start: Path, *, model: SlottedModel, processes: Processes
) -> FullTrainer:
    """In several processes, each keeps a part of the weights."""
    full = config.full or FullWeights()
    kind = FullTrainer if processes.size == 1 else ShardedTrainer
    return kind(
        model,
        name=POLICY,
        config=FullConfig(**config.trainer.model_dump(), **full.model_dump()),
        like=start,
        processes=processes,
    )


def full_policy(config: GrpoConfig, files: GrpoFiles, parts: PolicyParts) -> MakePolicy:
    """All weights of the model, which is at the start; an engine that shares it takes turns."""
    start, folder = files.start, files.folder.path
    engine, model = parts.opened.engine, parts.opened.model
    if config.init_from is not None:
        _check_shape(model, start, engine)
    if config.share and parts.processes.size > 1:
        raise ConfigError(
            f"share is for one process, and torchrun started {parts.processes.size}, each with a "
            "part of the weights: write share: false."
        )
    trainer = _full_trainer(config, start, model=model, processes=parts.processes)
    publisher = full_publisher(parts.opened, trainer, like=folder)
    if config.share:
        assert isinstance(engine, EmbeddedEngine), "the config refuses to share with servers"
        trainer.share_with(engine)
    assert not isinstance(parts.reference, Adapter), "the reference of a model is another model"
    base = BaseModel(folder=folder, ref=engine.base, dtype=model.dtype)
    policy = FullPolicy(
        trainer, reference=parts.reference, start=start, base=base, publisher=publisher
    )
    return lambda _: policy


def _check_shape(model: SlottedModel, start: Path, engine: Engine) -> None:
    """Before the run is made, as the first publication would refuse it."""
    for name, shape in engine.linear_layers.items():
        linear = model.linears.get(name)
        own = None if linear is None else (linear.in_features, linear.out_features)
        if own != shape:
            raise ModelError(
                f"{start} is another model than the engine's: {name} is {own or 'missing'} there "
                f"and {shape} in the engine. Give init_from a model of the same shape."
            )
