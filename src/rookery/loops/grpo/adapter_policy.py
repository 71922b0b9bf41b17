"""A LoRA adapter as the policy: served beside the base model, versions next to one another."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rookery.loops.grpo.policy_weights import POLICY, REFERENCE, Evaluate, SavedWeights
from rookery.ports import Engine
from rookery.train import LoraTrainer
from rookery.types import Adapter, ModelRef
from rookery.weights import read_adapter

__all__ = ["AdapterPolicy", "measure_adapters"]


class AdapterPolicy:
    """The PolicyWeights of an adapter."""

    folder_name = LoraTrainer.folder_name
    start: Path | None = None

    def __init__(
        self,
        trainer: LoraTrainer,
        *,
        start: Adapter,
        engine: Engine,
        reference: Adapter | LoraTrainer | None,
    ) -> None:
        """`trainer` publishes to the engine. `reference` is over the same model, or has a trainee
        REFERENCE over another; None when the loss needs none."""
        self.trainer = trainer
        self.reference = reference if isinstance(reference, LoraTrainer) else trainer
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
        await measure_adapters(self._engine, saved, evaluate)


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
