"""From an engine's config to the engine: embedded, or a fleet of vLLM servers.

    async with open_sampler(config.engine) as engine: ...

Servers that are started on the way show their last log lines until they are ready.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn

from rookery.errors import ConfigError

if TYPE_CHECKING:
    from rookery.embedded import EmbeddedEngine, EngineConfig
    from rookery.fleet import Fleet, FleetConfig, LaunchProgress

    Engine = EmbeddedEngine | Fleet
    AnyEngineConfig = EngineConfig | FleetConfig

__all__ = [
    "LaunchBar",
    "launch_progress",
    "model_folder",
    "open_sampler",
    "resolve_smollm2",
]

_LINE = 70
"""Characters of a log line that are shown."""


class LaunchBar:
    """A line per server on its way up; a plain line when it is ready where no terminal is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lines: dict[int, TaskID] = {}

    def show(self, now: "LaunchProgress") -> None:
        """Update the line of one server."""
        text = f"server {now.index + 1} of {now.num_servers}  {now.url}  {now.seconds:4.0f} s"
        if now.index not in self._lines:
            self._lines[now.index] = self._progress.add_task(text, total=None, line="")
        tail = "".join(c for c in now.line.strip()[-_LINE:] if c.isprintable())
        line = "ready" if now.is_ready else tail
        self._progress.update(self._lines[now.index], description=text, line=line)
        if now.is_ready and not self._progress.console.is_terminal:
            self._progress.console.print(f"{text}  ready", markup=False, highlight=False)

    def stop(self) -> None:
        """Take the lines away."""
        self._progress.stop()


@contextmanager
def launch_progress() -> Iterator[LaunchBar]:
    """Shows servers starting, on stderr, while the block or `stop` lasts."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[line]}", style="dim", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield LaunchBar(progress)


@asynccontextmanager
async def open_sampler(config: "AnyEngineConfig") -> "AsyncIterator[Engine]":
    """The engine, open for the block. Servers that must be started first show their progress."""
    from rookery.embedded import EngineConfig, open_engine
    from rookery.fleet import open_fleet

    if isinstance(config, EngineConfig):
        async with open_engine(config) as engine:
            yield engine
        return
    with launch_progress() as bar:
        async with open_fleet(_with_folder(config), progress=bar.show) as fleet:
            bar.stop()
            yield fleet


def model_folder(config: "AnyEngineConfig", *, tokenizer: str = "") -> Path:
    """Where the tokenizer and the chat template of the engine's model are."""
    from rookery.embedded import EngineConfig, resolve_model

    if isinstance(config, EngineConfig):
        own = config.model
    else:
        own = config.launch.model if config.launch is not None else ""
    model = tokenizer or own
    if not model:
        raise ConfigError(
            "Servers given by URL keep their tokenizer to themselves: write tokenizer, the model's "
            "folder or Hugging Face id."
        )
    return resolve_model(model).path


def resolve_smollm2(model: str) -> str:
    """`smollm2` as a folder that vLLM can load; other names as they are."""
    if model.lower() != "smollm2":
        return model
    from rookery.embedded import resolve_model

    return str(resolve_model(model).path)


def _with_folder(config: "FleetConfig") -> "FleetConfig":
    """The model under the name that the config gives it, loaded from where it is."""
    launch = config.launch
    if launch is None:
        return config
    own = launch.model_copy(update={"model": resolve_smollm2(launch.model)})
    return config.model_copy(update={"name": config.name or launch.model, "launch": own})
