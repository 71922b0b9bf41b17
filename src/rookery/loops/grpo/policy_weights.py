"""The weights that a run trains, an adapter or a whole model, as the loop sees them.

    weights.trainer             # its trainee POLICY is trained and published to the engine
    await weights.write(folder) # as other programs load them
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
"""The trainee, and the name that its versions are served by."""
REFERENCE = "reference"
"""The trainee that stays as the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """Weights on disk."""

    folder: Path
    version: str
    """Content hash of what was written there."""

    def require(self, version: str) -> None:
        """RunError unless this is what the folder holds now."""
        if version != self.version:
            raise RunError(
                f"{self.folder} does not hold the weights that the run has recorded for it: "
                "restore it from a copy."
            )


Evaluate = Callable[[Mapping[str, ModelRef]], Awaitable[None]]
"""Measures models that the engine serves while it runs, by their names in the report."""


class PolicyWeights(Protocol):
    """What differs between training an adapter and training a model."""

    @property
    def trainer(self) -> Trainer:
        """Of the trainee POLICY."""
        ...

    @property
    def reference(self) -> Trainer:
        """Of the trainee REFERENCE; only used when the loss needs one."""
        ...

    @property
    def folder_name(self) -> str:
        """What checkpoints are named, before the step."""
        ...

    @property
    def start(self) -> Path | None:
        """The folder the run begins from; None: the run keeps the start in its own folder."""
        ...

    async def version(self) -> str:
        """Content hash of the policy as it is now."""
        ...

    async def write(self, folder: Path) -> None:
        """The policy as it is now, as a new folder that other programs load."""
        ...

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        """Serve each, None for the base model, while `evaluate` runs: for all or for some at a
        time. Ends the training: a policy that shares its memory with the engine is overwritten."""
        ...


# A LoRA adapter as the policy: served beside the base model, versions next to one another.


class AdapterTrainer(Trainer, Protocol):
    """A trainer in this process, whose trainees are adapters."""

    def add(self, trainee: str, start: Adapter) -> None: ...

    def adapter(self, trainee: str) -> Adapter: ...

    async def export(self, trainee: str, folder: Path) -> None: ...


class AdapterPolicy:
    """The PolicyWeights of an adapter."""

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
        """`trainer` publishes to the engine. `reference` is over the same model, or has a trainee
        REFERENCE over another; None when the loss needs none. `publisher` serves an adapter in
        place of the base model, where the engine does not serve adapters beside it."""
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
        """The base model as an adapter of it."""
        return Adapter(name=self._base.name, base="", factors={}, version=self._base.version)


async def measure_adapters(
    engine: Engine, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate
) -> None:
    """All at the same time, beside the base model."""
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


# A whole model as the policy: its weights take the place of the engine's base model.
#
# The engine has one base model, so that versions are served one after another.


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The model that the engine is told to serve: what the trained one is compared with."""

    folder: Path
    ref: ModelRef
    dtype: torch.dtype


class FullPolicy:
    """The PolicyWeights of a model."""

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
        """`trainer` is at the start; `reference` is another copy of it, None without one.
        `publisher` replaces the base model of the engine."""
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


# An adapter that is trained elsewhere as the policy, over the ports alone.
#
# await trainer.create(POLICY, LoraShape(rank=8, seed=0))
# weights = TraineePolicy(trainer, trainees=trainer, engine=engine)


class TraineePolicy:
    """The PolicyWeights of a trainee POLICY that the caller made; for a loss with a reference, a
    trainee REFERENCE too."""

    folder_name = "adapter_step"
    start: Path | None = None

    def __init__(
        self, trainer: Trainer, *, trainees: Trainees, engine: Engine, base: str = ""
    ) -> None:
        """`base` is what adapters that are written name as their model; empty: as the trainer
        calls it."""
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
