"""What a grpo run trains, made as its config says: an adapter, or all weights of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.compose.grpo.bridge import Opened
from rookery.compose.grpo.files import GrpoFiles, read_files
from rookery.compose.running import Outcome, quiet_libraries
from rookery.errors import ConfigError, ModelError, TrainError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.policy_weights import (
    POLICY,
    REFERENCE,
    AdapterPolicy,
    AdapterTrainer,
    BaseModel,
    FullPolicy,
    PolicyWeights,
)
from rookery.ports import Engine, Publisher
from rookery.reports import GrpoReport
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.train import (
    FullConfig,
    FullTrainer,
    FullWeights,
    LoraConfig,
    LoraTrainer,
    TrainerConfig,
    initial_adapter,
)
from rookery.train.full import ShardedTrainer
from rookery.train.processes import Processes, join_processes
from rookery.train.slotted_trainer import SlottedTrainer
from rookery.types import Adapter

__all__ = [
    "MakePolicy",
    "PolicyParts",
    "adapter_policy",
    "compute_for_first_process",
    "end_processes",
    "full_policy",
    "make_reference",
]

# What the KL term of a grpo run is to, made as the config says.
#
# | `reference` | an adapter is trained | all weights are trained |
# |---|---|---|
# | none | the start | another copy of the start |
# | the engine's model | the model without an adapter | another copy of it |
# | another model | a copy of that model | a copy of that model |
# | an adapter | the adapter | another copy of the engine's model, with the adapter |


def make_reference(
    files: GrpoFiles, model: SlottedModel, trainer: TrainerConfig
) -> Adapter | LoraTrainer | None:
    """An adapter of `model`, which is trained, or the trainee REFERENCE over another model. None:
    the loss needs none, or it is the adapter that training begins with. Loads a model: slow."""
    if not files.has_reference_model:
        return _adapter(files, model)
    reference = files.reference
    folder = files.start if reference is None else files.folder.path
    other = _load(reference if isinstance(reference, Path) else folder, like=model)
    scorer = LoraTrainer(other, config=trainer)
    scorer.add(REFERENCE, reference if isinstance(reference, Adapter) else _unchanged(other))
    return scorer


def _adapter(files: GrpoFiles, model: SlottedModel) -> Adapter | None:
    if isinstance(files.reference, Path):
        return _unchanged(model)
    if files.reference is not None:
        model.bank.check(files.reference, max_rank=max(files.reference.rank, 1))
    return files.reference


def _load(folder: Path, *, like: SlottedModel) -> SlottedModel:
    dtype = str(like.dtype).removeprefix("torch.")
    model = load_model(folder, device=like.device.type, dtype=dtype)
    if model.shape.vocab_size != like.shape.vocab_size:
        raise ModelError(
            f"reference is {folder}, with a vocabulary of {model.shape.vocab_size} tokens, and the "
            f"model that is trained has {like.shape.vocab_size}: take a model with the same "
            "tokenizer."
        )
    return model


def _unchanged(model: SlottedModel) -> Adapter:
    """An adapter that changes no bit of the model, and takes no memory for masters."""
    lora = LoraConfig(rank=1, targets=(next(iter(model.linears)),))
    return initial_adapter(model, lora, name=REFERENCE, base="", seed=0)


MakePolicy = Callable[[Run], PolicyWeights]
"""The weights of a run, when all that can be refused has been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """What any policy is made of, besides its weights."""

    opened: Opened
    processes: Processes
    reference: Adapter | LoraTrainer | None
    """See `make_reference`."""


def adapter_policy(
    config: GrpoConfig,
    start: Adapter,
    parts: PolicyParts,
    *,
    trainer: AdapterTrainer,
    publisher: Publisher | None = None,
) -> MakePolicy:
    """An adapter. A run that goes on begins with the one in its own folder. `publisher` is given
    where the engine serves one adapter at a time."""
    engine = parts.opened.engine

    def make(run: Run) -> PolicyWeights:
        policy = replace(read_start(run) or start, name=POLICY)
        reference = parts.reference
        if reference is None and config.needs_reference:
            reference = policy
        return AdapterPolicy(
            trainer, start=policy, engine=engine, reference=reference, publisher=publisher
        )

    return make


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
    publisher = parts.opened.publish_model(trainer, like=folder)
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
        trained_shape = None if linear is None else (linear.in_features, linear.out_features)
        if trained_shape != shape:
            raise ModelError(
                f"{start} is another model than the engine's: {name} is "
                f"{trained_shape or 'missing'} there and {shape} in the engine. Give init_from a "
                "model of the same shape."
            )


# The other processes of a grpo run under torchrun: they compute gradients and nothing else.
#
# torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml


def compute_for_first_process(config: GrpoConfig) -> Outcome[GrpoReport]:
    """Do the part of this process until the first one has ended; the outcome of that one."""
    quiet_libraries()
    files = read_files(config)
    device, dtype = files.place
    model = load_model(files.start, device=device, dtype=dtype, names=files.folder.names)
    processes = join_processes(model.device.type)
    trainer: SlottedTrainer[Any] = (
        LoraTrainer(model, config=config.trainer, processes=processes)
        if config.full is None
        else _full_trainer(config, files.start, model=model, processes=processes)
    )
    outcome = trainer.serve_rank()
    if not isinstance(outcome, Outcome):
        raise TrainError(f"The first process gave {type(outcome).__name__}, which is no result.")
    processes.leave()
    return outcome


def end_processes(processes: Processes, outcome: Outcome[GrpoReport]) -> None:
    """Called by the first process when all is done."""
    processes.broadcast(outcome)
    processes.leave()
