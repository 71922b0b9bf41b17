"""Whole models by way of a folder: `reload` and `restart` differ in what a server does with it."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.concurrency import run_in_thread
from rookery.fleet.bridges.canary import Canary, Logprobs
from rookery.fleet.bridges.update import BaseUpdate, Give
from rookery.fleet.fleet import Fleet
from rookery.types import ModelRef, ModelWeights

if TYPE_CHECKING:
    import torch

__all__ = ["FolderBridge", "WriteFolder"]

WriteFolder = Callable[[Path, Mapping[str, "torch.Tensor"]], None]
"""Writes a new folder that vLLM can be started on."""


class FolderBridge:
    """Gives whole models to servers that see a folder of this machine."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        canary: Canary,
        write: WriteFolder,
        folder: Path,
        give_from: Callable[[Path], Give],
    ) -> None:
        """`folder` has room for two models: the newest stays for servers that are started again."""
        self._fleet = fleet
        self._update = BaseUpdate(fleet, canary)
        self._write = write
        self._folder = folder
        self._give_from = give_from
        self._newest: Path | None = None

    async def replace_base(self, weights: ModelWeights, logprobs: Logprobs) -> ModelRef:
        """Serve these weights in place of the base model; `logprobs` computes with them."""
        folder = self._folder / f"served-{weights.version}"
        if folder != self._newest:
            await run_in_thread(self._write_new, folder, weights)
        ref = ModelRef(name=weights.name, version=weights.version)
        give = self._give_from(folder)
        async with self._fleet.updating(), self._update.lock:
            await self._update.publish(give, logprobs, ref, again=give)
        before, self._newest = self._newest, folder
        if before is not None and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
        return self._fleet.base

    def _write_new(self, folder: Path, weights: ModelWeights) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._write(folder, weights.tensors)
