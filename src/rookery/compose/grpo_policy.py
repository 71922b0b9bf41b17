"""What a grpo run trains, made as its config says: an adapter, or all weights of a model."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rookery.compose.grpo_bridge import Opened, adapter_publisher, full_publisher
from rookery.embedded import EmbeddedEngine
from rookery.embedded.folders import ModelFolder
from rookery.errors import ConfigError, ModelError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.adapter_policy import AdapterPolicy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.full_policy import BaseModel, FullPolicy
from rookery.loops.grpo.policy_weights import POLICY, REFERENCE, PolicyWeights
from rookery.ports import Engine
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.train import (
    FullConfig,
    FullTrainer,
    FullWeights,
    LoraConfig,
    LoraTrainer,
    initial_adapter,
)
from rookery.train.processes import Processes
from rookery.train.sharded import ShardedTrainer
from rookery.train.slotted_trainer import SlottedTrainer
from rookery.types import Adapter

__all__ = ["MakePolicy", "adapter_policy", "full_policy", "make_trainer", "start_folder"]

MakePolicy = Callable[[Run], PolicyWeights]
"""The weights of a run, when all that can be refused has been."""


def adapter_policy(
    config: GrpoConfig, start: Adapter, *, opened: Opened, processes: Processes
) -> MakePolicy:
    """An adapter. A run that goes on begins with the one in its own folder."""
    engine, model = opened.engine, opened.model
    trainer = LoraTrainer(model, config=config.trainer, processes=processes)
    trainer.publish_to(adapter_publisher(engine, trainer, dtype=model.dtype))

    def make(run: Run) -> PolicyWeights:
        return AdapterPolicy(
            trainer,
            start=replace(read_start(run) or start, name=POLICY),
            engine=engine,
            has_reference=_needs_reference(config),
        )

    return make


def start_folder(config: GrpoConfig, folder: ModelFolder) -> Path:
    """Where the weights that training begins with are: a model's folder."""
    if config.full is None or config.init_from is None:
        return folder.path
    if (config.init_from / "adapter_config.json").is_file():
        raise ConfigError(
            f"init_from is {config.init_from}, an adapter, and full trains all weights of a model: "
            "give a model folder, or write full: false."
        )
    if not (config.init_from / "config.json").is_file():
        raise ModelError(
            f"init_from is {config.init_from}, which is not a model folder: it has no config.json. "
            "Give a folder written by save_pretrained, such as `trained` of another run."
        )
    return config.init_from.resolve()


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


async def full_policy(
    config: GrpoConfig, folder: ModelFolder, *, opened: Opened, processes: Processes
) -> MakePolicy:
    """All weights of the model, which is at the start; an engine that shares it takes turns."""
    engine, model = opened.engine, opened.model
    start = start_folder(config, folder)
    if config.init_from is not None:
        _check_shape(model, start, engine)
    if config.share and processes.size > 1:
        raise ConfigError(
            f"share is for one process, and torchrun started {processes.size}, each with a part of "
            "the weights: write share: false."
        )
    trainer = _full_trainer(config, start, model=model, processes=processes)
    publisher = full_publisher(opened, trainer, like=folder.path)
    if config.share:
        assert isinstance(engine, EmbeddedEngine), "the config refuses to share with servers"
        trainer.share_with(engine)
    reference = None
    if _needs_reference(config):
        reference = await asyncio.to_thread(_reference, config, start, model)
    base = BaseModel(folder=folder.path, ref=engine.base, dtype=model.dtype)
    policy = FullPolicy(trainer, reference=reference, start=start, base=base, publisher=publisher)
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


def _needs_reference(config: GrpoConfig) -> bool:
    return "reference_logprobs" in config.loss.needs


def _reference(config: GrpoConfig, start: Path, like: SlottedModel) -> LoraTrainer:
    """Another copy of the start that is never trained: a new adapter changes no bit of it, and
    takes no memory for masters."""
    dtype = str(like.dtype).removeprefix("torch.")
    model = load_model(start, device=like.device.type, dtype=dtype)
    trainer = LoraTrainer(model, config=config.trainer)
    lora = LoraConfig(rank=1, targets=(next(iter(model.linears)),))
    trainer.add(REFERENCE, initial_adapter(model, lora, name=REFERENCE, base="", seed=0))
    return trainer
