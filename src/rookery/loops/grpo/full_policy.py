"""A whole model as the policy: its weights take the place of the engine's base model.

The engine has one base model, so that versions are served one after another.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rookery.loops.grpo.policy_weights import POLICY, Evaluate, SavedWeights
from rookery.ports import Publisher, Trainer
from rookery.train import FullTrainer
from rookery.train.full import read_model_weights
from rookery.types import ModelRef, ModelWeights

__all__ = ["BaseModel", "FullPolicy"]


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
        for name, own in saved.items():
            ref = await self._publisher.publish(await asyncio.to_thread(self._read, own))
            await evaluate({name: ref})

    def _read(self, saved: SavedWeights | None) -> ModelWeights:
        folder = self._base.folder if saved is None else saved.folder
        weights = read_model_weights(folder, name=POLICY, dtype=self._base.dtype)
        if saved is None:
            return replace(weights, name=self._base.ref.name, version=self._base.ref.version)
        saved.require(weights.version)
        return weights
