"""Checkpoints: the policy as a PEFT folder with the trainer's state beside it.

    runs/x/start/                          the adapter the run began with
    runs/x/checkpoints/adapter_step_20/    adapter_config.json, adapter_model.safetensors, and
                                           trainer.safetensors to go on from

An event names each one after it is on disk; a run goes on from the newest that an event names.
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from rookery.errors import RunError
from rookery.loops.grpo.policy_trainer import PolicyTrainer
from rookery.runs import Run
from rookery.types import Adapter
from rookery.weights import read_adapter, write_adapter

__all__ = ["Checkpoints", "read_start"]

CHECKPOINT = "checkpoint"
START = "start"
STATE = "trainer.safetensors"


def read_start(run: Run) -> Adapter | None:
    """What the run began with; None when it has not begun."""
    if run.get(CHECKPOINT, "0") is None:
        return None
    return read_adapter(run.path / START)


class Checkpoints:
    """The checkpoints of one run, by the number of steps before them. 0 is the start."""

    def __init__(self, run: Run, *, start: Adapter, keep: int) -> None:
        self._run = run
        self._start = start
        self._keep = keep
        saved = [int(event.payload["step"]) for event in run.events(CHECKPOINT)]
        self._held = [step for step in saved if (run.path / _folder(step)).is_dir()]
        """Those on disk, oldest first."""

    @property
    def newest(self) -> int | None:
        """Steps before the newest one; None before the start is written."""
        return self._held[-1] if self._held else None

    async def save(self, step: int, trainer: PolicyTrainer) -> None:
        """Write one, durably, unless it is there."""
        if self._run.get(CHECKPOINT, str(step)) is not None:
            return
        adapter = await trainer.adapter()
        if step == 0:
            await asyncio.to_thread(
                self._run.write_folder, START, lambda folder: write_adapter(adapter, folder)
            )
        else:
            await self._write(step, adapter, trainer)
        payload = {"step": step, "folder": _folder(step), "version": adapter.version}
        await self._run.append(CHECKPOINT, payload, key=str(step))
        self._held.append(step)

    async def _write(self, step: int, adapter: Adapter, trainer: PolicyTrainer) -> None:
        with self._run.blobs.stage() as staged:
            await trainer.save(staged / STATE)

            def fill(folder: Path) -> None:
                write_adapter(adapter, folder)
                os.rename(staged / STATE, folder / STATE)

            await asyncio.to_thread(self._run.write_folder, _folder(step), fill)

    async def restore(self, trainer: PolicyTrainer) -> int:
        """Bring the trainer to the newest checkpoint; how many steps it has then taken."""
        step = self.newest or 0
        if step > 0:
            await trainer.load(self._run.path / _folder(step) / STATE)
        return step

    def read(self, step: int) -> Adapter:
        """The adapter of a checkpoint that is kept. Reads the disk."""
        adapter = self._start if step == 0 else read_adapter(self._run.path / _folder(step))
        event = self._run.get(CHECKPOINT, str(step))
        if event is None or event.payload["version"] != adapter.version:
            raise RunError(
                f"{self._run.path / _folder(step)} is not what the run has saved there: restore "
                "it from a copy."
            )
        return replace(adapter, name=self._start.name)

    async def prune(self, *, best: int) -> None:
        """Remove all but the newest, as many as are to be kept, and the best. The start stays."""
        kept = {*self._held[-self._keep :], best, 0}
        for step in [step for step in self._held if step not in kept]:
            await asyncio.to_thread(self._run.remove_folder, _folder(step))
            self._held.remove(step)


def _folder(step: int) -> str:
    return START if step == 0 else f"checkpoints/adapter_step_{step}"
