"""A grpo run whose adapter a service elsewhere trains: what it begins with, and what is refused."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from rookery.compose.grpo.files import GrpoFiles
from rookery.compose.running import num_processes
from rookery.engines import base_name
from rookery.errors import ConfigError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.checkpoints import STATE
from rookery.loops.grpo.policy_weights import POLICY, REFERENCE, TraineePolicy
from rookery.ports import Engine
from rookery.remote import ServiceClient, read_states
from rookery.runs import Run
from rookery.train import LoraConfig, new_adapter
from rookery.types import Adapter
from rookery.weights import write_adapter

__all__ = ["check_service", "own_states", "service_policy", "service_start"]


def check_service(config: GrpoConfig, files: GrpoFiles) -> None:
    """ConfigError for what a service cannot do, before it is asked."""
    if num_processes() > 1:
        raise ConfigError(
            f"The service trains, and torchrun started {num_processes()} processes: start it "
            "without torchrun."
        )
    if isinstance(files.reference, Path) and files.reference.resolve() != files.folder.path:
        raise ConfigError(
            f"reference is {config.reference}, another model than the one of the service: write an "
            "adapter, the folder of `tokenizer` for the model as it is, or leave reference out."
        )


def service_start(config: GrpoConfig, files: GrpoFiles, engine: Engine) -> Adapter:
    """The policy to begin with, the same as in this process."""
    base = base_name(files.folder.name)
    start = files.init or new_adapter(
        engine.linear_layers, config.lora, name=POLICY, base=base, seed=config.seed
    )
    return replace(start, name=POLICY, base=start.base or base)


def own_states(run: Run) -> list[str]:
    """Those on the service that the run has files of."""
    paths = sorted(run.path.glob(f"checkpoints/*/{STATE}"))
    return [state for path in paths for state in read_states(path)]


async def service_policy(
    config: GrpoConfig, files: GrpoFiles, client: ServiceClient, start: Adapter
) -> TraineePolicy:
    """The trainees of a run, made in the service."""
    await _create(client, POLICY, start)
    if config.needs_reference:
        await _create(client, REFERENCE, _reference(files, client.engine, start))
    trainer = client.trainer
    return TraineePolicy(trainer, trainees=trainer, engine=client.engine, base=start.base)


def _reference(files: GrpoFiles, engine: Engine, start: Adapter) -> Adapter:
    if isinstance(files.reference, Adapter):
        return files.reference
    if files.reference is None:
        return start
    layers = engine.linear_layers  # the model as it is: an adapter that changes nothing
    lora = LoraConfig(rank=1, targets=(min(layers),))
    return new_adapter(layers, lora, name=REFERENCE, base=start.base, seed=0)


async def _create(client: ServiceClient, name: str, adapter: Adapter) -> None:
    with tempfile.TemporaryDirectory(prefix="rookery-start-") as scratch:
        folder = Path(scratch) / "adapter"
        await asyncio.to_thread(write_adapter, replace(adapter, name=name), folder)
        await client.trainer.create(name, folder)
