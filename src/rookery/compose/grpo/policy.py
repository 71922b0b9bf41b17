"""Makes the policy of a grpo run: an adapter, trained here or on a service, or all weights."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.compose.grpo.bridge import Opened
from rookery.compose.grpo.setup import GrpoSetup
from rookery.compose.running import Outcome, num_processes
from rookery.engines import base_name
from rookery.errors import ConfigError, ModelError, TrainError
from rookery.loops.grpo.checkpoints import STATE, read_start
from rookery.loops.grpo.policy_weights import (
    POLICY,
    REFERENCE,
    AdapterPolicy,
    AdapterTrainer,
    BaseModel,
    FullPolicy,
    PolicyWeights,
    TraineePolicy,
)
from rookery.ports import Engine, Publisher
from rookery.remote import ServiceClient, read_states
from rookery.reports import GrpoReport
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.train import FullTrainer, LoraConfig, LoraTrainer, initial_adapter, new_adapter
from rookery.train.full import ShardedTrainer
from rookery.train.processes import Processes, join_processes
from rookery.train.slotted_trainer import SlottedTrainer
from rookery.types import Adapter
from rookery.weights import write_adapter

__all__ = [
    "MakePolicy",
    "PolicyParts",
    "adapter_policy",
    "check_service",
    "compute_for_first_process",
    "end_processes",
    "full_policy",
    "make_reference",
    "policy_on_service",
    "start_adapter",
]

MakePolicy = Callable[[Run], PolicyWeights]
"""Makes the weights of a run, after all checks."""


def start_adapter(setup: GrpoSetup, new: Callable[..., Adapter], *, seed: int) -> Adapter:
    """Return the adapter to begin with. `new` makes one for the model's layers."""
    base = base_name(setup.folder.name)
    start = setup.init or new(setup.lora, name=POLICY, base=base, seed=seed)
    return replace(start, name=POLICY, base=start.base or base)


# Reference of the KL term by config:
#
# | `reference` | an adapter is trained | all weights are trained |
# |---|---|---|
# | none | the start | another copy of the start |
# | the engine's model | the model without an adapter | another copy of it |
# | another model | a copy of that model | a copy of that model |
# | an adapter | the adapter | another copy of the engine's model, with the adapter |


def make_reference(setup: GrpoSetup, model: SlottedModel) -> Adapter | LoraTrainer | None:
    """Return an adapter of `model`, or a trainer of another model with the trainee REFERENCE. None:
    the loss needs no reference, or it is the first adapter. Slow if it loads a model."""
    reference = setup.reference
    if not setup.has_reference_model:
        if isinstance(reference, Path):
            return _unchanged(model)
        if reference is not None:
            model.bank.check(reference, max_rank=max(reference.rank, 1))
        return reference
    folder = setup.start if reference is None else setup.folder.path
    other = _load(reference if isinstance(reference, Path) else folder, like=model)
    scorer = LoraTrainer(other, config=setup.trainer)
    scorer.add(REFERENCE, reference if isinstance(reference, Adapter) else _unchanged(other))
    return scorer


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
    """Return an adapter that leaves every output of the model bit for bit the same."""
    lora = LoraConfig(rank=1, targets=(next(iter(model.linears)),))
    return initial_adapter(model, lora, name=REFERENCE, base="", seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """Everything that a policy needs besides its weights."""

    opened: Opened
    processes: Processes
    reference: Adapter | LoraTrainer | None
    """See `make_reference`."""


def adapter_policy(
    start: Adapter,
    parts: PolicyParts,
    *,
    trainer: AdapterTrainer,
    needs_reference: bool,
    only: Publisher | None = None,
) -> MakePolicy:
    """Return the maker of an adapter policy. A resumed run begins with the adapter in its folder.
    `only` publishes it if the engine serves one adapter at a time."""

    def make(run: Run) -> PolicyWeights:
        policy = replace(read_start(run) or start, name=POLICY)
        reference = parts.reference
        if reference is None and needs_reference:
            reference = policy
        engine = parts.opened.engine
        return AdapterPolicy(
            trainer, start=policy, engine=engine, reference=reference, publisher=only
        )

    return make


def _full_trainer(setup: GrpoSetup, model: SlottedModel, processes: Processes) -> FullTrainer:
    """Make the trainer of all weights. With several processes, each keeps a part of them."""
    assert setup.full is not None, "all weights are trained"
    kind = FullTrainer if processes.size == 1 else ShardedTrainer
    return kind(model, name=POLICY, config=setup.full, like=setup.start, processes=processes)


def full_policy(setup: GrpoSetup, parts: PolicyParts) -> MakePolicy:
    """Return the maker of a policy of all weights. An engine that shares them takes turns."""
    start, folder = setup.start, setup.folder.path
    engine, model = parts.opened.engine, parts.opened.model
    if start != folder:
        _check_shape(model, start, engine)
    if setup.is_shared and parts.processes.size > 1:
        raise ConfigError(
            f"share is for one process, and torchrun started {parts.processes.size}, each with a "
            "part of the weights: write share: false."
        )
    trainer = _full_trainer(setup, model, parts.processes)
    publisher = parts.opened.publish_model(trainer, like=folder)
    assert not isinstance(parts.reference, Adapter), "the reference of a model is another model"
    base = BaseModel(folder=folder, ref=engine.base, dtype=model.dtype)
    policy = FullPolicy(
        trainer, reference=parts.reference, start=start, base=base, publisher=publisher
    )
    return lambda _: policy


def _check_shape(model: SlottedModel, start: Path, engine: Engine) -> None:
    """Refuse another shape before the run is created; the first publication would refuse it."""
    for name, shape in engine.linear_layers.items():
        linear = model.linears.get(name)
        trained_shape = None if linear is None else (linear.in_features, linear.out_features)
        if trained_shape != shape:
            raise ModelError(
                f"{start} is another model than the engine's: {name} is "
                f"{trained_shape or 'missing'} there and {shape} in the engine. Give init_from a "
                "model of the same shape."
            )


# Other processes under torchrun only compute gradients:
# torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml


def compute_for_first_process(setup: GrpoSetup) -> Outcome[GrpoReport]:
    """Compute for the first process until it ends; return its outcome."""
    place, names = setup.place, setup.folder.names
    model = load_model(setup.start, device=place.device, dtype=place.dtype, names=names)
    processes = join_processes(model.device.type)
    trainer: SlottedTrainer[Any] = (
        LoraTrainer(model, config=setup.trainer, processes=processes)
        if setup.full is None
        else _full_trainer(setup, model, processes)
    )
    outcome = trainer.serve_rank()
    if not isinstance(outcome, Outcome):
        raise TrainError(f"The first process gave {type(outcome).__name__}, which is no result.")
    processes.leave()
    return outcome


def end_processes(processes: Processes, outcome: Outcome[GrpoReport]) -> None:
    """End the other processes. Called by the first one after the run."""
    processes.broadcast(outcome)
    processes.leave()


def check_service(setup: GrpoSetup) -> None:
    """Raise ConfigError for settings that a service cannot carry out."""
    if num_processes() > 1:
        raise ConfigError(
            f"The service trains, and torchrun started {num_processes()} processes: start it "
            "without torchrun."
        )
    if isinstance(setup.reference, Path) and setup.reference.resolve() != setup.folder.path:
        raise ConfigError(
            f"reference is {setup.reference}, another model than the one of the service: write an "
            "adapter, the folder of `tokenizer` for the model as it is, or leave reference out."
        )


@asynccontextmanager
async def policy_on_service(
    setup: GrpoSetup, client: ServiceClient, run: Run, start: Adapter, *, needs_reference: bool
) -> AsyncIterator[TraineePolicy]:
    """Create the run's trainees on the service; at the end, delete their states there. A resumed
    run begins with the adapter in its folder."""
    trainer = client.trainer
    known = await asyncio.to_thread(_own_states, run)  # includes a state that a killed process left
    start = read_start(run) or start
    await _create(client, POLICY, start)
    if needs_reference:
        await _create(client, REFERENCE, _reference_elsewhere(setup, client.engine, start))
    yield TraineePolicy(trainer, trainees=trainer, engine=client.engine, base=start.base)
    await trainer.forget({*known, *await asyncio.to_thread(_own_states, run)})


def _own_states(run: Run) -> list[str]:
    """Return the states on the service that the run's checkpoints name."""
    paths = sorted(run.path.glob(f"checkpoints/*/{STATE}"))
    return [state for path in paths for state in read_states(path)]


def _reference_elsewhere(setup: GrpoSetup, engine: Engine, start: Adapter) -> Adapter:
    if isinstance(setup.reference, Adapter):
        return setup.reference
    if setup.reference is None:
        return start
    layers = engine.linear_layers  # a zero adapter stands for the model itself
    lora = LoraConfig(rank=1, targets=(min(layers),))
    return new_adapter(layers, lora, name=REFERENCE, base=start.base, seed=0)


async def _create(client: ServiceClient, name: str, adapter: Adapter) -> None:
    with tempfile.TemporaryDirectory(prefix="rookery-start-") as scratch:
        folder = Path(scratch) / "adapter"
        await asyncio.to_thread(write_adapter, replace(adapter, name=name), folder)
        await client.trainer.create(name, folder)
