"""What can be refused is refused here, before the first candidate is asked anything."""

import re
from collections.abc import Mapping, Sequence

from rookery.errors import AdapterError, ConfigError, TaskError
from rookery.loops.genome.config import GenomeConfig
from rookery.loops.genome.founders import FileInit
from rookery.loops.genome.stages import CmaesStage
from rookery.ports import Engine
from rookery.rollout import TasksetEvaluator
from rookery.search.es import load_library
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset
from rookery.types import Adapter

__all__ = ["check_inputs", "check_tasks"]

OWN_NAMES = re.compile(r"(s\d+-)?(i\d+-)?([gemnr]\d{3,}-.*|r\d{4,})|uniform-average|plain-sum")
"""Names that the search gives to candidates of its own."""

MIN_REPORT_TASKS = 2
"""Of each taskset: one task shows no spread, and so has no interval."""


def check_inputs(
    config: GenomeConfig,
    *,
    founders: Mapping[str, Adapter],
    tasksets: Sequence[Taskset],
    engine: Engine,
) -> None:
    """Raise the first thing that would make the run fail, or its result mean nothing."""
    _check_founders(config, founders)
    _check_rank(config, founders, max_rank=engine.max_rank)
    _check_splits(tasksets)
    _check_names(config, tasksets)


def check_tasks(
    evaluator: TasksetEvaluator, tasksets: Sequence[Taskset], *, context_tokens: int | None
) -> None:
    """TaskError when a task of any split cannot be answered in the engine's context."""
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
        what = "init.use: " + init.use if isinstance(init, FileInit) and uses_pairs else "cmaes"
        raise ConfigError(
            f"{what} combines founders, and there is only one: add an adapter to the founders, or "
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
    if not any(taskset.split("report") for taskset in tasksets):
        raise TaskError(
            "No taskset has tasks of the report split: give at least one splits.report above 0."
        )


def _check_names(config: GenomeConfig, tasksets: Sequence[Taskset]) -> None:
    searched = {taskset.name for taskset in tasksets if taskset.split("search")}
    for name in sorted(config.floors):
        if name not in searched:
            raise ConfigError(
                f"floors names {name!r}, and no taskset of that name has search tasks; there are "
                f"{', '.join(sorted(searched))}."
            )
