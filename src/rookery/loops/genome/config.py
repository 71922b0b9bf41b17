"""Config of a genome run, and the checks before the first request."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import EngineChoice, engine_from_folder, local_model
from rookery.errors import AdapterError, ConfigError, TaskError
from rookery.loops.comparison import ReportConfig
from rookery.loops.genome.final_report import FinalConfig
from rookery.loops.genome.founders import FileInit, InitConfig
from rookery.loops.genome.stages import (
    CmaesStage,
    EsStage,
    GaStage,
    RandomStage,
    StageConfig,
    SurrogateStage,
)
from rookery.paths import expanded
from rookery.ports import Engine
from rookery.rollout import TasksetEvaluator
from rookery.runs.budget import BudgetConfig
from rookery.runs.trackers import TrackerName
from rookery.search.candidate import COMBINATIONS
from rookery.search.es import load_library
from rookery.search.merit import Merit
from rookery.search.racing import RaceConfig
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, TasksetConfig, from_folder
from rookery.types import Adapter
from rookery.weights.merge import (
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
)
from rookery.weights.mutate import GaussianConfig

__all__ = ["MERGES", "MUTATIONS", "GenomeConfig", "check_inputs", "check_tasks"]


MERGES: Mapping[str, MergeConfig] = {
    "linear": LinearConfig(),
    "sum": LinearConfig(normalise=False),
    "ties": TiesConfig(),
    "dare": DareConfig(),
    "dare_ties": DareTiesConfig(),
    "layerwise": LayerwiseConfig(),
    "layers": LayerwiseConfig(unit="layer"),
    "mixture": LayerwiseConfig(mode="mix", unit="layer"),
}
"""Crossovers that operators can name. A config may change them or add more."""

MUTATIONS: Mapping[str, GaussianConfig] = {"gaussian": GaussianConfig()}


class GenomeConfig(Config):
    """Config of one evolution of LoRA adapters."""

    engine: EngineChoice = EngineConfig()
    """The engine that answers: embedded, or a fleet of vLLM servers."""
    tokenizer: str = ""
    """A model folder or Hugging Face id. Empty: the engine's model. Required for servers by URL."""
    init: InitConfig
    """The adapters to start from."""
    tasksets: tuple[TasksetConfig, ...] = Field(min_length=1)
    """Tasks to search, select and report on."""
    stages: tuple[StageConfig, ...] = (
        RandomStage(count=10),
        SurrogateStage(generations=8, population=5),
    )
    """The search stages, in order. Default: random sums of the founders, then sums that a model of
    all answers so far expects to be good."""
    race: RaceConfig = RaceConfig()
    """Drops candidates that can no longer survive. `enabled: false` measures all on all tasks."""
    merit: Merit = "mixed"
    """Measure by which search, races and the final choice compare candidates: `reward`;
    `certainty`, the probability of the right choice, with less noise; `log_certainty`, its
    logarithm, which penalises confident mistakes; or `mixed`, the mean of the three, for tasks
    where certainty says little. Tasks without choices count by reward, as do floors and reports."""
    floors: dict[str, float | Literal["founder"]] = Field(default_factory=dict)
    """"Do not get worse on this taskset": a mean, or `founder` for the best founder's mean."""
    rank: int | None = Field(default=None, ge=1)
    """Rank of children; null: the founders' largest."""
    merges: dict[str, MergeConfig] = Field(default_factory=dict)
    """Crossovers to change or add, by name."""
    mutations: dict[str, GaussianConfig] = Field(default_factory=dict)
    """Mutations to change or add, by name."""
    merge_device: Literal["cpu", "cuda"] = "cpu"
    """Device on which children are made. `cuda`, the first GPU here, is for servers on this
    machine: `ties` and `dare` work on whole layers and keep CPU cores busy for seconds, which the
    servers need. It takes about 2 GB beside them. The last bits of a child depend on the device."""
    finals: FinalConfig = FinalConfig()
    report: ReportConfig = ReportConfig()
    """`{samples: 8}` draws 8 further answers per report task for pass@k, at the temperature of the
    taskset's `sampling`, or at 1 if that is greedy."""
    track: tuple[TrackerName, ...] = ()
    """Trackers that draw the run's curves: `tensorboard`, `trackio`, `wandb` (extra `track`)."""
    budget: BudgetConfig = BudgetConfig()
    """Limits that may end the search before its last generation."""
    seed: int = 0
    """Seed of all random numbers of the run."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        taken = sorted(COMBINATIONS & set(self.merges))
        if taken:
            raise ValueError(f"merges has {taken[0]!r}, a name of the search's own: write another")
        for stage in self.stages:
            if isinstance(stage, GaStage):
                _require(stage.merges, {*MERGES, *self.merges}, "crossover")
                _require(stage.mutations, {*MUTATIONS, *self.mutations}, "mutation")
        return self

    def from_folder(self, folder: Path) -> Self:
        """Return the config with its paths resolved against the folder of its file."""
        init = self.init
        if isinstance(init, FileInit):
            paths = tuple(expanded(path, folder).resolve() for path in init.paths)
            init = init.model_copy(update={"path": paths if len(paths) > 1 else paths[0]})
        tasksets = tuple(from_folder(taskset, folder) for taskset in self.tasksets)
        return self.model_copy(
            update={
                "engine": engine_from_folder(self.engine, folder),
                "tokenizer": local_model(self.tokenizer, folder),
                "init": init,
                "tasksets": tasksets,
            }
        )


def _require(names: set[str], known: set[str], what: str) -> None:
    unknown = sorted(names - known)
    if unknown:
        raise ValueError(
            f"{what} {unknown[0]!r} is not known; write one of {', '.join(sorted(known))}"
        )


OWN_NAMES = re.compile(r"(s\d+-)?(i\d+-)?([gemnr]\d{3,}-.*|r\d{4,})|uniform-average|plain-sum")
"""Names that the search gives to its own candidates."""

MIN_REPORT_TASKS = 2
"""Minimum per taskset: one task has no spread, so it gives no interval."""


def check_inputs(
    config: GenomeConfig,
    *,
    founders: Mapping[str, Adapter],
    tasksets: Sequence[Taskset],
    engine: Engine,
) -> None:
    """Raise the first error that would fail the run or make its result meaningless."""
    _check_founders(config, founders)
    _check_rank(config, founders, max_rank=engine.max_rank)
    _check_splits(tasksets)
    _check_names(config, tasksets)
    _check_steps(config, tasksets)


def check_tasks(
    evaluator: TasksetEvaluator, tasksets: Sequence[Taskset], *, context_tokens: int | None
) -> None:
    """Raise TaskError if a task of any split does not fit the engine's context."""
    if context_tokens is not None:
        tasks = [task for taskset in tasksets for name in SPLITS for task in taskset.split(name)]
        evaluator.check_lengths(tasks, context_tokens=context_tokens)


def _check_founders(config: GenomeConfig, founders: Mapping[str, Adapter]) -> None:
    for name in founders:
        if OWN_NAMES.fullmatch(name):
            raise AdapterError(
                f"A founder is called {name!r}, which is a name that the search gives to its own "
                "candidates: give its folder another name."
            )
    init = config.init
    uses_pairs = isinstance(init, FileInit) and init.use != "adapters"
    uses_cmaes = any(isinstance(stage, CmaesStage) for stage in config.stages)
    if uses_cmaes:
        load_library()
    if len(founders) < 2 and (uses_pairs or uses_cmaes):
        name = "init.use: " + init.use if isinstance(init, FileInit) and uses_pairs else "cmaes"
        raise ConfigError(
            f"{name} combines founders, and there is only one: add an adapter to the founders, or "
            + ("write init.use: adapters." if uses_pairs else "take another stage.")
        )


def _check_rank(config: GenomeConfig, founders: Mapping[str, Adapter], *, max_rank: int) -> None:
    rank = config.rank or max(adapter.rank for adapter in founders.values())
    if rank > max_rank:
        where = "rank" if config.rank else "the founders' rank, which children have,"
        raise ConfigError(
            f"{where} is {rank}, and the engine takes adapters up to rank {max_rank}: write rank: "
            f"{max_rank} or less, or raise the engine's limit."
        )


def _check_splits(tasksets: Sequence[Taskset]) -> None:
    if not any(taskset.split("search") and taskset.weight > 0 for taskset in tasksets):
        raise TaskError("The search split holds no tasks of a taskset with a weight above 0.")
    for taskset in tasksets:
        count = len(taskset.split("report"))
        if 0 < count < MIN_REPORT_TASKS:
            raise TaskError(
                f"The report split of {taskset.name!r} has {count} task, which gives no interval: "
                "add tasks, raise splits.report, or write splits.report: 0 to leave it out."
            )
    is_hidden = any("report" in taskset.splits.hidden for taskset in tasksets)
    if not is_hidden and not any(taskset.split("report") for taskset in tasksets):
        raise TaskError(
            "No taskset has tasks of the report split: give at least one splits.report above 0."
        )


def _check_steps(config: GenomeConfig, tasksets: Sequence[Taskset]) -> None:
    searched = [taskset.name for taskset in tasksets if taskset.split("search")]
    for stage in config.stages:
        count = stage.tasks_per_step if isinstance(stage, EsStage) else None
        if count is not None and count < len(searched):
            raise ConfigError(
                f"tasks_per_step is {count}, and {len(searched)} tasksets have search tasks, of "
                f"which every step needs one each: write {len(searched)} or more."
            )


def _check_names(config: GenomeConfig, tasksets: Sequence[Taskset]) -> None:
    searched = {taskset.name for taskset in tasksets if taskset.split("search")}
    for name in sorted(config.floors):
        if name not in searched:
            raise ConfigError(
                f"floors names {name!r}, and no taskset of that name has search tasks; there are "
                f"{', '.join(sorted(searched))}."
            )
