"""Checkpoints of one trainee: weights that other programs load, the trainer's state beside them.

    step_40/                         of a FullTrainer, for transformers and vLLM
    adapter_step_40/                 of a LoraTrainer, for PEFT and vLLM
    trainer_step_40.safetensors      what the trainer goes on from

    checkpoints = Checkpoints(folder, trainer, "policy", keep=3)
    await checkpoints.write(step=40)
    await checkpoints.restore(step=checkpoints.steps[-1])

The state is written last and removed first: a checkpoint that has one is whole.
"""

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

from rookery.errors import TrainError, boundary
from rookery.ports import Adapters
from rookery.runs.disk import sync_folder, sync_tree
from rookery.train.slotted_trainer import SlottedTrainer
from rookery.train.trainee import Trainee
from rookery.types import Adapter, ModelRef, ModelWeights, Weights

__all__ = [
    "AdapterPublisher",
    "Checkpoints",
    "ModelPublisher",
]

# Publishing: adapters are loaded beside the version before, whole models take its place.


class AdapterPublisher:
    """A Publisher over anything adapters can be loaded into, the embedded engine for one.

    Publications of one name follow one another: await one before the next.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._published: dict[str, ModelRef] = {}

    async def publish(self, weights: Weights) -> ModelRef:
        if not isinstance(weights, Adapter):
            raise TrainError(
                f"{weights.name} is a whole model; only adapters can be loaded here. Train an "
                "adapter, or publish to an engine that takes whole weights."
            )
        ref = await self._adapters.load(weights)
        before = self._published.get(weights.name)
        self._published[weights.name] = ref
        if before is not None:
            # Equal weights are the same version, loaded twice and now unloaded once.
            await self._adapters.unload(before)
        return ref


class ModelPublisher:
    """A Publisher of whole models to an engine that has one base model.

    `replace_base` is the embedded engine's, for one: it waits for requests in flight.
    """

    def __init__(self, replace_base: Callable[[ModelWeights], Awaitable[ModelRef]]) -> None:
        self._replace_base = replace_base

    async def publish(self, weights: Weights) -> ModelRef:
        if isinstance(weights, Adapter):
            raise TrainError(
                f"{weights.name} is an adapter; this publisher takes whole models. Use an "
                "AdapterPublisher."
            )
        return await self._replace_base(weights)


Trained = TypeVar("Trained", bound=Trainee)


class Checkpoints(Generic[Trained]):
    """A folder that nothing else writes to. `keep` newest ones stay; 0 keeps all."""

    def __init__(
        self, folder: Path, trainer: SlottedTrainer[Trained], trainee: str, *, keep: int
    ) -> None:
        self.folder = folder
        self._trainer = trainer
        self._trainee = trainee
        self._keep = keep

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are whole, oldest first."""
        names = [path.name for path in self.folder.glob("trainer_step_*.safetensors")]
        matches = [re.fullmatch(r"trainer_step_(\d+)\.safetensors", name) for name in names]
        return sorted(int(match[1]) for match in matches if match)

    def weights(self, step: int) -> Path:
        """The folder of weights of a step."""
        return self.folder / f"{self._trainer.folder_name}_{step}"

    async def write(self, *, step: int) -> Path:
        """The folder of weights; a checkpoint of the same step is replaced."""
        await asyncio.to_thread(self._clear, step)
        folder = self.weights(step)
        await self._trainer.export(self._trainee, folder)
        await asyncio.to_thread(self._sync, folder)
        await self._trainer.save(self._trainee, self._state(step))
        await asyncio.to_thread(self._prune)
        return folder

    async def restore(self, *, step: int) -> None:
        """Let the trainer go on from this checkpoint, exactly."""
        if step not in self.steps:
            raise TrainError(
                f"{self.folder} has no checkpoint of step {step}. There are: "
                f"{', '.join(map(str, self.steps)) or 'none'}."
            )
        await self._trainer.load(self._trainee, self._state(step))

    def _state(self, step: int) -> Path:
        return self.folder / f"trainer_step_{step}.safetensors"

    def _clear(self, step: int) -> None:
        """Remove this step and what a killed process left half-written."""
        self._remove(step)
        with boundary(TrainError, f"clearing {self.folder}", foreign=(OSError,)):
            for left in self.folder.glob(f".{self._trainer.folder_name}_*"):
                shutil.rmtree(left)

    def _sync(self, folder: Path) -> None:
        with boundary(TrainError, f"writing {folder}", foreign=(OSError,)):
            sync_tree(folder)
            sync_folder(self.folder)

    def _prune(self) -> None:
        for old in self.steps[: -self._keep] if self._keep else ():
            self._remove(old)

    def _remove(self, step: int) -> None:
        with boundary(TrainError, f"removing the checkpoint of step {step}", foreign=(OSError,)):
            self._state(step).unlink(missing_ok=True)
            if self.weights(step).exists():
                shutil.rmtree(self.weights(step))
