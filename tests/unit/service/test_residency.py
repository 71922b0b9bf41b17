"""Sampler weights in an engine: many are asked for at once, and few stay."""

import asyncio
from pathlib import Path

import pytest

from rookery.service.drawing import Residency
from rookery.types import ModelRef


class SlowFolders:
    """Loads and unloads in several turns of the event loop, as servers do."""

    def __init__(self) -> None:
        self.loaded: set[ModelRef] = set()

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        await asyncio.sleep(0)
        ref = ModelRef(name=name, version=folder.name)
        assert ref not in self.loaded
        self.loaded.add(ref)
        return ref

    async def unload(self, ref: ModelRef) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.loaded.remove(ref)


async def test_bursts_of_more_adapters_than_may_stay(tmp_path: Path) -> None:
    folders = SlowFolders()
    residency = Residency(folders, folder_of=lambda blob: tmp_path / blob, limit=4)

    async def use(blob: str) -> None:
        async with residency.use(blob) as ref:
            await asyncio.sleep(0)
            assert ref in folders.loaded

    for burst in range(3):
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(use(f"{burst}-{number}"))
    await use("last")
    assert len(folders.loaded) == 4


@pytest.mark.parametrize("num_turns", range(1, 9))
async def test_what_is_being_unloaded_is_loaded_again_when_it_is_asked_for(
    tmp_path: Path, num_turns: int
) -> None:
    folders = SlowFolders()
    residency = Residency(folders, folder_of=lambda blob: tmp_path / blob, limit=1)

    async def use(blob: str) -> None:
        async with residency.use(blob) as ref:
            for _ in range(8):
                assert ref in folders.loaded
                await asyncio.sleep(0)

    await use("first")
    async with asyncio.TaskGroup() as group:
        group.create_task(use("second"))
        for _ in range(num_turns):  # after some of them the first is being unloaded
            await asyncio.sleep(0)
        group.create_task(use("first"))
