"""Tasksets: many tasks with their scorer, their sampling and their splits.

load_taskset(JsonlConfig(path="gsm8k.jsonl", scorer=NumericConfig()))
load_taskset_file("gsm8k.jsonl")                              guesses fields and scorer
load_taskset_file("gsm8k.yaml")                               a TasksetConfig
load_taskset_file("hf://datasets/openai/gsm8k?subset=main&split=test")
load_taskset_file("generated:arithmetic?size=500&seed=1")
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl

from pydantic import Field, field_validator, model_validator

from rookery.config import Config, parse_config, read_document
from rookery.errors import ConfigError, TaskError
from rookery.tasks.generators import GENERATORS, generate
from rookery.tasks.huggingface import LOCAL_FORMATS, read_dataset
from rookery.tasks.jsonl import near_name, read_jsonl
from rookery.tasks.prompt_template import check_prompt_template
from rookery.tasks.rows import FieldsConfig, Row, RowReader
from rookery.tasks.scorers import (
    ChoiceConfig,
    ExactConfig,
    NumericConfig,
    PythonConfig,
    ScorerConfig,
)
from rookery.tasks.splits import SplitName, SplitsConfig, hash_fraction, split_key, split_of
from rookery.types import SamplingParams, Task

__all__ = [
    "GeneratedConfig",
    "HfConfig",
    "JsonlConfig",
    "SamplingConfig",
    "Taskset",
    "TasksetConfig",
    "from_folder",
    "load_taskset",
    "load_taskset_file",
]


class SamplingConfig(Config):
    """How the answers of a taskset are drawn; greedy unless told."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """0 is greedy. Training loops set their own."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the most likely tokens that make up this much; 1 keeps every token."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many most likely tokens; 0 keeps every token."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this part of the most likely one."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer, and are not part of it."""

    def params(self) -> SamplingParams:
        return SamplingParams(**self.model_dump())


class TasksetOptions(Config):
    """What every kind of taskset has."""

    name: str = ""
    """Begins the ids of its tasks. Empty: the name of the file, the dataset or the generator."""
    scorer: ScorerConfig | None = None
    """Empty: the generator's own; for data, `choice` when rows have choices, `numeric` when every
    reference has a `####`, else `exact`."""
    sampling: SamplingConfig = SamplingConfig()
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Its part in a mean over several tasksets."""
    splits: SplitsConfig = SplitsConfig()
    limit: int | None = Field(default=None, ge=1)
    """At most this many tasks, a fixed random draw of them that does not depend on row order."""


class RowsOptions(TasksetOptions):
    """What tasksets made of rows have besides."""

    fields: FieldsConfig = FieldsConfig()
    prompt_template: str = ""
    """jinja2 over the row's fields, `Q: {{ question }}\\nA:`; it makes the prompt in place of
    fields.prompt and fields.messages."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if self.prompt_template and (self.fields.prompt or self.fields.messages):
            raise ValueError(
                "prompt_template makes the prompt, and fields.prompt or fields.messages names it "
                "too: give one of them"
            )
        if self.prompt_template:
            check_prompt_template(self.prompt_template)
        return self


class JsonlConfig(RowsOptions):
    """A file of JSON lines."""

    type: Literal["jsonl"] = "jsonl"
    path: Path
    """From the current folder; in a config file, from the folder of that file."""


class HfConfig(RowsOptions):
    """A Hugging Face dataset."""

    type: Literal["hf"] = "hf"
    dataset: str = Field(min_length=1)
    """Its id on the hub, such as openai/gsm8k, or a local csv, json, jsonl or parquet file, or a
    folder of them or of `save_to_disk`."""
    subset: str = ""
    """Its configuration, where it has several: `main`."""
    split: str = "train"
    """The dataset's own split, which is then split into search, select and report."""


class GeneratedConfig(TasksetOptions):
    """Tasks made from a seed."""

    type: Literal["generated"] = "generated"
    generator: str
    """arithmetic, letter-reversal, ...: the keys of `GENERATORS`."""
    size: int = Field(default=200, ge=1)
    """How many tasks. A larger size with the same seed has the smaller one's tasks and more."""
    seed: int = 0

    @field_validator("generator")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in GENERATORS:
            near = difflib.get_close_matches(value, GENERATORS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{value!r} is not a generator.{hint} There are {', '.join(GENERATORS)}"
            )
        return value


TasksetConfig = Annotated[GeneratedConfig | HfConfig | JsonlConfig, Field(discriminator="type")]

KINDS: dict[str, type[GeneratedConfig | HfConfig | JsonlConfig]] = {
    "generated": GeneratedConfig,
    "hf": HfConfig,
    "jsonl": JsonlConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taskset:
    """Tasks in the order of their rows, and all that is needed to put and judge them."""

    name: str
    tasks: tuple[Task, ...]
    scorer: ScorerConfig
    sampling: SamplingParams = field(default_factory=lambda: SamplingConfig().params())
    weight: float = 1.0
    splits: SplitsConfig = field(default_factory=SplitsConfig)
    groups: Mapping[str, str] = field(default_factory=dict)
    """By task id, where the rows have groups: it decides the split in place of the prompt."""

    def split(self, name: SplitName | Literal["all"]) -> tuple[Task, ...]:
        """The tasks of one split; "all" is for tasks of no search, such as a plain evaluation.

        A split of fraction 0 is empty. One that should have tasks and has none is a TaskError.
        """
        if name == "all":
            return self.tasks
        chosen = tuple(task for task in self.tasks if self._split_of(task) == name)
        if not chosen and self.splits.fraction(name) > 0.0:
            raise TaskError(
                f"Taskset {self.name} has {len(self.tasks)} tasks and none of them falls into its "
                f"{name} split ({self.splits.fraction(name):g} of them): add rows, or set "
                f"splits.{name} to 0."
            )
        return chosen

    def _split_of(self, task: Task) -> SplitName:
        return split_of(self.groups.get(task.id) or split_key(task.prompt), self.splits)


def load_taskset(config: TasksetConfig) -> Taskset:
    """Read, check and split a taskset. The first bad row ends it with a TaskError."""
    match config:
        case JsonlConfig():
            path = config.path.expanduser()
            return _assemble(config, read_jsonl(path), name=path.stem, origin=str(path))
        case HfConfig():
            rows = read_dataset(config.dataset, subset=config.subset, split=config.split)
            name = Path(config.dataset).stem
            return _assemble(config, rows, name=name, origin=config.dataset)
        case GeneratedConfig():
            rows = generate(config.generator, size=config.size, seed=config.seed)
            return _assemble(config, rows, name=config.generator, origin=config.generator)


def load_taskset_file(path_or_spec: str) -> Taskset:
    """A taskset as the command line names one: a file, `hf://datasets/ID` or `generated:NAME`."""
    return load_taskset(_config_of(path_or_spec))


def _assemble(config: TasksetConfig, rows: Iterable[Row], *, name: str, origin: str) -> Taskset:
    name = config.name or name
    tasks, groups, places = _read_tasks(config, rows, name=name)
    if not tasks:
        raise TaskError(f"{origin} has no rows; a taskset needs at least one.")
    scorer = config.scorer or _usual_scorer(config, tasks)
    for task in tasks:
        complaint = scorer.complaint(task)
        if complaint:
            raise TaskError(f"{places[task.id]}: {complaint}.")
    if config.limit is not None and config.limit < len(tasks):
        tasks = _draw(tasks, config.limit)
    return Taskset(
        name=name,
        tasks=tuple(tasks),
        scorer=scorer,
        sampling=config.sampling.params(),
        weight=config.weight,
        splits=config.splits,
        groups={task.id: groups[task.id] for task in tasks if groups[task.id]},
    )


def _read_tasks(
    config: TasksetConfig, rows: Iterable[Row], *, name: str
) -> tuple[list[Task], dict[str, str], dict[str, str]]:
    """The tasks, their groups and the places they came from, by id."""
    fields = FieldsConfig() if isinstance(config, GeneratedConfig) else config.fields
    prompt_template = "" if isinstance(config, GeneratedConfig) else config.prompt_template
    reader: RowReader | None = None
    tasks: list[Task] = []
    groups: dict[str, str] = {}
    places: dict[str, str] = {}
    grouped: dict[str, tuple[str, str]] = {}
    for row in rows:
        reader = reader or RowReader(fields, prompt_template=prompt_template, first=row)
        task = reader.read(row, source=name)
        if task.id in places:
            task = _renamed(task, row, places, has_ids=reader.has_ids)
        group = reader.group(row)
        before, where = grouped.setdefault(split_key(task.prompt), (group, row.where))
        if before != group:
            raise TaskError(
                f"{row.where}: has the prompt of {where} and another group ({group}, there "
                f"{before}), and would be in two splits: give both rows one group."
            )
        tasks.append(task)
        groups[task.id], places[task.id] = group, row.where
    return tasks, groups, places


def _renamed(task: Task, row: Row, places: Mapping[str, str], *, has_ids: bool) -> Task:
    """A row that is there twice gets the next free number; a given id twice is an error."""
    if has_ids:
        name = task.id.removeprefix(f"{task.source}/")
        raise TaskError(
            f"{row.where}: the id {name!r} is already that of {places[task.id]}. Ids must differ."
        )
    count = 2
    while f"{task.id}-{count}" in places:
        count += 1
    return dataclasses.replace(task, id=f"{task.id}-{count}")


def _usual_scorer(config: TasksetConfig, tasks: Sequence[Task]) -> ScorerConfig:
    if isinstance(config, GeneratedConfig):
        return GENERATORS[config.generator].scorer
    if any(task.choices for task in tasks):
        return ChoiceConfig()
    if all(isinstance(task.reference, str) and "####" in task.reference for task in tasks):
        return NumericConfig()
    return ExactConfig()


def _draw(tasks: Sequence[Task], limit: int) -> list[Task]:
    # By id and not by what decides the split: else a limit would draw the search split alone.
    kept = sorted(tasks, key=lambda task: (hash_fraction(task.id, salt="limit"), task.id))[:limit]
    ids = {task.id for task in kept}
    return [task for task in tasks if task.id in ids]


def _config_of(spec: str) -> TasksetConfig:
    kind, _, rest = spec.partition(":")
    if kind == "generated":
        return parse_config(GeneratedConfig, _query(rest, key="generator"), origin=spec)
    if kind == "hf":
        dataset = rest.removeprefix("//datasets/")
        if not rest.startswith("//datasets/") or not dataset:
            raise TaskError(f"Got {spec!r}; a dataset of the hub is hf://datasets/ID.")
        return parse_config(HfConfig, _query(dataset, key="dataset"), origin=spec)
    path = Path(spec).expanduser()
    if not path.exists():
        raise TaskError(
            f"There is no taskset {spec}.{near_name(path)} A taskset is a .jsonl, .csv, .json or "
            ".parquet file of rows, a .yaml or .toml config, hf://datasets/ID or generated:NAME."
        )
    if path.suffix == ".jsonl":
        return JsonlConfig(path=path)
    if path.suffix in LOCAL_FORMATS or path.is_dir():
        return HfConfig(dataset=str(path))
    return _read_config(path)


def _query(text: str, *, key: str) -> dict[str, str]:
    """`gsm8k?subset=main` -> {key: "gsm8k", "subset": "main"}"""
    value, _, query = text.partition("?")
    return {**dict(parse_qsl(query)), key: value}


def _read_config(path: Path) -> TasksetConfig:
    document = read_document(path)
    kind = document.get("type")
    if kind not in KINDS:
        given = "is missing" if kind is None else f"is {kind!r}"
        raise ConfigError(f"{path}: type {given}; write type: and one of {', '.join(KINDS)}.")
    return from_folder(parse_config(KINDS[kind], document, origin=str(path)), path.parent)


def from_folder(config: TasksetConfig, folder: Path) -> TasksetConfig:
    """The config with the paths in it taken from the folder of its file."""
    update: dict[str, object] = {}
    if isinstance(config, JsonlConfig):
        update["path"] = (folder / config.path.expanduser()).resolve()
    elif isinstance(config, HfConfig) and (folder / config.dataset).exists():
        update["dataset"] = str((folder / config.dataset).resolve())
    if isinstance(config.scorer, PythonConfig):
        place, _, name = config.scorer.function.rpartition(":")
        if place.endswith(".py"):
            update["scorer"] = PythonConfig(function=f"{(folder / place).resolve()}:{name}")
    return config.model_copy(update=update)
