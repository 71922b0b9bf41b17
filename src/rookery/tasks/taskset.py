"""Tasksets: tasks with their scorer, sampling parameters and splits.

load_taskset(JsonlConfig(path="gsm8k.jsonl", scorer=NumericConfig()))
load_taskset_file("gsm8k.jsonl")                              guesses fields and scorer
load_taskset_file("gsm8k.jsonl?bad_rows=skip&limit=100")      sets any config value
load_taskset_file("gsm8k.yaml")                               a TasksetConfig
load_taskset_file("hf://datasets/openai/gsm8k?subset=main&split=test")
load_taskset_file("generated:arithmetic?size=500&seed=1")
"""

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl

from pydantic import Field, field_validator, model_validator

from rookery.config import Config, override, parse_config, read_document
from rookery.errors import ConfigError, TaskError, did_you_mean, near_path
from rookery.paths import expanded
from rookery.tasks.files import LOCAL_FORMATS, read_dataset, read_jsonl
from rookery.tasks.generators import GENERATORS, generate
from rookery.tasks.python_function import function_from_folder
from rookery.tasks.rows import FieldsConfig, Row, RowReader
from rookery.tasks.scorers import (
    ChoiceConfig,
    ExactConfig,
    NumericConfig,
    PythonConfig,
    ScorerConfig,
)
from rookery.tasks.splits import (
    SplitName,
    SplitsConfig,
    content_key,
    hash_fraction,
    latest_splits,
    question_of,
    split_key,
    split_of,
)
from rookery.tasks.template import check_prompt_template
from rookery.types import SamplingParams, Task

__all__ = [
    "BadRows",
    "BadRowsPolicy",
    "GeneratedConfig",
    "HfConfig",
    "JsonlConfig",
    "ReadTask",
    "SamplingConfig",
    "SkippedRows",
    "Taskset",
    "TasksetConfig",
    "from_folder",
    "join_splits",
    "load_taskset",
    "load_taskset_file",
    "load_tasksets",
    "options_start",
    "read_tasks",
    "taskset_config",
]


BadRowsPolicy = Literal["refuse", "skip"]

NUM_EXAMPLES = 3
"""Error messages about bad rows that are kept: enough to see a pattern, few enough to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
    """A task with the place and fields of its row."""

    task: Task
    where: str
    """Place for error messages: "data.jsonl line 17"."""
    fields: Mapping[str, object]
    """Fields that a prompt may show: without the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRows:
    """Counts of the skipped rows and of all rows, and the first NUM_EXAMPLES error messages."""

    num_skipped: int = 0
    num_rows: int = 0
    examples: tuple[str, ...] = ()


class BadRows:
    """Collects the unusable rows while a taskset is read."""

    def __init__(self) -> None:
        self._count = 0
        self._examples: list[str] = []

    def add(self, error: TaskError) -> None:
        self._count += 1
        if len(self._examples) < NUM_EXAMPLES:
            self._examples.append(f"{str(error).rstrip('.')}.")

    def settle(self, policy: BadRowsPolicy, *, num_good: int) -> SkippedRows:
        """Return the skipped rows; TaskError if the policy refuses them or no good row is left."""
        num_rows = self._count + num_good
        if self._count and not num_good:
            raise TaskError(
                f"{self._examples[0]} None of {num_rows:,} rows can be used: check which fields "
                "they have, fields and scorer."
            )
        if self._count and policy == "refuse":
            raise TaskError(
                f"{self._examples[0]} {self._count:,} of {num_rows:,} rows cannot be used: fix "
                "them, or leave them out with bad_rows: skip in the taskset's config "
                "(FILE?bad_rows=skip on the command line)."
            )
        return SkippedRows(
            num_skipped=self._count, num_rows=num_rows, examples=tuple(self._examples)
        )


def read_tasks(
    rows: Iterable[Row],
    *,
    fields: FieldsConfig,
    prompt_template: str,
    source: str,
    bad: BadRows,
    complaint: Callable[[Task], str],
) -> list[ReadTask]:
    """Return the tasks of all usable rows; add the errors of the others to `bad`.

    The first row that can be read and whose task has no `complaint` determines the fields.
    """
    settled: RowReader | None = None
    read: list[ReadTask] = []
    places: dict[str, str] = {}
    counts: Counter[str] = Counter()
    grouped: dict[str, tuple[str, str]] = {}
    for row in rows:
        try:
            reader = settled or RowReader(fields, prompt_template=prompt_template, first=row)
            task = reader.read(row, source=source)
            name = task.id
            if counts[name]:
                task = _renamed(task, row, counts[name], places, has_ids=reader.has_ids)
            if settled is None and (words := complaint(task)):
                raise TaskError(f"{row.where}: {words}")
            _require_one_group(grouped, task, row)
        except TaskError as error:
            bad.add(error)
            continue
        settled = reader
        counts[name] += 1
        places[task.id] = row.where
        read.append(ReadTask(task=task, where=row.where, fields=reader.open_fields(row)))
    return read


def _renamed(task: Task, row: Row, count: int, places: Mapping[str, str], *, has_ids: bool) -> Task:
    """Number a row whose content occurred `count` times before; TaskError if the row has an id."""
    if has_ids:
        name = task.id.removeprefix(f"{task.source}/")
        raise TaskError(
            f"{row.where}: the id {name!r} is taken by {places[task.id]}. Ids must differ: "
            "fields: {id: null} makes them from the content."
        )
    return dataclasses.replace(task, id=f"{task.id}-{count + 1}")


def _require_one_group(grouped: dict[str, tuple[str, str]], task: Task, row: Row) -> None:
    before, where = grouped.setdefault(content_key(task), (task.group, row.where))
    if before != task.group:
        what = "prompt and choices" if task.choices else "prompt"
        raise TaskError(
            f"{row.where}: has the {what} of {where} and another group ({task.group}, there "
            f"{before}), and would be in two splits: give both rows one group."
        )


class SamplingConfig(Config):
    """How a taskset's answers are sampled; greedy by default."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature; 0 is greedy. Training loops set their own."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most likely tokens whose probabilities sum to this; 1 keeps every token."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0 keeps every token."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens whose probability is below this fraction of the most likely token's."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer. They are not part of the answer."""

    def params(self) -> SamplingParams:
        return SamplingParams(**self.model_dump())


class TasksetOptions(Config):
    """Options of every kind of taskset."""

    name: str = ""
    """Prefix of the task ids. Empty: the name of the file, the dataset or the generator."""
    scorer: ScorerConfig | None = None
    """How answers are judged. Empty: the generator's scorer; for data, `choice` if rows have
    choices, `numeric` if every reference has a `####`, else `exact`."""
    sampling: SamplingConfig = SamplingConfig()
    weight: float = Field(default=1.0, gt=0.0)
    """Weight of this taskset in means over several tasksets."""
    splits: SplitsConfig = SplitsConfig()
    limit: int | None = Field(default=None, ge=1)
    """Keep at most this many tasks, drawn pseudo-randomly and independently of row order."""


class RowsOptions(TasksetOptions):
    """Additional options of tasksets made of rows."""

    fields: FieldsConfig = FieldsConfig()
    bad_rows: BadRowsPolicy = "refuse"
    """Action on unusable rows (a missing field, a repeated id, a reference that the scorer cannot
    judge). `refuse` stops loading; `skip` leaves them out and reports how many."""
    prompt_template: str = ""
    """jinja2 template over the row's fields: `Q: {{ question }}\\nA:`. It makes the prompt and
    replaces fields.prompt and fields.messages."""

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
    """Path of the file, relative to the current folder or to the folder of the config file."""


class HfConfig(RowsOptions):
    """A Hugging Face dataset."""

    type: Literal["hf"] = "hf"
    dataset: str = Field(min_length=1)
    """Id on the hub, such as openai/gsm8k; or a local csv, json, jsonl or parquet file, a folder of
    such files, or a folder written by `save_to_disk`."""
    subset: str = ""
    """Configuration of the dataset if it has several: `main`."""
    split: str = "train"
    """Split of the dataset to load, which is then divided into search, select and report."""
    key: str = ""
    """Name of the list of rows in a .json file with several lists: `test`."""


class GeneratedConfig(TasksetOptions):
    """Tasks generated from a seed."""

    type: Literal["generated"] = "generated"
    generator: str
    """Name of the generator: arithmetic, letter-reversal, ... (the keys of `GENERATORS`)."""
    size: int = Field(default=200, ge=1)
    """Number of tasks. A larger size with the same seed contains the tasks of a smaller one."""
    seed: int = 0
    """Seed of the random order from which the first `size` tasks are taken."""

    @field_validator("generator")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in GENERATORS:
            hint = did_you_mean(value, GENERATORS)
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
    """Tasks in the order of their rows, and everything needed to sample and judge answers."""

    name: str
    tasks: tuple[Task, ...]
    scorer: ScorerConfig
    sampling: SamplingParams = field(default_factory=lambda: SamplingConfig().params())
    weight: float = 1.0
    splits: SplitsConfig = field(default_factory=SplitsConfig)
    skipped: SkippedRows = field(default_factory=SkippedRows)
    moved: Mapping[str, SplitName] = field(default_factory=dict)
    """Task id -> new split, for tasks that `join_splits` moved."""
    fields: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Task id -> fields of its row except the reference; empty unless loaded `with_fields`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a report must show: about skipped rows and moved tasks."""
        notes = []
        if self.skipped.num_skipped:
            notes.append(
                f"{self.name}: {self.skipped.num_skipped:,} of {self.skipped.num_rows:,} rows were "
                f"skipped. The first: {' '.join(self.skipped.examples)}"
            )
        if self.moved:
            num_unused = sum(not self.splits.fraction(split) for split in self.moved.values())
            unused = f" ({num_unused:,} are left out: that split has fraction 0)"
            notes.append(
                f"{self.name}: {len(self.moved):,} of {len(self.tasks):,} tasks are in a later "
                "split than its own fractions give, because another taskset of this run has the "
                f"same question there{unused if num_unused else ''}. Equal splits move none."
            )
        return tuple(notes)

    def split(self, name: SplitName | Literal["all"]) -> tuple[Task, ...]:
        """Return the tasks of one split; "all" is for uses without a search, such as an evaluation.

        A split of fraction 0 is empty. TaskError if any other split is empty.
        """
        if name == "all":
            return self.tasks
        if self.splits.fraction(name) == 0.0:
            return ()
        chosen = tuple(
            task for task in self.tasks if (self.moved.get(task.id) or self.own_split(task)) == name
        )
        if not chosen:
            others = f", {len(self.moved)} moved for another taskset" if self.moved else ""
            raise TaskError(
                f"Taskset {self.name} has {len(self.tasks)} tasks and none of them falls into its "
                f"{name} split ({self.splits.fraction(name):g} of them{others}): "
                f"{self._why_few_questions()}add rows, or set splits.{name} to 0."
            )
        return chosen

    def _why_few_questions(self) -> str:
        num_questions = len({question_of(task) for task in self.tasks})
        if num_questions == len(self.tasks) or any(task.group for task in self.tasks):
            return ""
        return (
            f"rows of equal prompt are one question, in one split, and there are {num_questions} "
            "prompts. If such rows are different questions, name the field that tells them apart "
            "as fields.group, which then decides; else "
        )

    def own_split(self, task: Task) -> SplitName:
        """Return a task's split before `join_splits`."""
        return split_of(question_of(task), self.splits)

    def split_keys(self) -> list[tuple[str, ...]]:
        """Return the keys of each task; tasks that share a key are one question. A task's keys are
        its content, its group if any, and its prompt unless several groups share the prompt."""
        prompts = [f"prompt {split_key(task.prompt)}" for task in self.tasks]
        groups = defaultdict(set)
        for prompt, task in zip(prompts, self.tasks, strict=True):
            groups[prompt].add(task.group)
        return [
            (
                f"content {content_key(task)}",
                *([f"group {task.group}"] if task.group else []),
                *([prompt] if len(groups[prompt]) == 1 else []),
            )
            for prompt, task in zip(prompts, self.tasks, strict=True)
        ]


def load_taskset(config: TasksetConfig, *, with_fields: bool = False) -> Taskset:
    """Read and check a taskset; `bad_rows` decides about unusable rows. `with_fields` keeps the
    rows' other fields, for prompts that are written later."""
    taskset, fields = _load(config)
    return dataclasses.replace(taskset, fields=fields) if with_fields else taskset


def _load(config: TasksetConfig) -> tuple[Taskset, dict[str, Mapping[str, object]]]:
    bad = BadRows()
    match config:
        case JsonlConfig():
            path = expanded(config.path)
            rows = read_jsonl(path, on_bad=bad.add)
            return _assemble(config, rows, bad, name=path.stem, origin=str(path))
        case HfConfig():
            dataset, name = config.dataset, Path(config.dataset).stem
            names = {"subset": config.subset, "split": config.split, "key": config.key}
            rows = read_dataset(dataset, **names, on_bad=bad.add)
            return _assemble(config, rows, bad, name=name, origin=dataset)
        case GeneratedConfig():
            rows = generate(config.generator, size=config.size, seed=config.seed)
            return _assemble(config, rows, bad, name=config.generator, origin=config.generator)


def load_tasksets(configs: Iterable[TasksetConfig]) -> list[Taskset]:
    """Load the tasksets of one run, with shared questions in the same split (`join_splits`)."""
    return join_splits([load_taskset(config) for config in configs])


def join_splits(tasksets: Sequence[Taskset]) -> list[Taskset]:
    """Place every question in the same split of all tasksets: the latest that any assigns to it.

    The order is search, select, report: no taskset searches on a question that another reports on.
    Tasks with equal prompts or groups are one question; a prompt that several groups of a taskset
    share does not count. Idempotent.
    """
    splits = [taskset.own_split(task) for taskset in tasksets for task in taskset.tasks]
    keys = [row for taskset in tasksets for row in taskset.split_keys()]
    placed = iter(zip(splits, latest_splits(keys, splits), strict=True))
    joined = []
    for taskset in tasksets:
        pairs = {task.id: next(placed) for task in taskset.tasks}
        moved = {name: after for name, (before, after) in pairs.items() if after != before}
        joined.append(dataclasses.replace(taskset, moved=moved))
    return joined


def load_taskset_file(path_or_spec: str, *, with_fields: bool = False) -> Taskset:
    """Load a taskset from a command-line name: a file, `hf://datasets/ID` or `generated:NAME`."""
    return load_taskset(taskset_config(path_or_spec), with_fields=with_fields)


def _assemble(
    config: TasksetConfig, rows: Iterable[Row], bad: BadRows, *, name: str, origin: str
) -> tuple[Taskset, dict[str, Mapping[str, object]]]:
    """Return the taskset, and the fields of each task's row by task id."""
    name = config.name or name
    options = RowsOptions() if isinstance(config, GeneratedConfig) else config
    read = read_tasks(
        rows,
        fields=options.fields,
        prompt_template=options.prompt_template,
        source=name,
        bad=bad,
        complaint=lambda task: _scorer(config, [task], is_all=False).complaint(task),
    )
    scorer = _scorer(config, [item.task for item in read])
    good: list[ReadTask] = []
    for item in read:
        complaint = scorer.complaint(item.task)
        if complaint:
            bad.add(TaskError(f"{item.where}: {complaint}"))
        else:
            good.append(item)
    skipped = bad.settle(options.bad_rows, num_good=len(good))
    if not good:
        raise TaskError(f"{origin} has no rows; a taskset needs at least one.")
    good = [item for item in good if item.task.weight > 0]
    if not good:
        raise TaskError(
            f"{origin}: all rows have the weight 0, which leaves nothing to learn from."
        )
    if config.limit is not None and config.limit < len(good):
        good = _draw(good, config.limit)
    if hidden := config.splits.hidden:
        good = [g for g in good if split_of(question_of(g.task), config.splits) not in hidden]
    taskset = Taskset(
        name=name,
        tasks=tuple(item.task for item in good),
        scorer=scorer,
        sampling=config.sampling.params(),
        weight=config.weight,
        splits=config.splits,
        skipped=skipped,
    )
    return taskset, {item.task.id: item.fields for item in good}


def _scorer(config: TasksetConfig, tasks: Sequence[Task], is_all: bool = True) -> ScorerConfig:
    if config.scorer is not None:
        return config.scorer
    if isinstance(config, GeneratedConfig):
        return GENERATORS[config.generator].scorer
    if any(task.choices for task in tasks):
        return ChoiceConfig()
    numbered = [isinstance(task.reference, str) and "####" in task.reference for task in tasks]
    return NumericConfig() if is_all and all(numbered) else ExactConfig()


def _draw(read: Sequence[ReadTask], limit: int) -> list[ReadTask]:
    # Draw by id, not by the hash that decides splits: a limit would keep only the search split.
    ids = [item.task.id for item in read]
    kept = set(sorted(ids, key=lambda name: (hash_fraction(name, salt="limit"), name))[:limit])
    return [item for item in read if item.task.id in kept]


def taskset_config(spec: str) -> TasksetConfig:
    """Return the config for a command-line name of a taskset."""
    kind, _, rest = spec.partition(":")
    if kind == "generated":
        name, pairs = _query(rest)
        return _parsed(kind, {"generator": name}, pairs, spec)
    if kind == "hf":
        dataset, pairs = _query(rest.removeprefix("//datasets/"))
        if not rest.startswith("//datasets/") or not dataset:
            raise TaskError(f"Got {spec!r}; a dataset of the hub is hf://datasets/ID.")
        return _parsed("hf", {"dataset": dataset}, pairs, spec)
    end = options_start(spec)
    path, pairs = expanded(spec[:end]), parse_qsl(spec[end + 1 :])
    if not path.exists():
        raise TaskError(
            f"There is no taskset {spec}.{near_path(path)} A taskset is a .jsonl, .csv, .json or "
            ".parquet file of rows, a .yaml or .toml config, hf://datasets/ID or generated:NAME."
        )
    if path.suffix == ".jsonl":
        return _parsed("jsonl", {"path": path}, pairs, spec)
    if path.suffix in LOCAL_FORMATS or path.is_dir():
        return _parsed("hf", {"dataset": str(path)}, pairs, spec)
    return _read_config(path, pairs)


def options_start(spec: str, folder: Path = Path()) -> int:
    """Return the index of the `?` before the options; the length if there are none. File names may
    contain `?`: the longest existing path is the name."""
    ends = [place for place, char in enumerate(spec) if char == "?"]
    there = (end for end in (len(spec), *ends) if end and _exists(folder, spec[:end]))
    return next(there, ends[0] if ends else len(spec))


def _exists(folder: Path, name: str) -> bool:
    return os.path.exists(folder / os.path.expanduser(name))  # False for names that are too long


def _query(text: str) -> tuple[str, list[tuple[str, str]]]:
    """`gsm8k?subset=main&fields.id=null` -> "gsm8k", [("subset", "main"), ("fields.id", "null")]"""
    value, _, query = text.partition("?")
    return value, parse_qsl(query)


def _parsed(
    kind: str, document: dict[str, Any], pairs: Sequence[tuple[str, str]], origin: str
) -> TasksetConfig:
    override(KINDS[kind], document, pairs)
    return parse_config(KINDS[kind], document, origin=origin)


def _read_config(path: Path, pairs: Sequence[tuple[str, str]]) -> TasksetConfig:
    document = read_document(path)
    kind = dict(pairs).get("type", document.get("type"))
    if kind not in KINDS:
        problem = "is missing" if kind is None else f"is {kind!r}"
        raise ConfigError(f"{path}: type {problem}; write type: and one of {', '.join(KINDS)}.")
    return from_folder(_parsed(kind, document, pairs, str(path)), path.parent)


def from_folder(config: TasksetConfig, folder: Path) -> TasksetConfig:
    """Resolve the paths in a config relative to a folder."""
    update: dict[str, object] = {}
    if isinstance(config, JsonlConfig):
        update["path"] = expanded(config.path, folder).resolve()
    elif isinstance(config, HfConfig) and (folder / config.dataset).exists():
        update["dataset"] = str((folder / config.dataset).resolve())
    if isinstance(config.scorer, PythonConfig):
        function = function_from_folder(config.scorer.function, folder)
        update["scorer"] = config.scorer.model_copy(update={"function": function})
    return config.model_copy(update=update)
