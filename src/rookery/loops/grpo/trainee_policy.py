"""An adapter that is trained elsewhere as the policy, over the ports alone.

await trainer.create(POLICY, LoraShape(rank=8, seed=0))
weights = TraineePolicy(trainer, trainees=trainer, engine=engine)
"""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rookery.loops.grpo.adapter_policy import measure_adapters
from rookery.loops.grpo.policy_weights import POLICY, Evaluate, SavedWeights
from rookery.ports import Engine, Trainees, Trainer
from rookery.weights import read_adapter

__all__ = ["TraineePolicy"]


class TraineePolicy:
    """The PolicyWeights of a trainee POLICY that the caller made; for a loss with a reference, a
    trainee REFERENCE too."""

    folder_name = "adapter_step"
    start: Path | None = None

    def __init__(self, trainer: Trainer, *, trainees: Trainees, engine: Engine) -> None:
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
        await self._trainees.export(POLICY, folder)

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        await measure_adapters(self._engine, saved, evaluate)
