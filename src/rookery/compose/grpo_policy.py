"""What a grpo run trains, made as its config says: an adapter, or all weights of a model."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rookery.embedded import EmbeddedEngine
from rookery.embedded.folders import ModelFolder
from rookery.errors import ConfigError, ModelError, TrainError, boundary
from rookery.fleet import Fleet
from rookery.fleet.bridges.reload import require_updates, update_weights
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.adapter_policy import AdapterPolicy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.full_policy import BaseModel, FullPolicy
from rookery.loops.grpo.policy_weights import POLICY, REFERENCE, PolicyWeights
from rookery.ports import Engine, Publisher
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.train import (
    AdapterPublisher,
    FullConfig,
    FullTrainer,
    FullWeights,
    LoraConfig,
    LoraTrainer,
    ModelPublisher,
    initial_adapter,
)
from rookery.types import Adapter, ModelRef, ModelWeights

__all__ = ["MakePolicy", "adapter_policy", "full_policy", "start_folder"]

MakePolicy = Callable[[Run], PolicyWeights]
"""The weights of a run, when all that can be refused has been."""


def adapter_policy(
    config: GrpoConfig, start: Adapter, *, model: SlottedModel, engine: Engine
) -> MakePolicy:
    """An adapter. A run that goes on begins with the one in its own folder."""
    trainer = LoraTrainer(model, config=config.trainer, publisher=AdapterPublisher(engine))

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


async def full_policy(
    config: GrpoConfig, folder: ModelFolder, *, model: SlottedModel, engine: Engine
) -> MakePolicy:
    """All weights of the model, which is at the start; an engine that shares it takes turns."""
    start = start_folder(config, folder)
    if config.init_from is not None:
        _check_shape(model, start, engine)
    publisher = _model_publisher(engine, folder.path, dtype=model.dtype)
    full = config.full or FullWeights()
    trainer = FullTrainer(
        model,
        name=POLICY,
        config=FullConfig(**config.trainer.model_dump(), **full.model_dump()),
        like=start,
        publisher=publisher,
    )
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


def _model_publisher(engine: Engine, folder: Path, *, dtype: torch.dtype) -> Publisher:
    if isinstance(engine, EmbeddedEngine):
        return ModelPublisher(engine.replace_base)
    if isinstance(engine, Fleet):
        require_updates(engine)
        return ModelPublisher(_Servers(engine, folder, dtype=dtype).replace_base)
    raise TrainError("This engine takes adapters only: write full: false.")


class _Servers:
    """Gives whole models to servers, through a copy of the model on this machine."""

    def __init__(self, fleet: Fleet, folder: Path, *, dtype: torch.dtype) -> None:
        self._fleet = fleet
        with boundary(ModelError, f"The model in {folder} cannot be loaded"):
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    async def replace_base(self, weights: ModelWeights) -> ModelRef:
        await asyncio.to_thread(self._set, weights)
        await update_weights(self._fleet, self._model)
        return self._fleet.base

    @torch.no_grad()
    def _set(self, weights: ModelWeights) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights.tensors[name])
