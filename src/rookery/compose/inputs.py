"""Digests of the inputs that a run starts on, by name.

Before the first step of a pipeline begins, every step's external inputs are read and digested, so
a missing input is refused before any work is done. When a step begins, its inputs are digested
again, and a changed input is refused.

    inputs = InputReader().read("student", SFT.inputs, settings, made={"taskset"})
    inputs.digests                       # {"the model": ...}, as in inputs.json of the step's run
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rookery.config import Config
from rookery.environments import GameConfig
from rookery.errors import ModelError, RookeryError, boundary
from rookery.tasks.python_function import read_source
from rookery.tasks.scorers import PythonConfig, ScorerConfig
from rookery.tasks.taskset import Taskset, TasksetConfig, load_tasksets
from rookery.types import Adapter, Task

__all__ = [
    "InputReader",
    "IsMade",
    "RunInputs",
    "digest",
    "digest_adapters",
    "digest_models",
    "digest_scorers",
    "digest_tasks",
    "is_among",
    "join_digests",
    "list_inputs",
    "load_not_made",
]

Settings = TypeVar("Settings", bound=Config)
IsMade = Callable[..., bool]
"""True if one of these keys of a step's config names the output of another step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Inputs of a run by name. For a step: only inputs that no other step produces."""

    digests: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Path] = field(default_factory=dict)
    """Folders still to be digested. `InputReader` reads each model once for all steps."""
    scorers: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, str]:
        return {**self.digests, **self.scorers}


def is_among(made: Collection[str], *keys: str) -> bool:
    """True if one of the keys, or a key below it, is in `made`."""
    return any(each == key or each.startswith(f"{key}.") for key in keys for each in made)


class InputReader:
    """Reads and digests inputs; each model's weights are read once for all steps."""

    def __init__(self) -> None:
        self._models: dict[Path, str] = {}

    def read(
        self,
        name: str,
        read: Callable[[Settings, IsMade], RunInputs],
        settings: Settings,
        *,
        made: Collection[str] = (),
    ) -> RunInputs:
        """Read and digest the inputs of the step `name`. Errors name the step. `made` are the
        config keys whose values do not exist yet."""
        try:
            return self.digest(read(settings, partial(is_among, made)))
        except RookeryError as error:
            raise type(error)(f"The step {name} cannot be run: {error}") from error

    def digest(self, inputs: RunInputs) -> RunInputs:
        """Return the inputs with the digests of their models added."""
        new = {str(each): each for each in inputs.models.values() if each not in self._models}
        self._models |= {new[path]: known for path, known in digest_models(new).items()}
        models = {name: self._models[folder] for name, folder in inputs.models.items()}
        return replace(inputs, digests=join_digests(inputs.digests, models), models={})


def list_inputs(
    tasksets: Collection[Taskset],
    others: Mapping[str, str],
    models: Mapping[str, Path],
    *,
    game: GameConfig | None = None,
) -> RunInputs:
    """Return the inputs of a run that answers tasks. `others` are further digests by name."""
    tasks = {each.name: digest_tasks(each.tasks) for each in tasksets}
    scorers = digest_scorers(tasksets, game=game)
    return RunInputs(digests=join_digests(tasks, others), models=models, scorers=scorers)


def load_not_made(tasksets: Iterable[TasksetConfig], is_made: IsMade) -> list[Taskset]:
    """Load the tasksets that exist already, without those that another step produces."""
    numbered = enumerate(tasksets)
    return load_tasksets([each for i, each in numbered if not is_made(f"tasksets.{i}")])


MODEL_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json", "*.jinja")
"""Files of a model folder that decide its outputs: weights, config, tokenizer, chat template."""


def digest(records: Iterable[object]) -> str:
    """Hash the `repr` of the records, in order. Each `repr` must hold the record's full content."""
    hashed = hashlib.blake2b(digest_size=16)
    for record in records:
        hashed.update(repr(record).encode("utf-8", "surrogatepass"))
        hashed.update(b"\n")
    return hashed.hexdigest()


def digest_tasks(tasks: Iterable[Task]) -> str:
    """Hash the tasks and their weights, which `repr` leaves out."""
    every = list(tasks)
    return digest([*every, *((task.id, task.weight) for task in every if task.weight != 1.0)])


def join_digests(*parts: Mapping[str, str]) -> dict[str, str]:
    """Merge digests by name. Digests of an equal name, such as a taskset `adapters`, are joined."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: "+".join(part[name] for part in parts if name in part) for name in names}


def digest_adapters(adapters: Iterable[Adapter]) -> str:
    return digest((adapter.name, adapter.version) for adapter in adapters)


def digest_models(folders: Mapping[str, Path]) -> dict[str, str]:
    """Hash the files of model folders, by name. Reads all weights."""
    with boundary(ModelError, "Reading the model's files", foreign=(OSError,)):
        return {name: _digest_model(folder) for name, folder in folders.items()}


def _digest_model(folder: Path) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    paths = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    with ThreadPoolExecutor() as threads:  # one thread hashes about 1 GB/s
        for path, hashed_file in zip(paths, threads.map(_digest_file, paths), strict=True):
            hashed.update(path.name.encode() + b"\0" + hashed_file)
    return hashed.hexdigest()


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def digest_scorers(
    tasksets: Iterable[Taskset], *, game: GameConfig | None = None
) -> dict[str, str]:
    """Hash each source of rewards by name: its options and the source of a user's function."""
    scorers: dict[str, ScorerConfig | GameConfig] = (
        {f"the scorer of {taskset.name}": taskset.scorer for taskset in tasksets}
        if game is None
        else {"the game": game}
    )
    return {name: digest(_identity(config)) for name, config in scorers.items()}


def _identity(config: ScorerConfig | GameConfig) -> Iterator[object]:
    yield config.model_dump(mode="json", exclude={"function"})  # its path may have moved
    if isinstance(config, PythonConfig | GameConfig):
        yield config.function.rpartition(":")[2]
        what = "game" if isinstance(config, GameConfig) else "scorer"
        yield read_source(config.function, what=what)
