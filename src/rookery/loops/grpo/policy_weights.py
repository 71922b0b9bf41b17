"""The weights in training, an adapter or a whole model, behind one interface.

    weights.trainer             # trains the trainee POLICY and publishes it to the engine
    await weights.write(folder) # a folder that other programs load
    await weights.measure({"trained": saved, "base model": None}, evaluate)

| | an adapter | all weights |
|---|---|---|
| trains | a LoRA adapter | the model's own weights |
| publishes | beside the base model | in place of the base model |
| `folder_name` | `adapter_step`, for PEFT and vLLM | `step`, for transformers and vLLM |
| measures | all at the same time | one after another |
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from rookery.errors import RunError
from rookery.ports import Engine, Publisher, Trainees, Trainer
from rookery.train import FullTrainer, LoraTrainer
from rookery.train.full import read_model_weights
from rookery.types import Adapter, ModelRef, ModelWeights
from rookery.weights import read_adapter, write_adapter

__all__ = [
    "POLICY",
    "REFERENCE",
    "AdapterPolicy",
    "AdapterTrainer",
    "BaseModel",
    "Evaluate",
    "FullPolicy",
    "PolicyWeights",
    "SavedWeights",
    "TraineePolicy",
    "measure_adapters",
]

POLICY = "policy"
"""Name of the trainee, and of its versions on the engine."""
REFERENCE = "reference"
"""Name of the frozen trainee that the KL term compares with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """Weights in a folder on disk."""

    folder: Path
    version: str
    """Content hash recorded when the folder was written."""

    def require(self, version: str) -> None:
        """Raise RunError unless the folder still holds this version."""
        if version != self.version:
            raise RunError(
                f"{self.folder} does not hold the weights that the run has recorded for it: "
                "restore it from a copy."
            )


Evaluate = Callable[[Mapping[str, ModelRef]], Awaitable[None]]
"""Measures the given models, by report name, while the engine serves them."""


class PolicyWeights(Protocol):
    """The weights in training: the difference between training an adapter and a model."""

    @property
    def trainer(self) -> Trainer:
        """Trainer of the trainee POLICY."""
        ...

    @property
    def reference(self) -> Trainer:
        """Trainer of the trainee REFERENCE. Used only if the loss needs one."""
        ...

    @property
    def folder_name(self) -> str:
        """Prefix of checkpoint folder names, before the step number."""
        ...

    @property
    def start(self) -> Path | None:
        """Folder that the run starts from. None: the run stores the start in its own folder."""
        ...

    async def version(self) -> str:
        """Return the content hash of the policy's current weights."""
        ...

    async def write(self, folder: Path) -> None:
        """Write the policy's current weights to a new folder that other programs load."""
        ...

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        """Serve each entry, None being the base model, while `evaluate` runs on all or some at a
        time. This ends the training: a policy that shares memory with the engine is overwritten."""
        ...


class AdapterTrainer(Trainer, Protocol):
    """A trainer in this process whose trainees are adapters."""

    def add(self, trainee: str, start: Adapter) -> None: ...

    def adapter(self, trainee: str) -> Adapter: ...

    async def export(self, trainee: str, folder: Path) -> None: ...


class AdapterPolicy:
    """A LoRA adapter as the policy, served beside the base model."""

    folder_name = LoraTrainer.folder_name
    start: Path | None = None

    def __init__(
        self,
        trainer: AdapterTrainer,
        *,
        start: Adapter,
        engine: Engine,
        reference: Adapter | LoraTrainer | None,
        publisher: Publisher | None = None,
    ) -> None:
        """`trainer` publishes to the engine. `reference` is an adapter, or a trainer with a trainee
        REFERENCE over another model; None if the loss needs none. `publisher` serves adapters in
        place of the base model, for engines that cannot serve them beside it."""
        self.trainer: AdapterTrainer = trainer
        self._base = engine.base
        self._publisher = publisher
        self.reference: Trainer = reference if isinstance(reference, LoraTrainer) else trainer
        self._engine = engine
        trainer.add(POLICY, start)
        if isinstance(reference, Adapter):
            trainer.add(REFERENCE, reference)

    async def version(self) -> str:
        adapter = await asyncio.to_thread(self.trainer.adapter, POLICY)
        return adapter.version

    async def write(self, folder: Path) -> None:
        await self.trainer.export(POLICY, folder)

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        if self._publisher is None:
            await measure_adapters(self._engine, saved, evaluate)
            return
        for name, weights in saved.items():
            adapter = (
                self._unchanged() if weights is None else await asyncio.to_thread(_read, weights)
            )
            await evaluate({name: await self._publisher.publish(adapter)})

    def _unchanged(self) -> Adapter:
        """Return the base model in the form of an adapter."""
        return Adapter(name=self._base.name, base="", factors={}, version=self._base.version)


async def measure_adapters(
    engine: Engine, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate
) -> None:
    """Load all adapters beside the base model, evaluate them at once, then unload them."""
    loaded: list[ModelRef] = []
    refs: dict[str, ModelRef] = {}
    try:
        for name, weights in saved.items():
            if weights is None:
                refs[name] = engine.base
                continue
            adapter = await asyncio.to_thread(_read, weights)
            refs[name] = await engine.load(adapter)
            loaded.append(refs[name])
        await evaluate(refs)
    finally:
        for ref in loaded:
            await engine.unload(ref)


def _read(saved: SavedWeights) -> Adapter:
    adapter = read_adapter(saved.folder)
    saved.require(adapter.version)
    return replace(adapter, name=POLICY)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The model that the engine is configured to serve: the baseline of the trained one."""

    folder: Path
    ref: ModelRef
    dtype: torch.dtype


class FullPolicy:
    """A whole model as the policy, in place of the engine's base model: one version at a time."""

    folder_name = FullTrainer.folder_name

    def __init__(
        self,
        trainer: FullTrainer,
        *,
        reference: Trainer | None,
        start: Path,
        base: BaseModel,
        publisher: Publisher,
    ) -> None:
        """`reference` is another copy of the start, or None. `publisher` replaces the base."""
        self.trainer = trainer
        self.reference: Trainer = reference or trainer
        self.start: Path | None = start
        self._base = base
        self._publisher = publisher

    async def version(self) -> str:
        return await self.trainer.version()

    async def write(self, folder: Path) -> None:
        await self.trainer.export(POLICY, folder)

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        for name, weights in saved.items():
            ref = await self._publisher.publish(await asyncio.to_thread(self._read, weights))
            await evaluate({name: ref})

    def _read(self, saved: SavedWeights | None) -> ModelWeights:
        folder = self._base.folder if saved is None else saved.folder
        weights = read_model_weights(folder, name=POLICY, dtype=self._base.dtype)
        if saved is None:
            return replace(weights, name=self._base.ref.name, version=self._base.ref.version)
        saved.require(weights.version)
        return weights


class TraineePolicy:
    """An adapter trained elsewhere, over the ports alone. The caller creates the trainee POLICY
    and, if the loss needs a reference, REFERENCE:

        await trainer.create(POLICY, LoraShape(rank=8, seed=0))
        weights = TraineePolicy(trainer, trainees=trainer, engine=engine)
    """

    folder_name = "adapter_step"
    start: Path | None = None

    def __init__(
        self, trainer: Trainer, *, trainees: Trainees, engine: Engine, base: str = ""
    ) -> None:
        """`base` is the model name in exported adapters. Empty: the trainer's name for it."""
        self._base = base
        self.trainer = trainer
        self.reference = trainer
        self._trainees = trainees
        self._engine = engine

    async def version(self) -> str:
        with tempfile.TemporaryDirectory(prefix="rookery-policy-") as scratch:
            folder = Path(scratch) / "adapter"
            await self._trainees.export(POLICY, folder)
            adapter = await asyncio.to_thread(read_adapter, folder)
        return adapter.version

    async def write(self, folder: Path) -> None:
        if not self._base:
            await self._trainees.export(POLICY, folder)
            return
        with tempfile.TemporaryDirectory(prefix="rookery-policy-") as scratch:
            await self._trainees.export(POLICY, Path(scratch) / "adapter")
            adapter = await asyncio.to_thread(read_adapter, Path(scratch) / "adapter")
        await asyncio.to_thread(write_adapter, replace(adapter, base=self._base), folder)

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        await measure_adapters(self._engine, saved, evaluate)
