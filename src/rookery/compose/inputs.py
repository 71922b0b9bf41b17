"""What several kinds of runs read and open before the run is made, and say to the user."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from rookery.embedded import EngineConfig
from rookery.engines import AnyEngineConfig, open_engine
from rookery.ports import Engine
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, TasksetConfig, load_tasksets
from rookery.ui.display import Display

__all__ = ["open_shown_engine", "read_tasksets"]


def read_tasksets(configs: Iterable[TasksetConfig], display: Display) -> list[Taskset]:
    """The tasksets of one run; TaskError for a split that should have tasks and has none."""
    tasksets = load_tasksets(configs)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)
        display.note(taskset.notes)
    return tasksets


@asynccontextmanager
async def open_shown_engine(config: AnyEngineConfig, display: Display) -> AsyncIterator[Engine]:
    """The engine, open for the block; what takes long is said."""
    if isinstance(config, EngineConfig):
        display.say(f"loading {config.model}")
    with display.launching() as show:
        async with open_engine(config, on_launch=show) as engine:
            yield engine
