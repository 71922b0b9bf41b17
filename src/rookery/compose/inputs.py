"""What a run was started on: tasks, models and scorers, read, recorded, and never others later."""

import hashlib
import shlex
from collections.abc import (
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.compose.running import OpenRun
from rookery.environments import GameConfig
from rookery.errors import (
    ModelError,
    RunError,
    boundary,
)
from rookery.ports import Engine
from rookery.rollout import set_scores_aside
from rookery.runs import Run
from rookery.tasks.python_function import read_source
from rookery.tasks.scorers import PythonConfig, ScorerConfig
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, TasksetConfig, load_tasksets
from rookery.types import Adapter
from rookery.ui.display import Display

if TYPE_CHECKING:
    from rookery.engines import AnyEngineConfig

__all__ = [
    "digest",
    "digest_adapters",
    "digest_models",
    "digest_scorers",
    "join_digests",
    "on_same_inputs",
    "open_shown_engine",
    "read_tasksets",
]

FILE = "inputs.json"
MODEL_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json", "*.jinja")
"""What a model computes with, and how it reads texts."""


def digest(records: Iterable[object]) -> str:
    """Of records whose `repr` says all they hold, in their order."""
    hashed = hashlib.blake2b(digest_size=16)
    for record in records:
        hashed.update(repr(record).encode("utf-8", "surrogatepass"))
        hashed.update(b"\n")
    return hashed.hexdigest()


def join_digests(*parts: Mapping[str, str]) -> dict[str, str]:
    """Of inputs of several sorts, by name: a taskset may be called as the adapters are."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: "+".join(part[name] for part in parts if name in part) for name in names}


def digest_adapters(adapters: Iterable[Adapter]) -> str:
    return digest((adapter.name, adapter.version) for adapter in adapters)


def digest_models(folders: Mapping[str, Path]) -> dict[str, str]:
    """Of the files of model folders, by name. Reads all of their weights."""
    with boundary(ModelError, "Reading the model's files", foreign=(OSError,)):
        return {name: _digest_model(folder) for name, folder in folders.items()}


def _digest_model(folder: Path) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    paths = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    with ThreadPoolExecutor() as threads:  # a thread hashes about a gigabyte a second
        for path, own in zip(paths, threads.map(_digest_file, paths), strict=True):
            hashed.update(path.name.encode() + b"\0" + own)
    return hashed.hexdigest()


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def digest_scorers(
    tasksets: Iterable[Taskset], *, game: GameConfig | None = None
) -> dict[str, str]:
    """Of what gives rewards, by name: its options, and the file of a function of the user."""
    scorers: dict[str, ScorerConfig | GameConfig] = (
        {f"the scorer of {taskset.name}": taskset.scorer for taskset in tasksets}
        if game is None
        else {"the game": game}
    )
    return {name: digest(_identity(config)) for name, config in scorers.items()}


def _identity(config: ScorerConfig | GameConfig) -> Iterator[object]:
    yield config.model_dump(mode="json", exclude={"function"})  # a folder may have moved
    if isinstance(config, PythonConfig | GameConfig):
        yield config.function.rpartition(":")[2]
        what = "game" if isinstance(config, GameConfig) else "scorer"
        yield read_source(config.function, what=what)


def on_same_inputs(
    open_run: OpenRun, digests: Mapping[str, str], scorers: Mapping[str, str] | None = None
) -> OpenRun:
    """The run with the digests of its data and its scorers, by name. One that was started on others
    is refused now, and stays as it is; with other scorers it may go on when all is scored again.

    The recorded answers are known by the ids of their tasks: a task that changed under its id would
    be reported with the answers to another question. Weights that changed under their path would be
    trained on, and reported with the answers of the former ones.
    """
    scorers = scorers or {}
    known = _read(open_run.folder)
    is_same_scorer = True
    if known is not None and open_run.folder is not None:
        _require_same(open_run.folder, known, digests, scorers)
        changed = [name for name, own in scorers.items() if known.get(name, own) != own]
        is_same_scorer = not changed
        if changed and open_run.rescored is None:
            raise RunError(
                f"{', '.join(changed)} changed since {open_run.folder} was started, and it "
                "recorded rewards of the former: put the former back, or score its answers again "
                f"with `rookery runs resume {shlex.quote(str(open_run.folder))} --rescore`."
            )

    @contextmanager
    def opened() -> Iterator[Run]:
        with open_run() as run:
            if open_run.rescored is not None:
                further = open_run.rescored
                set_scores_aside(run, further=further, only_failed=is_same_scorer)
            if known is None or not is_same_scorer:
                run.write_json(FILE, {**digests, **scorers})
            yield run

    return replace(open_run, open=opened)


def _read(folder: Path | None) -> dict[str, str] | None:
    """A run that was killed before it had a record has no answers either."""
    if folder is None or not (folder / FILE).exists():
        return None
    with Run.view(folder) as run:
        known: dict[str, str] = run.read_json(FILE)
    return known


def _require_same(
    folder: Path, known: Mapping[str, str], digests: Mapping[str, str], scorers: Mapping[str, str]
) -> None:
    names = {*known, *digests} - set(scorers)
    changed = sorted(name for name in names if known.get(name) != digests.get(name))
    if changed:
        raise RunError(
            f"The data of {', '.join(changed)} changed since {folder} was started, and what it "
            "recorded belongs to the former: put the former data back, or start a new run."
        )


# What several kinds of runs read and open before the run is made, and say to the user.


def read_tasksets(configs: Iterable[TasksetConfig], display: Display) -> list[Taskset]:
    """The tasksets of one run; TaskError for a split that should have tasks and has none."""
    tasksets = load_tasksets(configs)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)
        display.note(taskset.notes)
    return tasksets


@asynccontextmanager
async def open_shown_engine(config: "AnyEngineConfig", display: Display) -> AsyncIterator[Engine]:
    """The engine, open for the block; what takes long is said."""
    from rookery.embedded import EngineConfig  # needs the extra `hf`, and evolve need not have it
    from rookery.engines import open_engine

    if isinstance(config, EngineConfig):
        display.say(f"loading {config.model}")
    with display.launching() as show:
        async with open_engine(config, on_launch=show) as engine:
            yield engine
