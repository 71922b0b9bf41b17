"""Checkpoints: the policy as other programs load it, with the trainer's state beside it.

    runs/x/start/                          the adapter the run began with; a model stays where it is
    runs/x/checkpoints/adapter_step_20/    a PEFT folder, or
    runs/x/checkpoints/step_20/            a folder that transformers and vLLM load
    runs/x/checkpoints/trainer_step_20/    trainer.safetensors, to go on from

An event names each one after it is on disk; a run goes on from the newest that an event names.
"""

import asyncio
import os
from pathlib import Path

from rookery.concurrency import run_in_thread
from rookery.loops.grpo.policy_weights import POLICY, PolicyWeights, SavedWeights
from rookery.runs import Run
from rookery.types import Adapter
from rookery.weights import read_adapter

__all__ = ["START", "Checkpoints", "read_start"]

CHECKPOINT = "checkpoint"
START = "start"
"""The folder of the adapter that a run began with."""
STATE = "trainer.safetensors"


def read_start(run: Run) -> Adapter | None:
    """The adapter the run began with; None when it has not begun."""
    if run.get(CHECKPOINT, "0") is None:
        return None
    return read_adapter(run.path / START)


class Checkpoints:
    """The checkpoints of one run, by the number of steps before them. 0 is the start."""

    def __init__(self, run: Run, *, weights: PolicyWeights, keep: int) -> None:
        self._run = run
        self._weights = weights
        self._keep = keep
        saved = [int(event.payload["step"]) for event in run.events(CHECKPOINT)]
        self.held = [step for step in saved if self._path(step).is_dir()]
        """Those on disk, oldest first."""

    @property
    def newest(self) -> int | None:
        """Steps before the newest one; None before the start is written."""
        return self.held[-1] if self.held else None

    async def save(self, step: int) -> None:
        """Write one, durably, unless it is there."""
        if self._run.get(CHECKPOINT, str(step)) is not None:
            return
        if step > 0:
            await self._write_state(step)
        if step > 0 or self._weights.start is None:
            await self._write_weights(self._folder(step))
        version = await self._weights.version()
        payload = {"step": step, "folder": self._folder(step), "version": version}
        await self._run.append(CHECKPOINT, payload, key=str(step))
        self.held.append(step)

    async def _write_weights(self, name: str) -> None:
        with self._run.blobs.stage() as staged:
            await self._weights.write(staged / "weights")
            await run_in_thread(
                self._run.write_folder, name, lambda folder: _move(staged / "weights", folder)
            )

    async def _write_state(self, step: int) -> None:
        with self._run.blobs.stage() as staged:
            await self._weights.trainer.save(POLICY, staged / STATE)
            await run_in_thread(
                self._run.write_folder, _state(step), lambda folder: _move(staged, folder)
            )

    async def restore(self) -> int:
        """Bring the trainer to the newest checkpoint; how many steps it has then taken.

        A model that is not the one the run began with is refused.
        """
        step = self.newest or 0
        if step > 0:
            await self._weights.trainer.load(POLICY, self._run.path / _state(step) / STATE)
        elif self.newest == 0:
            self.read(0).require(await self._weights.version())
        return step

    def read(self, step: int) -> SavedWeights:
        """A checkpoint that is kept."""
        event = self._run.get(CHECKPOINT, str(step))
        assert event is not None, "only steps that were saved are asked for"
        return SavedWeights(folder=self._path(step), version=event.payload["version"])

    async def prune(self, *, best: int) -> None:
        """Remove all but the newest, as many as are to be kept, and the best. The start stays.
        Only the newest can be gone on from."""
        newest = self.held[-self._keep :]
        for step in [step for step in self.held if step not in newest]:
            await asyncio.to_thread(self._run.remove_folder, _state(step))
            if step not in (best, 0):
                await asyncio.to_thread(self._run.remove_folder, self._folder(step))
                self.held.remove(step)

    def _path(self, step: int) -> Path:
        return self._run.path / self._folder(step)

    def _folder(self, step: int) -> str:
        """In the run, or the path of a model elsewhere."""
        if step > 0:
            return f"checkpoints/{self._weights.folder_name}_{step}"
        return START if self._weights.start is None else str(self._weights.start)


def _state(step: int) -> str:
    return f"checkpoints/trainer_step_{step}"


def _move(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        os.rename(path, folder / path.name)
